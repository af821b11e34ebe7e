"""Making the resources of requests on a thread of its own, so that an expensive one does not delay a step.

Their makers are built when a rank starts, not with the first request. Building the index of a vocabulary holds the
interpreter's lock for up to a second, which disturbs nobody before the loop runs.
"""

import queue
import threading
from collections import deque
from collections.abc import Callable, Mapping

from slipstream.log.grammar import MakeMatcher, Matcher
from slipstream.log.request import Resource
from slipstream.rank.events import ResourcesReady
from slipstream.system.bell import Bell

Makers = Mapping[str, MakeMatcher]  # by kind of resource


class Preparer:
    """Makes resources in the order of the calls. `open` calls `open_makers` once; if it fails, all requests get its error."""

    def __init__(self, open_makers: Callable[[], Makers]):
        self._open_makers = open_makers
        self._asked: queue.SimpleQueue[tuple[int, tuple[Resource, ...]]] = queue.SimpleQueue()
        self._done: deque[ResourcesReady] = deque()
        self._bell = Bell()
        self._opened = threading.Event()
        self._thread = threading.Thread(target=self._run, name="resources", daemon=True)

    def open(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def wait_open(self) -> None:
        """Returns when `open_makers` has returned."""
        self._opened.wait()

    def fileno(self) -> int:
        """Readable when `take` has something."""
        return self._bell.fileno()

    def prepare(self, id: int, resources: tuple[Resource, ...]) -> None:
        self._asked.put((id, resources))

    def take(self) -> list[ResourcesReady]:
        """The resources that were made since the last call."""
        self._bell.clear()
        out = []
        while self._done:
            out.append(self._done.popleft())
        return out

    def _run(self) -> None:
        makers: Makers = {}
        failure = ""
        try:
            makers = self._open_makers()
        except Exception as e:  # for instance a model without a tokenizer: it still serves requests without a grammar
            failure = str(e) or type(e).__name__
        self._opened.set()
        while True:
            id, resources = self._asked.get()
            try:
                done = ResourcesReady(id, {each.kind: _make(makers, each, failure) for each in resources})
            except Exception as e:  # the request's own failure, whatever the library raises
                done = ResourcesReady(id, {}, str(e)[:500] or type(e).__name__)
            self._done.append(done)
            self._bell.ring()


def _make(makers: Makers, resource: Resource, failure: str) -> Matcher:
    maker = makers.get(resource.kind)
    if maker is None:
        raise ValueError(failure or f"this rank cannot make a {resource.kind}")
    return maker(resource.spec)
