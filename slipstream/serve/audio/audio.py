"""/v1/audio/transcriptions and /v1/audio/translations of a composite model, and helpers of its other audio routes.

Uploads stay in memory, within limits, and are freed with their request. Decoding and encoding run in threads.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any

from starlette.datastructures import UploadFile
from starlette.exceptions import HTTPException
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import Request
from starlette.responses import Response

from slipstream.errors import BadRequest
from slipstream.graph.conductor import RequestFailed
from slipstream.serve.audio import audio_file
from slipstream.serve.audio.audio_text import FORMATS as TEXT_FORMATS
from slipstream.serve.audio.audio_text import render
from slipstream.serve.engine.composite import Call, Composite
from slipstream.serve.errors import Failed, Failure, to_failure
from slipstream.serve.front import Front
from slipstream.serve.openai.generate import EVENT_HEADERS
from slipstream.serve.request_body import READ_SECONDS, counted

HEARD_RATE = 16_000
MAX_BODY_BYTES = audio_file.MAX_BYTES + (64 << 10)
_threads = ThreadPoolExecutor(2, "audio")
_decoders = ThreadPoolExecutor(2, "decode")  # of their own, so that speech does not wait for uploads


async def in_thread(work, *args) -> Any:
    return await asyncio.get_running_loop().run_in_executor(_threads, work, *args)


async def in_decoder(work, *args) -> Any:
    return await asyncio.get_running_loop().run_in_executor(_decoders, work, *args)


def composite_of(http) -> Composite:
    front: Front = http.app.state.front
    assert front.composite
    return front.composite


class _InMemory(MultiPartParser):
    spool_max_size = MAX_BODY_BYTES + 1  # nothing is written to disk


@asynccontextmanager
async def form_of(http: Request) -> AsyncIterator[dict[str, Any]]:
    """A multipart body's fields; the file as bytes. They count against the front end's budget as long as they are in use.

    Raises BadRequest, or Failed with 413, 415, 408 or 503.
    """
    if not http.headers.get("content-type", "").lower().startswith("multipart/form-data"):
        raise Failed(Failure(415, "the body must be multipart/form-data with a file"))
    with counted(http) as count:
        yield await _read_form(http, count)


async def _read_form(http: Request, count: Callable[[int], None]) -> dict[str, Any]:
    size = 0

    async def bounded():
        nonlocal size
        async for part in http.stream():
            size += len(part)
            if size > MAX_BODY_BYTES:
                raise Failed(Failure(413, f"the body is larger than {MAX_BODY_BYTES >> 20} MiB", "file"))
            count(len(part))
            yield part

    try:
        async with asyncio.timeout(READ_SECONDS):
            form = await _InMemory(http.headers, bounded(), max_files=1, max_fields=32, max_part_size=64 << 10).parse()
    except TimeoutError:
        raise Failed(Failure(408, f"the body did not arrive within {READ_SECONDS:.0f} s")) from None
    except (MultiPartException, HTTPException, KeyError) as e:
        raise BadRequest(f"the form cannot be read: {getattr(e, 'message', 'no boundary')}", "file") from None
    out: dict[str, Any] = {}
    for key, value in form.multi_items():
        if isinstance(value, UploadFile):
            out[key] = await value.read()
            await value.close()
        elif key.endswith("[]"):
            out.setdefault(key, []).append(value)
        else:
            out[key] = value
    return out


_FIELDS = {"file", "model", "language", "prompt", "response_format", "temperature", "timestamp_granularities[]", "stream"}


def _transcription(form: dict[str, Any]) -> tuple[str, dict[str, Any], bool]:
    """Checks the form; returns (response format, the walk's parameters, whether to stream)."""
    unknown = sorted(set(form) - _FIELDS)
    if unknown:
        raise BadRequest(f"unknown parameter: {unknown[0][:100]}", unknown[0][:100])
    if not isinstance(form.get("file"), bytes):
        raise BadRequest("file: is required; send an audio file", "file")
    shape = form.get("response_format", "json")
    if shape not in TEXT_FORMATS:
        raise BadRequest(f"response_format: {shape[:50]!r} is not one of {', '.join(TEXT_FORMATS)}", "response_format")
    granularities = set(form.get("timestamp_granularities[]", []))
    if granularities - {"segment", "word"}:
        raise BadRequest("timestamp_granularities: must be segment or word", "timestamp_granularities[]")
    if "word" in granularities and shape != "verbose_json":
        raise BadRequest("timestamp_granularities: needs response_format verbose_json", "timestamp_granularities[]")
    try:
        temperature = float(form.get("temperature", 0) or 0)
    except ValueError:
        temperature = -1.0
    if not 0 <= temperature <= 1:
        raise BadRequest("temperature: must be a number from 0 to 1", "temperature")
    stream = str(form.get("stream", "")).lower() in ("true", "1")
    if stream and shape not in ("json", "text"):
        raise BadRequest("stream: needs response_format json or text", "stream")
    params = {"language": form.get("language") or None, "prompt": form.get("prompt", ""), "temperature": temperature}
    params["words"] = "word" in granularities
    return shape, params, stream


async def transcriptions(http: Request) -> Response:
    """POST /v1/audio/transcriptions."""
    front, composite = http.app.state.front, composite_of(http)
    async with form_of(http) as form:
        front.check_model(form.get("model"))
        shape, params, stream = _transcription(form)
        audio = await in_decoder(audio_file.decode, form.pop("file"), HEARD_RATE)
    call = composite.open("transcribe", ("heard", "segments"), ("audio",), params)
    call.watch(http.receive, http.scope.get("slipstream.cut"))
    call.feed("audio", audio)
    if stream:
        return Events(call, _transcript_events(call))
    async with call:
        text, segments = "", []
        async for output in call.run:
            if output.port == "heard":
                text += output.value or ""
            elif output.value is not None:
                segments = output.value
    if call.gone:
        return Response(status_code=499)
    language = params["language"] or "en"
    timed = form.get("timestamp_granularities[]", ("segment",))
    kind, body = render(shape, text.strip(), segments, len(audio) / HEARD_RATE, language, timed)
    return Response(body, media_type=kind)


async def _transcript_events(call: Call) -> AsyncIterator[dict]:
    text = ""
    async for output in call.run:
        if output.port == "heard" and output.value:
            piece = output.value if text else output.value.lstrip()
            text += piece
            yield {"type": "transcript.text.delta", "delta": piece}
    yield {"type": "transcript.text.done", "text": text.strip()}


async def translations(http: Request) -> Response:
    """POST /v1/audio/translations: refused by name, since the model does not translate."""
    async with form_of(http):
        raise BadRequest(f"model: {http.app.state.front.model!r} transcribes English only and cannot translate", "model")


class Events(Response):
    """Server-sent events of a call. A failure is the last event and has a name; the stream does not look complete."""

    def __init__(self, call: Call, events: AsyncIterator[dict], done: bytes = b""):
        super().__init__()
        self.call, self.events, self.done = call, events, done

    async def __call__(self, scope, receive, send) -> None:
        call = self.call
        try:
            await send({"type": "http.response.start", "status": 200, "headers": list(EVENT_HEADERS)})
            async for event in self.events:
                await call.write(send, b"data: " + json.dumps(event).encode() + b"\n\n", True)
            if not call.gone:
                await call.write(send, self.done, False)
        except Exception as e:
            await call.write(send, b"data: " + failure_of(e).body() + b"\n\n", False)
        finally:
            call.close()


def failure_of(error: Exception) -> Failure:
    """The failure as the client sees it; a component's failure carries its name."""
    if isinstance(error, RequestFailed):
        code = "component_refused" if error.status < 500 else "component_failed"
        return Failure(error.status, str(error), error.param, code)
    return to_failure(error)
