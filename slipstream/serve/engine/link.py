"""The stream socket to a group's leader: frames of a 4-byte little-endian length and msgpack, both ways, on the event loop."""

import asyncio
import socket
import struct
from collections.abc import Callable

import msgspec

from slipstream.process.protocol import ToFront, ToLeader

MAX_FRAME = 1 << 30
MAX_UNSENT = 256 << 20
_LENGTH = struct.Struct("<I")


class Link(asyncio.Protocol):
    """One connection to a leader. `on_messages` gets all that one turn of the loop brought; `on_lost` is called once."""

    def __init__(self, on_messages: Callable[[list], None], on_lost: Callable[[str], None]):
        self._on_messages = on_messages
        self._on_lost = on_lost
        self._decode = msgspec.msgpack.Decoder(ToFront).decode
        self._encode = msgspec.msgpack.Encoder().encode
        self._rest = b""
        self._transport: asyncio.Transport | None = None

    @classmethod
    async def open(cls, sock: socket.socket, on_messages: Callable[[list], None], on_lost: Callable[[str], None]) -> "Link":
        sock.setblocking(False)
        loop = asyncio.get_running_loop()
        _, link = await loop.create_connection(lambda: cls(on_messages, on_lost), sock=sock)
        return link

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._on_lost(str(exc) if exc else "the model's process closed the connection")

    def data_received(self, data: bytes) -> None:
        if self._rest:
            data = self._rest + data
        messages, at, size = [], 0, len(data)
        view = memoryview(data)
        while size - at >= 4:
            (length,) = _LENGTH.unpack_from(data, at)
            if length > MAX_FRAME:
                self.close()
                return
            if size - at - 4 < length:
                break
            try:
                messages.append(self._decode(view[at + 4 : at + 4 + length]))
            except msgspec.MsgspecError:
                self.close()
                return
            at += 4 + length
        self._rest = bytes(view[at:])
        if messages:
            self._on_messages(messages)

    @property
    def full(self) -> bool:
        """Whether the leader has stopped reading, so that nothing more should be queued."""
        return self._transport is None or self._transport.get_write_buffer_size() > MAX_UNSENT

    def send(self, message: ToLeader) -> None:
        if self._transport is not None:
            body = self._encode(message)
            self._transport.write(_LENGTH.pack(len(body)) + body)

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()
