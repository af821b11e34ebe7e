"""A lean HTTP/1.1 client for one kind of server: JSON in, JSON or server-sent events out.

It keeps connections alive and takes each event's time when its bytes arrive. Times are `time.monotonic()` seconds, comparable
between processes of one machine.
"""

import asyncio
import contextlib
import json
import ssl
import time
import typing
import urllib.parse
from collections.abc import AsyncGenerator

import msgspec

from slipstream.client.wire import Events, Response, ServerError
from slipstream.errors import ConfigError


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
    """One event of a completion's stream, reduced to the fields that the measurements need."""

    choices: list[Choice] = []
    usage: Usage | None = None
    error: typing.Any = None


class Chunk(typing.NamedTuple):
    at: float
    event: Event


_EVENT = msgspec.json.Decoder(Event)


class Client:
    """Requests to one server. Bound to the event loop that first uses it, until `close`."""

    def __init__(self, base_url: str, key: str | None = None, timeout: float = 600.0):
        url = urllib.parse.urlsplit(base_url if "://" in base_url else "http://" + base_url)
        if url.scheme not in ("http", "https") or not url.hostname:
            raise ConfigError(f"--base-url: {base_url!r} is not an http(s) address such as http://127.0.0.1:8000")
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

    async def _pieces(self, message: bytes, response: Response) -> AsyncGenerator[bytes, None]:
        """The body in pieces as they come. A connection that was closed while idle is replaced once, before the first byte."""
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
                    raise ServerError(f"no byte received for {self.timeout:g} s") from None
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
            raise ServerError(f"{path}: the answer is not JSON") from None

    async def models(self) -> list[dict[str, typing.Any]]:
        """The entries of `/v1/models`; at least one."""
        answer = await self.request("GET", "/v1/models")
        if not isinstance(answer, dict) or not answer.get("data"):
            raise ServerError("/v1/models lists no model")
        return answer["data"]

    async def stream(self, path: str, body: typing.Any) -> AsyncGenerator[Chunk, None]:
        """The events of a streamed completion with their arrival times. Closing the iterator early closes the connection.

        Raises ServerError for a refusal, an error event, an event that is not JSON, or an end without `[DONE]`.
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
        raise ServerError(f"an event does not have the form of OpenAI's API: {e}") from None
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
