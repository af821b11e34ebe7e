"""The front end's view of an encoder's process: the life of its link as for a language model, and requests of one answer."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

import numpy as np

from slipstream.embed.kinds import EncoderSpec
from slipstream.embed.messages import Encode, Encoded, FromEncoder
from slipstream.errors import BadRequest
from slipstream.serve.embed.rows import Rows
from slipstream.serve.engine.engine import Engine
from slipstream.serve.errors import Failed, Failure

GONE = Failure(499, "the client went away")
Receive = Callable[[], Awaitable[Any]]


class Gathering:
    """The sink of one request: its end is a future's."""

    def __init__(self) -> None:
        self.data: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

    def encoded(self, data: bytes) -> None:
        if not self.data.done():
            self.data.set_result(data)

    def fail(self, failure: Failure) -> None:
        if not self.data.done():
            self.data.set_exception(Failed(failure))


class EncoderEngine(Engine):
    """Sends rows to the encoder. States, limits and the loss of the process are those of `Engine`."""

    inward = FromEncoder

    def __init__(self, spec: EncoderSpec, on_load: Any = None):
        super().__init__(on_load)
        self.spec = spec

    def check_embeds(self, dimensions: int | None = None) -> None:
        """Raises BadRequest for a model without embeddings, and for more dimensions than it has."""
        if self.spec.task != "embed":
            raise BadRequest(f"this model {self.spec.does}; it gives no embeddings")
        if dimensions is not None and dimensions > self.spec.width:
            raise BadRequest(
                f"dimensions: must be at most {self.spec.width}, which the model has, not {dimensions}", "dimensions"
            )

    async def encode(self, rows: Rows, receive: Receive) -> np.ndarray:
        """float32 [rows, width]. `receive` gives the client's messages: the request ends when it leaves.

        Raises Failed (499 for a client that left) and Overloaded.
        """
        self.check_ready()
        assert self._link is not None
        id, sink = self.next_id(), Gathering()
        self._live[id] = sink  # type: ignore[assignment]
        self._link.send(Encode(id, tuple(rows.rows), tuple(rows.firsts)))
        left = asyncio.ensure_future(_left(receive))
        try:
            await asyncio.wait((sink.data, left), return_when=asyncio.FIRST_COMPLETED)
            if not sink.data.done():
                raise Failed(GONE)
            return np.frombuffer(sink.data.result(), "<f4").reshape(len(rows.rows), self.spec.width)
        finally:
            self.abort(id)  # does nothing where it has ended
            left.cancel()

    def _receive(self, messages: Iterable[Any], holder: list) -> None:
        super()._receive((m for m in messages if not self._is_encoded(m)), holder)

    def _is_encoded(self, message: Any) -> bool:
        if isinstance(message, Encoded):
            self._end(message.id, "encoded", message.data)
            return True
        return False


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
