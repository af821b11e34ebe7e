"""Work on the event loop that holds the interpreter for a few milliseconds: one piece in a turn of the loop.

A thread would be worse: a write to a socket lets go of the interpreter, and the thread then holds it until its piece is
done. Each of sixteen streams would wait for a piece of its own. Here all of them wait for one.
"""

import asyncio
import time
from collections.abc import Callable, Iterator
from typing import TypeVar
from weakref import WeakKeyDictionary

SLICE_SECONDS = 0.002  # of work in slices, in one turn of the loop

T = TypeVar("T")
_locks: "WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Lock]" = WeakKeyDictionary()


async def run_sliced(pieces: Iterator[T]) -> list[T]:
    """list(pieces), made in slices. A large answer may take seconds; other work has its turns in between."""
    out: list[T] = []
    if not _slice(pieces, out):
        while not await run_exclusive(lambda: _slice(pieces, out)):
            pass
    return out


def _slice(pieces: Iterator[T], out: list[T]) -> bool:
    """Makes pieces for SLICE_SECONDS; returns whether there are no more."""
    end = time.monotonic() + SLICE_SECONDS
    for piece in pieces:
        out.append(piece)
        if time.monotonic() > end:
            return False
    return True


async def run_exclusive(work: Callable[[], T]) -> T:
    """Returns work(), run once the loop has handled everything that is ready and earlier exclusive work."""
    async with _locks.setdefault(asyncio.get_running_loop(), asyncio.Lock()):
        await asyncio.sleep(0)
        return work()
