"""Counters that each front end adds to and that are summed over all: doubles in shared memory, one block a front end.

Every process lays out its block in the same way, since all run the same code with the same configuration. A reader may see
one of an event's two numbers updated and the other not yet, as with any counters.
"""

import mmap
import os

BLOCK_BYTES = 1 << 14


class Cells:
    """A few neighbouring numbers: `own` is this front end's, `sums` are those of all front ends."""

    __slots__ = ("own", "_rows")

    def __init__(self, rows: "list[memoryview[float]]", own: "memoryview[float]"):
        self.own = own
        self._rows = rows

    def sums(self) -> list[float]:
        return [sum(column) for column in zip(*self._rows, strict=True)]


class SharedCounters:
    """The counters of front end `index` of `count`."""

    def __init__(self, fd: int | None = None, index: int = 0, count: int = 1):
        """fd: a memfd that all front ends map; None if there is only one."""
        fd = os.memfd_create("slipstream-tally", os.MFD_CLOEXEC) if fd is None else fd
        os.ftruncate(fd, count * BLOCK_BYTES)
        whole = memoryview(mmap.mmap(fd, count * BLOCK_BYTES))
        self._blocks = [whole[i * BLOCK_BYTES : (i + 1) * BLOCK_BYTES].cast("d") for i in range(count)]
        self._own = self._blocks[index]
        self._used = 0

    def cells(self, count: int) -> Cells:
        """The next `count` numbers; zero at first."""
        a, b = self._used, self._used + count
        assert b * 8 <= BLOCK_BYTES, "a block holds all of a front end's numbers"
        self._used = b
        return Cells([block[a:b] for block in self._blocks], self._own[a:b])
