"""/v1/audio/speech and /v1/audio/voices of a composite model."""

import base64
from collections.abc import AsyncIterator
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response

from slipstream.components.speech import ALIASES, MAX_SPEED, MIN_SPEED, RATE, VOICES, check_sayable
from slipstream.errors import BadRequest
from slipstream.serve.audio import audio_file
from slipstream.serve.audio.audio import Events, composite_of, in_thread
from slipstream.serve.engine.composite import Call
from slipstream.serve.openai.generate import STREAM_HEADERS
from slipstream.serve.request_body import read

MAX_INPUT_CHARS = 4096  # characters to speak; OpenAI's limit


class SpeechBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/audio/speech."""

    input: Annotated[str, Meta(min_length=1, max_length=MAX_INPUT_CHARS)]
    model: str | None = None
    voice: str | dict[str, str] = VOICES[0]
    response_format: Literal["mp3", "opus", "aac", "flac", "wav", "pcm"] = "mp3"
    speed: Annotated[float, Meta(ge=0.25, le=4.0)] = 1.0
    stream_format: Literal["sse", "audio"] | None = None
    stream: bool | None = None
    instructions: str | None = None


def check_voice(voice: Any, param: str = "voice") -> str:
    """The voice's name, from JSON that is a name or an object with an id."""
    name = voice.get("id") if isinstance(voice, dict) else voice
    if name not in (*VOICES, *ALIASES):
        names = f"{', '.join(VOICES)}, or OpenAI's names for it: {', '.join(ALIASES)}"
        raise BadRequest(f"{param}: {str(name)[:50]!r} is not one of {names}", param)
    return name


def check_speed(speed: float, param: str = "speed") -> None:
    if not MIN_SPEED <= speed <= MAX_SPEED:
        raise BadRequest(f"{param}: must be from {MIN_SPEED} to {MAX_SPEED} for this voice", param)


async def voices(http: Request) -> Response:
    """GET /v1/audio/voices."""
    return Response(msgspec.json.encode({"voices": [*VOICES, *ALIASES]}), media_type="application/json")


async def speech(http: Request) -> Response:
    """POST /v1/audio/speech. Whole by default; `stream_format` or `stream` sends it as it is made."""
    front, composite = http.app.state.front, composite_of(http)
    body = await read(http, SpeechBody)
    front.check_model(body.model)
    check_voice(body.voice)
    check_speed(body.speed)
    check_sayable(body.input, "input")
    if body.instructions:
        raise BadRequest("instructions: not supported by this voice; leave it out", "instructions")
    if why := audio_file.unavailable(body.response_format):
        raise BadRequest(f"response_format: {why}", "response_format")
    tokens = await in_thread(front.ready_tokenizer().encode, body.input, False)
    call = composite.open("speak", ("audio",), ("text",), {"speed": body.speed})
    call.watch(http.receive, http.scope.get("slipstream.cut"))
    call.feed("text", body.input)
    pieces = _sound(call)
    try:
        first = await anext(pieces)  # a failure before the first samples is an HTTP error
    except BaseException:
        call.close()
        raise
    if body.stream_format == "sse":
        return Events(call, _speech_events(first, pieces, body.response_format, len(tokens)))
    kind = audio_file.FORMATS[body.response_format][0]
    if body.stream or body.stream_format:
        return Sound(call, first, pieces, body.response_format, kind)
    async with call:
        samples = np.concatenate([first, *[piece async for piece in pieces]])
    if call.gone:
        return Response(status_code=499)
    return Response(await in_thread(audio_file.encode, samples, RATE, body.response_format), media_type=kind)


async def _sound(call: Call) -> AsyncIterator[np.ndarray]:
    """A call's samples. Raises BadRequest if there are none."""
    some = False
    async for output in call.run:
        if output.value is not None:
            some = True
            yield output.value
    if not some:
        raise BadRequest("input: must hold a word that this voice can say", "input")


async def _speech_events(first: np.ndarray, rest: AsyncIterator[np.ndarray], format: str, heard: int) -> AsyncIterator[dict]:
    """`heard`: tokens of the text. Sound counts 20 tokens a second, as in OpenAI's API."""
    encoder, samples = audio_file.Encoder(RATE, format), len(first)
    yield _delta(await in_thread(encoder.feed, first))
    async for piece in rest:
        samples += len(piece)
        yield _delta(await in_thread(encoder.feed, piece))
    if data := await in_thread(encoder.end):
        yield _delta(data)
    said = -(-samples * 20 // RATE)
    usage = {"input_tokens": heard, "output_tokens": said, "total_tokens": heard + said}
    yield {"type": "speech.audio.done", "usage": usage}


def _delta(data: bytes) -> dict:
    return {"type": "speech.audio.delta", "audio": base64.b64encode(data).decode()}


class Sound(Response):
    """Audio as it is made. A failure cuts the connection, so that a client does not take a part for the whole."""

    def __init__(self, call: Call, first: np.ndarray, rest: AsyncIterator[np.ndarray], format: str, kind: str):
        super().__init__()
        self.call, self.first, self.rest, self.format, self.kind = call, first, rest, format, kind

    async def __call__(self, scope, receive, send) -> None:
        call, encoder = self.call, audio_file.Encoder(RATE, self.format)
        try:
            headers = [(b"content-type", self.kind.encode()), *STREAM_HEADERS]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            await call.write(send, await in_thread(encoder.feed, self.first), True)
            async for piece in self.rest:
                await call.write(send, await in_thread(encoder.feed, piece), True)
            if not call.gone:
                await call.write(send, await in_thread(encoder.end), False)
        finally:
            call.close()
