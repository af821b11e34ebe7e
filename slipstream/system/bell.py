"""A bell: a descriptor that one thread or process rings and another waits on."""

import os


class Bell:
    """An eventfd. Readable from a `ring` until the next `clear`; many rings before a `clear` are one."""

    def __init__(self, descriptor: int | None = None):
        """Takes over `descriptor`, which another process may share (`Bell.create`), or makes its own."""
        self._descriptor = self.create() if descriptor is None else descriptor

    @staticmethod
    def create() -> int:
        """The descriptor of a new bell, closed when another program is executed."""
        return os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def fileno(self) -> int:
        return self._descriptor

    def ring(self) -> None:
        """To be called after what it announces has been put in its place."""
        os.eventfd_write(self._descriptor, 1)

    def clear(self) -> None:
        """To be called before the last look at what was announced, so that nothing is left without a ring.

        A bell that has not been rung is no error: whoever looks may see a thing between its being put there and its ring.
        """
        try:
            os.eventfd_read(self._descriptor)
        except BlockingIOError:
            pass

    def close(self) -> None:
        os.close(self._descriptor)
