"""The control socket to the supervisor: msgpack in SEQPACKET messages, with descriptors attached."""

import asyncio
import os
import socket
from collections.abc import Awaitable, Callable

import msgspec

from slipstream.process.protocol import Hello, ToFrontControl, ToSupervisor

MAX_MESSAGE = 1 << 20
MAX_DESCRIPTORS = 8

Handler = Callable[[object, list[int]], Awaitable[None]]


class Control:
    """The front end's side. When the socket closes, the supervisor is gone, and this process ends too."""

    def __init__(self, fd: int):
        self._sock = socket.socket(fileno=fd)
        self._decode = msgspec.msgpack.Decoder(ToFrontControl).decode
        self._waiting: asyncio.Queue = asyncio.Queue()

    def hello(self) -> tuple[Hello, list[int]]:
        """Waits for the first message; returns it with its descriptors."""
        got = self._receive()
        if got is None or not isinstance(got[0], Hello):
            raise SystemExit("front end: the supervisor did not say hello")
        return got  # type: ignore[return-value]

    def _receive(self) -> tuple[object, list[int]] | None:
        data, fds, _, _ = socket.recv_fds(self._sock, MAX_MESSAGE, MAX_DESCRIPTORS)
        return (self._decode(data), list(fds)) if data else None

    def tell(self, message: ToSupervisor) -> None:
        self._sock.send(msgspec.msgpack.encode(message))

    async def serve(self, handle: Handler) -> None:
        """Hands each further message to `handle`, one after the other, until the process ends."""
        self._sock.setblocking(False)
        asyncio.get_running_loop().add_reader(self._sock, self._on_readable)
        while True:
            message, fds = await self._waiting.get()
            await handle(message, fds)

    def _on_readable(self) -> None:
        while True:
            try:
                got = self._receive()
            except BlockingIOError:
                return
            except OSError:
                got = None
            if got is None:
                os._exit(1)
            self._waiting.put_nowait(got)
