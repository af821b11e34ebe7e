"""Grammars are compiled beside the loop, on a thread of their own, so that an expensive one delays no step.

What compiles them is made when a rank starts and not with the first grammar: building the vocabulary's index holds the
interpreter's lock for up to a second, which nobody notices before the loop runs.
"""

import queue
import threading
from collections import deque
from collections.abc import Callable

from slipstream.log.grammar import MakeMatcher, Matcher
from slipstream.rank.events import Compiled
from slipstream.system.bell import Bell


class Compiler:
    """Compiles in the order of the calls. `open_maker` is called once, by `open`; what it raises is every grammar's error."""

    def __init__(self, open_maker: Callable[[], MakeMatcher]):
        self._open_maker = open_maker
        self._asked: queue.SimpleQueue[tuple[int, bytes]] = queue.SimpleQueue()
        self._done: deque[Compiled] = deque()
        self._bell = Bell()
        self._opened = threading.Event()
        self._thread = threading.Thread(target=self._run, name="grammars", daemon=True)

    def open(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def wait_open(self) -> None:
        """Returns when `open_maker` has."""
        self._opened.wait()

    def fileno(self) -> int:
        """Readable when `take` has something."""
        return self._bell.fileno()

    def compile(self, id: int, grammar: bytes) -> None:
        self._asked.put((id, grammar))

    def take(self) -> list[Compiled]:
        """What has been compiled since the last call."""
        self._bell.clear()
        out = []
        while self._done:
            out.append(self._done.popleft())
        return out

    def _open(self) -> MakeMatcher:
        try:
            return self._open_maker()
        except Exception as e:  # a model without a tokenizer, say: it still serves what needs none
            reason = str(e) or type(e).__name__

            def refuse(grammar: bytes) -> Matcher:
                raise ValueError(reason)

            return refuse
        finally:
            self._opened.set()

    def _run(self) -> None:
        make = self._open()
        while True:
            id, grammar = self._asked.get()
            try:
                done = Compiled(id, make(grammar))
            except Exception as e:  # the request's own failure, whatever the library raises
                done = Compiled(id, None, str(e)[:500] or type(e).__name__)
            self._done.append(done)
            self._bell.ring()
