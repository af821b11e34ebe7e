"""A lean HTTP/1.1 client for one kind of server: JSON in, JSON or server-sent events out.

The parsers do no I/O: they are fed bytes as they come, cut anywhere. `Client` keeps connections alive and takes each event's
time when its bytes arrive. Times are `time.monotonic()` seconds, comparable between processes of one machine.
"""

import asyncio
import contextlib
import json
import ssl
import time
import typing
import urllib.parse
from collections.abc import AsyncIterator

import msgspec

from slipstream.errors import ConfigError, SlipstreamError


class ServerError(SlipstreamError):
    """The server refused, failed, or broke the protocol. `status` is the HTTP status, 0 where there is none."""

    def __init__(self, message: str, status: int = 0):
        super().__init__(f"HTTP {status}: {message}" if status else message)
        self.status = status


class Delta(msgspec.Struct):
    content: str | None = None


class Choice(msgspec.Struct):
    text: str | None = None
    delta: Delta | None = None
    token_ids: list[int] | None = None
    finish_reason: str | None = None


class PromptDetails(msgspec.Struct):
    cached_tokens: int | None = None


class Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: PromptDetails | None = None


class Event(msgspec.Struct):
    """One event of a completion's stream: what the measurements need of it."""

    choices: list[Choice] = []
    usage: Usage | None = None
    error: typing.Any = None


class Chunk(typing.NamedTuple):
    at: float
    event: Event


_EVENT = msgspec.json.Decoder(Event)


class Response:
    """Parses one response (RFC 9112): status line and headers, then a body by length, by chunks, or until the end."""

    def __init__(self) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self.done = False
        self.keep = False  # whether the connection may serve another request
        self._buffer = bytearray()
        self._left = 0  # bytes of the body or of the current chunk to come
        self._mode = "head"

    def feed(self, data: bytes) -> bytes:
        """The body's bytes that `data` completes. Raises ServerError for what is no HTTP."""
        self._buffer += data
        body = bytearray()
        while not self.done and getattr(self, "_" + self._mode)(body):
            pass
        return bytes(body)

    def feed_eof(self) -> None:
        """The peer closed. Raises ServerError unless that is how this body ends."""
        if self.done:
            return
        if self._mode != "rest":
            raise ServerError("the server closed the connection in mid-answer", self.status if self.status >= 400 else 0)
        self.done = True

    def _line(self) -> bytes | None:
        end = self._buffer.find(b"\n")
        if end < 0:
            if len(self._buffer) > 65536:
                raise ServerError("a header line over 64 KiB")
            return None
        line = bytes(self._buffer[:end]).rstrip(b"\r")
        del self._buffer[: end + 1]
        return line

    def _head(self, body: bytearray) -> bool:
        line = self._line()
        if line is None:
            return False
        if not self.status:
            parts = line.split(None, 2)
            if len(parts) < 2 or not parts[0].startswith(b"HTTP/1.") or not parts[1].isdigit():
                raise ServerError(f"not an HTTP/1.1 answer: {line[:60]!r}")
            self.status = int(parts[1])
            self.keep = parts[0] == b"HTTP/1.1"
        elif line:
            name, _, value = line.partition(b":")
            self.headers[name.decode("latin-1").strip().lower()] = value.decode("latin-1").strip()
        elif self.status < 200:  # 100 Continue and the like: the real answer follows
            self.status, self.headers = 0, {}
        else:
            self._choose_body()
        return True

    def _choose_body(self) -> None:
        if "close" in self.headers.get("connection", "").lower():
            self.keep = False
        if "chunked" in self.headers.get("transfer-encoding", "").lower():
            self._mode = "size"
        elif self.status in (204, 304):
            self.done = True
        elif "content-length" in self.headers:
            self._left = int(self.headers["content-length"])
            self._mode, self.done = "length", self._left == 0
        else:
            self._mode, self.keep = "rest", False

    def _take(self, body: bytearray) -> bool:
        """Moves bytes of the current piece; whether it is complete."""
        body += self._buffer[: self._left]
        taken = min(self._left, len(self._buffer))
        del self._buffer[:taken]
        self._left -= taken
        return self._left == 0

    def _length(self, body: bytearray) -> bool:
        self.done = self._take(body)
        return False

    def _rest(self, body: bytearray) -> bool:
        body += self._buffer
        self._buffer.clear()
        return False

    def _size(self, body: bytearray) -> bool:
        line = self._line()
        if line is None:
            return False
        try:
            self._left = int(line.split(b";", 1)[0], 16)
        except ValueError:
            raise ServerError(f"a chunk's size is no hexadecimal number: {line[:40]!r}") from None
        self._mode = "chunk" if self._left else "trailer"
        return True

    def _chunk(self, body: bytearray) -> bool:
        if not self._take(body):
            return False
        self._mode = "chunk_end"
        return True

    def _chunk_end(self, body: bytearray) -> bool:
        line = self._line()
        if line is None:
            return False
        if line:
            raise ServerError("a chunk is longer than its size says")
        self._mode = "size"
        return True

    def _trailer(self, body: bytearray) -> bool:
        line = self._line()
        if line is None:
            return False
        self.done = not line
        return True


class Events:
    """Splits a `text/event-stream` into the data of its events (WHATWG HTML §9.2; ids and names are not needed)."""

    def __init__(self) -> None:
        self._tail = b""
        self._data: list[bytes] = []

    def feed(self, data: bytes) -> list[bytes]:
        lines = (self._tail + data).split(b"\n")
        self._tail = lines.pop()
        out: list[bytes] = []
        for line in lines:
            line = line.rstrip(b"\r")
            if line.startswith(b"data:"):
                self._data.append(line[5:].lstrip(b" "))
            elif not line and self._data:
                out.append(b"\n".join(self._data))
                self._data = []
        return out


