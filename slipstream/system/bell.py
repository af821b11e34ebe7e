"""A bell: a descriptor that one thread or process rings and another waits on."""

import os


class Bell:
    """An eventfd. Readable from a `ring` until the next `clear`; many rings before a `clear` are one."""

    def __init__(self, descriptor: int | None = None):
        """Takes over `descriptor`, which another process may share (`Bell.create`), or creates one."""
        self._descriptor = self.create() if descriptor is None else descriptor

    @staticmethod
    def create() -> int:
        """The descriptor of a new bell, closed when another program is executed."""
        return os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def fileno(self) -> int:
        return self._descriptor

    def ring(self) -> None:
        """Call it after the announced data is in place."""
        os.eventfd_write(self._descriptor, 1)

    def clear(self) -> None:
        """Call it before the last look at the announced data, so that none is left without a ring.

        Clearing a bell that has not rung is not an error: a reader may see data before its ring.
        """
        try:
            os.eventfd_read(self._descriptor)
        except BlockingIOError:
            pass

    def close(self) -> None:
        os.close(self._descriptor)
