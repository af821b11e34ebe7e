"""A limit on the bytes held at one time: bodies that clients send, answers that they have not read. Pure."""


class Budget:
    """Every `take` needs a `give` of the same number. The bytes held never exceed `most`."""

    def __init__(self, most: int):
        self.most = most
        self.held = 0

    def take(self, size: int) -> bool:
        """Takes the bytes if there is room; returns whether there was."""
        if self.held + size > self.most:
            return False
        self.held += size
        return True

    def give(self, size: int) -> None:
        self.held -= size
        assert self.held >= 0, "the same bytes are not given back twice"