class Client:
    """Requests to one server. Bound to the event loop that first uses it, until `close`."""

    def __init__(self, base_url: str, key: str | None = None, timeout: float = 600.0):
        url = urllib.parse.urlsplit(base_url if "://" in base_url else "http://" + base_url)
        if url.scheme not in ("http", "https") or not url.hostname:
            raise ConfigError(f"--base-url: {base_url!r} is no http(s) address such as http://127.0.0.1:8000")
        self.timeout = timeout  # seconds without a byte
        self._host, self._port = url.hostname, url.port or (443 if url.scheme == "https" else 80)
        self._tls = ssl.create_default_context() if url.scheme == "https" else None
        self._root = url.path.rstrip("/").removesuffix("/v1")
        self._head = f"Host: {url.netloc.rpartition('@')[2]}\r\nAccept: */*\r\nUser-Agent: slipstream-bench\r\n"
        if key:
            self._head += f"Authorization: Bearer {key}\r\n"
        self._idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    def close(self) -> None:
        """Drops idle connections."""
        while self._idle:
            self._idle.pop()[1].close()

    async def __aenter__(self) -> "Client":
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        try:
            async with asyncio.timeout(min(self.timeout, 30)):
                return await asyncio.open_connection(self._host, self._port, ssl=self._tls, limit=2**20)
        except (OSError, TimeoutError) as e:
            raise ServerError(f"cannot connect to {self._host}:{self._port}: {e or 'timed out'}") from None

    def _message(self, method: str, path: str, body: bytes | None) -> bytes:
        head = f"{method} {self._root}{path} HTTP/1.1\r\n{self._head}"
        if body is not None:
            head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        return head.encode() + b"\r\n" + (body or b"")

    async def _pieces(self, message: bytes, response: Response) -> AsyncIterator[bytes]:
        """The body as it comes. A connection that went stale while idle is replaced once, before its first byte."""
        while True:
            reused = bool(self._idle)
            reader, writer = self._idle.pop() if self._idle else await self._connect()
            try:
                first = True
                try:
                    writer.write(message)
                    await writer.drain()
                    while not response.done:
                        async with asyncio.timeout(self.timeout):
                            data = await reader.read(262144)
                        if not data:
                            if first and reused:
                                raise ConnectionResetError
                            response.feed_eof()
                            break
                        first = False
                        yield response.feed(data)
                except ConnectionError as e:
                    if first and reused:
                        continue
                    raise ServerError(f"the connection broke: {e or type(e).__name__}") from None
                except TimeoutError:
                    raise ServerError(f"no byte for {self.timeout:g} s") from None
                return
            finally:
                if response.done and response.keep:
                    self._idle.append((reader, writer))
                else:
                    writer.close()

    async def request(self, method: str, path: str, body: typing.Any = None) -> typing.Any:
        """One JSON answer. Raises ServerError for a status that is not 2xx."""
        response = Response()
        message = self._message(method, path, None if body is None else msgspec.json.encode(body))
        data = bytearray()
        async with contextlib.aclosing(self._pieces(message, response)) as pieces:
            async for piece in pieces:
                data += piece
        if not 200 <= response.status < 300:
            raise ServerError(_reason(bytes(data)), response.status)
        try:
            return json.loads(data) if data else None
        except ValueError:
            raise ServerError(f"{path}: the answer is no JSON") from None

    async def models(self) -> list[dict[str, typing.Any]]:
        """The entries of `/v1/models`; at least one."""
        answer = await self.request("GET", "/v1/models")
        if not isinstance(answer, dict) or not answer.get("data"):
            raise ServerError("/v1/models names no model")
        return answer["data"]

    async def stream(self, path: str, body: typing.Any) -> AsyncIterator[Chunk]:
        """The events of a streamed completion with their arrival times. Closing the iterator early closes the connection.

        Raises ServerError for a refusal, an error event, an event that is no JSON, or an end without `[DONE]`.
        """
        response, events = Response(), Events()
        ended = False
        refusal = bytearray()
        message = self._message("POST", path, msgspec.json.encode(body))
        async with contextlib.aclosing(self._pieces(message, response)) as pieces:
            async for piece in pieces:
                at = time.monotonic()
                if response.status >= 300:
                    refusal += piece
                    continue
                for data in events.feed(piece):
                    if data == b"[DONE]":
                        ended = True
                        continue
                    yield Chunk(at, _event(data))
        if response.status >= 300:
            raise ServerError(_reason(bytes(refusal)), response.status)
        if not ended:
            raise ServerError("the stream ended without [DONE]")


def _event(data: bytes) -> Event:
    try:
        event = _EVENT.decode(data)
    except msgspec.MsgspecError as e:
        raise ServerError(f"an event is not what OpenAI's API says: {e}") from None
    if event.error is not None:
        raise ServerError(f"error event: {_reason(msgspec.json.encode({'error': event.error}))}")
    return event


def _reason(data: bytes) -> str:
    """The message of OpenAI's error body, or the body's beginning."""
    with contextlib.suppress(ValueError, TypeError, KeyError, AttributeError):
        body = json.loads(data)
        error = body.get("error", body)
        text = error if isinstance(error, str) else error.get("message") or error.get("detail")
        if text:
            return str(text)[:300]
    return data[:300].decode(errors="replace") or "no reason given"
