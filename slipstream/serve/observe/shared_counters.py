"""Numbers that are added to in one front end and summed over all of them: doubles in shared memory, a block for each.

Every process lays its block out alike, since all run the same code with the same configuration. A reader may see two numbers of
one event in the midst of its update, as with any counters.
"""

import mmap
import os

BLOCK_BYTES = 4096


class Cells:
    """A few neighbouring numbers: `own` is added to, `sums` are of all front ends."""

    __slots__ = ("own", "_rows")

    def __init__(self, rows: "list[memoryview[float]]", own: "memoryview[float]"):
        self.own = own
        self._rows = rows

    def sums(self) -> list[float]:
        return [sum(column) for column in zip(*self._rows, strict=True)]


class SharedCounters:
    """The numbers of front end `index` among `count`."""

    def __init__(self, fd: int | None = None, index: int = 0, count: int = 1):
        """fd: a memfd that all front ends map; None where there is but one."""
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
