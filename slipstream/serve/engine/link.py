"""The stream socket to a group's leader on the event loop; `system.framing` defines the format of its messages."""

import asyncio
import socket
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import msgspec

from slipstream.system.framing import BadFrame, Frames, frame

MAX_UNSENT_BYTES = 256 << 20  # bytes
TURN_SECONDS = 0.005  # for messages in one turn of the loop; the clients' sockets have their turn in between


class Link(asyncio.Protocol):
    """One connection to a leader. `on_messages` gets the messages of one turn of the loop; `on_lost` is called once."""

    def __init__(self, on_messages: Callable[[Iterable[Any]], None], on_lost: Callable[[str], None], inward: Any):
        self._on_messages = on_messages
        self._on_lost = on_lost
        self._decode = msgspec.msgpack.Decoder(inward).decode
        self._encode = msgspec.msgpack.Encoder().encode
        self._frames = Frames()
        self._waiting: deque[Any] = deque()
        self._transport: asyncio.Transport | None = None
        self._why = "the model's process closed the connection"

    @classmethod
    async def open(
        cls, sock: socket.socket, on_messages: Callable[[Iterable[Any]], None], on_lost: Callable[[str], None], inward: Any
    ) -> "Link":
        """`inward`: the union of messages that arrive."""
        sock.setblocking(False)
        loop = asyncio.get_running_loop()
        _, link = await loop.create_connection(lambda: cls(on_messages, on_lost, inward), sock=sock)
        return link

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._on_lost(str(exc) if exc else self._why)

    def data_received(self, data: bytes) -> None:
        try:
            self._waiting.extend(self._frames.feed(data))
        except BadFrame as e:
            self._refuse(e)
            return
        self._handle()

    def _refuse(self, error: Exception) -> None:
        self._why = f"the model's process sent bytes that are not a message: {error}"
        self.close()

    def _handle(self) -> None:
        """Hands on the messages that have come. Those that do not fit in one turn wait for the next, and so does the leader."""
        if self._waiting:
            try:
                self._on_messages(self._turn())
            except msgspec.MsgspecError as e:
                self._refuse(e)
                return
        if self._transport is None:
            return
        if self._waiting:
            self._transport.pause_reading()
            asyncio.get_running_loop().call_soon(self._handle)
        else:
            self._transport.resume_reading()

    def _turn(self) -> Iterator[Any]:
        end = time.monotonic() + TURN_SECONDS
        while self._waiting:
            yield self._decode(self._waiting.popleft())  # here, as decoding takes as long as handling
            if time.monotonic() > end:
                return

    @property
    def full(self) -> bool:
        """Whether the leader has stopped reading, so that nothing more should be queued."""
        return self._transport is None or self._transport.get_write_buffer_size() > MAX_UNSENT_BYTES

    def send(self, message: msgspec.Struct) -> None:
        if self._transport is not None:
            self._transport.write(frame(self._encode(message)))

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()
