"""The events of background responses, for clients that come back (`GET /v1/responses/{id}?stream=true&starting_after=N`).

While a response runs, the front end that runs it has its events. At the end they go to the store that all front ends share.
"""

import asyncio
import hashlib
from collections.abc import Callable

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from slipstream.serve.openai.generate import EVENT_HEADERS
from slipstream.serve.openai.response_store import RECORD_BYTES

MAX_UNREAD_BYTES = 1 << 20  # of events that wait for a client; a client with more is cut off


def key_of_events(key: str) -> str:
    """The store's key for the events of the response with this key."""
    return hashlib.blake2b(b"events of " + key.encode(), digest_size=12).hexdigest()


def split(data: bytes) -> list[bytes]:
    """Whole events. Their JSON holds no line breaks."""
    return [event + b"\n\n" for event in data.split(b"\n\n")[:-1]]


class EventLog:
    """The events of one running response; event k has the sequence number k. Passes new ones on to its watchers."""

    def __init__(self, kept: bool):
        self.kept = kept  # false also once they take more bytes than the store keeps
        self._events: list[bytes] = []
        self._size = 0
        self._watchers: list[Watcher] = []

    def tell(self, data: bytes) -> None:
        self._watchers = [watcher for watcher in self._watchers if not watcher.ended]
        for watcher in self._watchers:
            watcher.tell(data)
        self._size += len(data)
        self.kept = self.kept and self._size <= RECORD_BYTES
        if self.kept:
            self._events += split(data)
        else:
            self._events.clear()

    def end(self) -> None:
        for watcher in self._watchers:
            watcher.end()

    def after(self, number: int) -> bytes:
        """The events with larger numbers."""
        return b"".join(self._events[number + 1 :])

    def watch(self, number: int, cut: Callable[[], None] | None) -> "Watcher":
        """An answer with the events after `number`, those to come included. cut: drops the client's connection."""
        watcher = Watcher(cut, self.after(number))
        self._watchers.append(watcher)
        return watcher


class Watcher(Response):
    """The events of a background response on their way to one client. It cannot slow the response down."""

    def __init__(self, cut: Callable[[], None] | None, first: bytes = b""):
        super().__init__()
        self._cut = cut
        self._unread = [first]
        self._size = 0  # of what came since
        self.ended = False
        self._news = asyncio.Event()

    def tell(self, data: bytes) -> None:
        if self.ended:
            return
        self._unread.append(data)
        self._size += len(data)
        self._news.set()
        if self._size > MAX_UNREAD_BYTES:
            self.end()
            if self._cut is not None:
                self._cut()

    def end(self) -> None:
        self.ended = True
        self._news.set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        leaving = asyncio.get_running_loop().create_task(self._leave(receive))
        try:
            await send({"type": "http.response.start", "status": 200, "headers": list(EVENT_HEADERS)})
            while self._unread or not self.ended:
                data = b"".join(self._unread)
                self._unread.clear()
                self._size = 0
                self._news.clear()
                await send({"type": "http.response.body", "body": data, "more_body": True})
                if not self._unread and not self.ended:
                    await self._news.wait()
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            leaving.cancel()

    async def _leave(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self.end()
