"""Work that holds the interpreter for a few milliseconds, on the event loop: one piece in a turn of the loop.

A thread would be the worse place: a write to a socket lets go of the interpreter, and the thread holds it again until its piece
is done. Of sixteen streams each would wait for a piece of its own; here all wait for one.
"""

import asyncio
from collections.abc import Callable
from typing import TypeVar
from weakref import WeakKeyDictionary

T = TypeVar("T")
_locks: "WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Lock]" = WeakKeyDictionary()


async def run_exclusive(work: Callable[[], T]) -> T:
    """work(), once the loop has seen to everything that is ready, and to other such work before."""
    async with _locks.setdefault(asyncio.get_running_loop(), asyncio.Lock()):
        await asyncio.sleep(0)
        return work()
