"""Reads a request's body: checks its type, size and time, and decodes it into one of the structs of `bodies`."""

import asyncio
import json
import math
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request

from slipstream.errors import BadRequest
from slipstream.serve.budget import Budget
from slipstream.serve.engine.exclusive import run_exclusive
from slipstream.serve.errors import Failed, Failure, to_bad_request

MAX_BYTES = 32 << 20
READ_SECONDS = 60.0
INLINE_BYTES = 1 << 16  # bytes; larger bodies are decoded one at a time, since many at once would keep the streams waiting
MAX_LISTS, MAX_ITEMS = (
    1 << 17,
    1 << 21,
)  # in a body; the decoder blocks everything else, for 0.2 s at these bounds

T = TypeVar("T")
_decoders: dict[type, msgspec.json.Decoder] = {}


async def read(request: Request, schema: type[T]) -> T:
    """The body of `request` as a `schema`. Raises Failed (413, 415, 408, 503) or BadRequest naming the field."""
    async with body_of(request) as raw:
        if len(raw) <= INLINE_BYTES:
            return decode(raw, schema)
        check_pieces(raw)
        return await run_exclusive(lambda: decode(raw, schema))


@asynccontextmanager
async def body_of(request: Request) -> AsyncIterator[bytearray]:
    """The body's bytes, which count against the front end's budget as long as they are in use. Raises Failed."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise Failed(Failure(415, "Content-Type: must be application/json, and the body JSON"))
    coding = request.headers.get("content-encoding", "identity").strip().lower()
    if coding not in ("", "identity"):
        raise Failed(Failure(415, f"Content-Encoding: {coding[:40]!r} is not supported; send the body uncompressed"))
    raw = bytearray()
    with counted(request) as count:
        try:
            async with asyncio.timeout(READ_SECONDS):
                async for part in _parts(request):
                    raw += part
                    count(len(part))
        except TimeoutError:
            raise Failed(Failure(408, f"the body did not arrive within {READ_SECONDS:.0f} s")) from None
        yield raw


@contextmanager
def counted(request: Request) -> Iterator[Callable[[int], None]]:
    """A function that counts bytes of a body as they arrive, and raises Failed (503) where there is no room for them.

    Small bodies are not counted, so large ones cannot keep them out.
    """
    budget: Budget = request.app.state.front.bodies
    size = taken = 0

    def count(arrived: int) -> None:
        nonlocal size, taken
        size += arrived
        more = size - INLINE_BYTES - taken
        if more > 0:
            if not budget.take(more):
                raise Failed(_no_room(budget))
            taken += more

    try:
        yield count
    finally:
        budget.give(taken)


def _no_room(budget: Budget) -> Failure:
    text = f"the bodies of other requests take {budget.most >> 20} MiB (--body-memory-bytes); try again later"
    return Failure(503, text, code="unavailable", retry_after=2)


async def _parts(request: Request) -> AsyncIterator[bytes]:
    """The body in pieces as they arrive. Raises Failed if it is too large."""
    too_large = Failed(Failure(413, f"the body is larger than {MAX_BYTES >> 20} MiB"))
    try:
        if int(request.headers.get("content-length", "0")) > MAX_BYTES:
            raise too_large
    except ValueError:
        raise BadRequest("Content-Length: must be a number") from None
    size = 0
    async for part in request.stream():
        size += len(part)
        if size > MAX_BYTES:
            raise too_large
        yield part


def check_pieces(raw: bytes | bytearray) -> None:
    """Raises Failed for a body of very many lists, objects or items, before it is decoded."""
    if raw.count(b"[") + raw.count(b"{") > MAX_LISTS or raw.count(b",") > MAX_ITEMS:
        text = f"the body has more than {MAX_LISTS} lists and objects, or {MAX_ITEMS} items; send fewer at once"
        raise Failed(Failure(413, text))


def decode(raw: bytes | bytearray, schema: type[T]) -> T:
    decoder = _decoders.get(schema)
    if decoder is None:
        decoder = _decoders[schema] = msgspec.json.Decoder(schema)
    try:
        return decoder.decode(raw)  # type: ignore[return-value]
    except msgspec.ValidationError as e:
        raise to_bad_request(e, raw) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as e:
        path = _not_finite(raw)
        if path:
            raise BadRequest(f"{path}: must be a finite number, not NaN or an infinity", path) from None
        reason = "nested too deeply" if isinstance(e, RecursionError) else str(e)[:200]
        raise BadRequest(f"the body is not valid JSON: {reason}") from None


def converted(given: dict[str, Any], schema: type[T]) -> T:
    """A body made in Python. Raises BadRequest naming the field, as `decode` does."""
    try:
        return msgspec.convert(given, schema)
    except msgspec.ValidationError as e:
        raise to_bad_request(e) from None


def _not_finite(raw: bytes | bytearray) -> str | None:
    """The top-level field that holds NaN or an infinity. Some clients write these although JSON does not have them."""
    try:
        value = json.loads(raw)
    except (ValueError, RecursionError):
        return None
    if isinstance(value, dict):
        for key, item in value.items():
            if isinstance(item, float) and not math.isfinite(item):
                return str(key)[:200]
    return None
