"""Grammars are compiled beside the loop, on a thread of their own, so that an expensive one delays no step."""

import os
import queue
import threading
from collections import deque
from collections.abc import Callable

from slipstream.log.grammar import MakeMatcher
from slipstream.rank.events import Compiled


class Compiler:
    """Compiles in the order of the calls. `open_maker` is called once, with the first grammar: it may load a tokenizer."""

    def __init__(self, open_maker: Callable[[], MakeMatcher]):
        self._open_maker = open_maker
        self._make: MakeMatcher | None = None
        self._asked: queue.SimpleQueue[tuple[int, bytes]] = queue.SimpleQueue()
        self._done: deque[Compiled] = deque()
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._thread: threading.Thread | None = None

    def fileno(self) -> int:
        """Readable while `take` has something."""
        return self._bell

    def compile(self, id: int, grammar: bytes) -> None:
        self._asked.put((id, grammar))
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="grammars", daemon=True)
            self._thread.start()

    def take(self) -> list[Compiled]:
        """What has been compiled since the last call."""
        if not self._done:
            return []
        os.eventfd_read(self._bell)
        out = []
        while self._done:
            out.append(self._done.popleft())
        return out

    def _run(self) -> None:
        while True:
            id, grammar = self._asked.get()
            try:
                if self._make is None:
                    self._make = self._open_maker()
                done = Compiled(id, self._make(grammar))
            except Exception as e:  # the request's own failure, whatever the library raises
                done = Compiled(id, None, str(e)[:500] or type(e).__name__)
            self._done.append(done)
            os.eventfd_write(self._bell, 1)
