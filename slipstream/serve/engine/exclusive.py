"""Work that holds the interpreter for a few milliseconds, on the event loop: one piece in a turn of the loop.

A thread would be the worse place: a write to a socket lets go of the interpreter, and the thread holds it again until its piece
is done. Of sixteen streams each would wait for a piece of its own; here all wait for one.
"""

import asyncio
import time
from collections.abc import Callable, Iterator
from typing import TypeVar
from weakref import WeakKeyDictionary

SLICE_SECONDS = 0.002  # of such work that can be cut, in one turn

T = TypeVar("T")
_locks: "WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Lock]" = WeakKeyDictionary()


async def run_sliced(pieces: Iterator[T]) -> list[T]:
    """list(pieces), made in slices: what a client has asked for may take seconds, and others have their turns in between."""
    out: list[T] = []
    if not _slice(pieces, out):
        while not await run_exclusive(lambda: _slice(pieces, out)):
            pass
    return out


def _slice(pieces: Iterator[T], out: list[T]) -> bool:
    """Makes pieces for SLICE_SECONDS; whether there are no more."""
    end = time.monotonic() + SLICE_SECONDS
    for piece in pieces:
        out.append(piece)
        if time.monotonic() > end:
            return False
    return True


async def run_exclusive(work: Callable[[], T]) -> T:
    """work(), once the loop has seen to everything that is ready, and to other such work before."""
    async with _locks.setdefault(asyncio.get_running_loop(), asyncio.Lock()):
        await asyncio.sleep(0)
        return work()
