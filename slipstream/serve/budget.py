"""Bytes that may be held at a time, for what clients send and for what they do not read. Pure."""


class Budget:
    """`take` and `give` by the same number; what is held is never more than `most`."""

    def __init__(self, most: int):
        self.most = most
        self.held = 0

    def take(self, size: int) -> bool:
        """Whether there is room, which is then taken."""
        if self.held + size > self.most:
            return False
        self.held += size
        return True

    def give(self, size: int) -> None:
        self.held -= size
        assert self.held >= 0, "nothing is given back twice"
