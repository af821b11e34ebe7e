"""Delivers every route's answers in pieces, counts the bytes that wait, and cuts off clients that do not read. Pure ASGI."""

import asyncio
import time
from collections.abc import Callable, Iterator

from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from slipstream.serve.budget import Budget
from slipstream.serve.errors import Failure

PIECE_BYTES = 1 << 16  # bytes handed to the connection at a time; it takes the next piece when the client has read enough


class Deliveries:
    """Wraps the application. `waiting` holds the answers that have a piece waiting for their client."""

    def __init__(self, app: ASGIApp, budget: Budget):
        self._app = app
        self._budget = budget
        self.waiting: set[Delivery] = set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        delivery = Delivery(self, scope, receive, send)
        try:
            await self._app(scope, receive, delivery.send)
        finally:
            delivery.release(delivery.held)

    def cut(self, seconds: float) -> None:
        """Drops the connections whose clients have read nothing for that many seconds."""
        now = time.monotonic()
        for delivery in list(self.waiting):
            if now - delivery.since > seconds and delivery.cut is not None:
                delivery.cut()

    def take(self, size: int) -> bool:
        return self._budget.take(size)

    def give(self, size: int) -> None:
        self._budget.give(size)

    @property
    def refusal(self) -> Failure:
        text = f"answers that clients have not read take {self._budget.most >> 20} MiB (--answer-memory-bytes); try again later"
        return Failure(503, text, code="unavailable", retry_after=2)


class Delivery:
    """One answer. A large one of known length counts against the budget until it is sent; it is refused if there is no room."""

    def __init__(self, all: Deliveries, scope: Scope, receive: Receive, send: Send):
        self._all, self._scope, self._receive, self._send = all, scope, receive, send
        self.cut: Callable[[], None] | None = scope.get("slipstream.cut")
        self.held = 0
        self.since = 0.0  # when the piece that waits was handed over
        self._refused = False

    async def send(self, message: Message) -> None:
        if self._refused:
            return
        if message["type"] != "http.response.body":
            await self._start(message)
            return
        body, more = message.get("body", b""), message.get("more_body", False)
        for at in range(0, max(1, len(body)), PIECE_BYTES):
            if at:
                await asyncio.sleep(0)  # a client that reads fast must not keep others waiting
            piece = body[at : at + PIECE_BYTES] if len(body) > PIECE_BYTES else body
            await self._hand_over({**message, "body": piece, "more_body": more or at + PIECE_BYTES < len(body)})
        self.release(min(self.held, len(body)))

    async def _start(self, message: Message) -> None:
        size = next((int(value) for name, value in message.get("headers", ()) if name.lower() == b"content-length"), 0)
        if size > PIECE_BYTES and not self._all.take(size):
            self._refused = True
            await self._all.refusal.response(self._scope["path"])(self._scope, self._receive, self._send)
            return
        self.held = size if size > PIECE_BYTES else 0
        await self._send(message)

    async def _hand_over(self, message: Message) -> None:
        self.since = time.monotonic()
        self._all.waiting.add(self)
        try:
            await self._send(message)
        finally:
            self._all.waiting.discard(self)

    def release(self, size: int) -> None:
        self.held -= size
        self._all.give(size)


class LongResponse(Response):
    """JSON made in pieces. Each piece is freed once it is sent."""

    def __init__(self, pieces: list[bytes]):
        super().__init__(media_type="application/json")
        self._pieces = pieces
        self.headers["content-length"] = str(sum(map(len, pieces)))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        self._pieces.reverse()
        for body in _joined(self._pieces):
            await send({"type": "http.response.body", "body": body, "more_body": bool(self._pieces)})
            await asyncio.sleep(0)


def _joined(pieces: list[bytes]) -> Iterator[bytes]:
    """Pieces from the list's end, together about as large as one hand-over to the connection."""
    while pieces:
        body, size = [], 0
        while pieces and size < PIECE_BYTES:
            body.append(pieces.pop())
            size += len(body[-1])
        yield b"".join(body)
