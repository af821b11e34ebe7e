"""uvicorn's HTTP/1.1 connection with limits on the headers' size and time, and with a way to cut off a slow reader.

The scope of a request carries `slipstream.cut`, which drops the connection at once. Imports uvicorn and httptools only.
"""

import asyncio
import resource
import socket

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from slipstream.serve.errors import Failure

MAX_HEADER_BYTES = 64 << 10
MAX_HEADERS = 100
HEADER_SECONDS = 30.0
OTHER_DESCRIPTORS = 48  # sockets to the ranks, pipes to helper processes, files


def _unframe(cycle: RequestResponseCycle) -> None:
    """An HTTP/1.0 client does not know chunks. An answer without a length goes to it unframed and ends with the connection.

    uvicorn frames such an answer for every client (RFC 9112, section 6.1, forbids it) and has no setting for it. It closes
    after each HTTP/1.0 answer already. So only the framing is removed here, and the check of a length never announced.
    """
    framed, bare = cycle.send, False

    async def send(message) -> None:
        nonlocal bare
        if message["type"] == "http.response.start":
            bare = all(name.lower() != b"content-length" for name, _ in message.get("headers", ()))
            if bare:
                cycle.chunked_encoding = False
        elif bare:
            cycle.expected_content_length = len(message.get("body", b""))
        await framed(message)

    cycle.send = send  # the application starts in the loop's next turn and uses this value


def connection_limit() -> int:
    """The number of connections that this process's descriptors allow, less those that it needs for other things."""
    return max(8, resource.getrlimit(resource.RLIMIT_NOFILE)[0] - OTHER_DESCRIPTORS)


class Connection(HttpToolsProtocol):
    """One client connection. Beyond `limit`, a new one replaces the one that has been idle longest, or is refused."""

    def __init__(self, *args, limit: int, **kwargs):
        super().__init__(*args, **kwargs)
        self._limit = limit
        self.idle_since = self.loop.time()

    _timer: asyncio.TimerHandle | None = None
    _header_bytes = 0  # bytes of the request line and headers so far
    _unfinished = 0  # bytes received since the last complete headers
    _refused = False
    _surplus = False  # there was no room for it

    def connection_made(self, transport) -> None:
        super().connection_made(transport)
        sock = transport.get_extra_info("socket")
        if sock is not None and sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # asyncio sets this for some sockets only
        self._arm()
        if self._too_many():
            self._make_room()

    @property
    def idle(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def _too_many(self) -> bool:
        return len(self.connections) > self._limit and sum(not c.transport.is_closing() for c in self.connections) > self._limit

    def _make_room(self) -> None:
        others = [c for c in self.connections if c is not self and not c.transport.is_closing()]
        idle = [c for c in others if isinstance(c, Connection) and c.idle]
        if idle:
            min(idle, key=lambda c: c.idle_since).transport.abort()
        else:
            self._surplus = True

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self.idle_since = self.loop.time()

    def connection_lost(self, exc: Exception | None) -> None:
        self._disarm()
        super().connection_lost(exc)

    def _arm(self) -> None:
        self._disarm()
        self._timer = self.loop.call_later(HEADER_SECONDS, self._late)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _late(self) -> None:
        self._timer = None
        self._refuse(Failure(408, f"the request's headers did not arrive within {HEADER_SECONDS:.0f} s"))

    def data_received(self, data: bytes) -> None:
        if self._refused or self.parser is None:
            return
        if self._surplus and self._too_many():  # only after the client has sent something: an earlier answer would be lost
            text = f"{self._limit} connections are open, which is the limit (ulimit -n); try again later"
            return self._refuse(Failure(503, text))
        self._surplus = False
        super().data_received(data)
        if self._timer is not None:  # still inside the headers; the parser hands them over one by one
            self._unfinished += len(data)
            if self._unfinished > 2 * MAX_HEADER_BYTES:
                self._refuse_headers()

    def send_400_response(self, msg: str) -> None:
        if not self._refused:
            self._refuse(Failure(400, "not a valid HTTP/1.1 request"))

    def _refuse(self, failure: Failure) -> None:
        """Answers without the application, then closes. If an answer is already on its way, only closes."""
        self._refused = True
        if self.transport.is_closing():
            return
        if self.cycle is not None and not self.cycle.response_complete:
            self.transport.abort()
            return
        body = failure.body()
        head = f"HTTP/1.1 {failure.status} Refused\r\nconnection: close\r\ncontent-type: application/json\r\n"
        self.transport.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        self.transport.close()

    # callbacks of the parser

    def on_message_begin(self) -> None:
        super().on_message_begin()
        if self._timer is None:
            self._arm()
        self._header_bytes = 0
        self.scope["slipstream.cut"] = self.transport.abort  # type: ignore[typeddict-unknown-key]

    def _count(self, size: int) -> None:
        self._header_bytes += size
        if self._header_bytes > MAX_HEADER_BYTES or len(self.headers) > MAX_HEADERS:
            self._refuse_headers()

    def _refuse_headers(self) -> None:
        if not self._refused:
            self._refuse(
                Failure(431, f"more than {MAX_HEADERS} headers, or than {MAX_HEADER_BYTES >> 10} KiB of them; send fewer")
            )

    def on_url(self, url: bytes) -> None:
        self._count(len(url))
        if not self._refused:
            super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count(len(name) + len(value))
        if not self._refused:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._disarm()
        self._unfinished = 0
        if self._refused:
            return
        before = self.cycle
        super().on_headers_complete()
        if self.cycle is not before and self.scope["http_version"] == "1.0":
            _unframe(self.cycle)

    def on_body(self, body: bytes) -> None:
        if not self._refused:
            super().on_body(body)

    def on_message_complete(self) -> None:
        if not self._refused:
            super().on_message_complete()
