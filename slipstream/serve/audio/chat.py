"""/v1/chat/completions of a composite model: speech in messages, and spoken answers, in OpenAI's format.

A conversation without speech takes the plain route, unchanged.
"""

import base64
import time
from collections.abc import AsyncIterator, Iterator
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response

from slipstream.components.speech import RATE, VOICES
from slipstream.errors import BadRequest
from slipstream.serve.audio.audio import HEARD_RATE, Events, audio_file, composite_of, in_decoder, in_thread
from slipstream.serve.audio.speech import check_voice
from slipstream.serve.delivery import LongResponse
from slipstream.serve.engine.composite import Call, Composite
from slipstream.serve.engine.exclusive import run_sliced
from slipstream.serve.front import Front
from slipstream.serve.openai.bodies import ChatBody, Message, RefusalPart, TextPart
from slipstream.serve.openai.generate import answer_chat
from slipstream.serve.openai.writers import HOLE, filled
from slipstream.serve.request_body import read
from slipstream.serve.text.params import make_plan

MAX_AUDIO_PARTS = 8
_EXPIRES = 3600
_PIECE_BYTES = 3 << 15  # of sound in a piece of JSON; a multiple of three, so that the pieces' base64 is that of the whole


class InputAudio(msgspec.Struct, forbid_unknown_fields=True):
    data: str
    format: Literal["wav", "mp3", "flac", "ogg", "opus", "aac", "webm", "m4a"]


class AudioPart(msgspec.Struct, tag_field="type", tag="input_audio", forbid_unknown_fields=True):
    input_audio: InputAudio


class VoiceMessage(Message, kw_only=True):
    content: str | list[TextPart | RefusalPart | AudioPart] | None = None  # type: ignore[assignment]
    audio: dict[str, Any] | None = None  # type: ignore[assignment]


class AudioOut(msgspec.Struct, forbid_unknown_fields=True):
    format: Literal["wav", "mp3", "flac", "opus", "aac", "pcm16"]
    voice: str | dict[str, str] = VOICES[0]


class VoiceChatBody(ChatBody, kw_only=True):
    messages: Annotated[list[VoiceMessage], Meta(min_length=1, max_length=4096)]  # type: ignore[assignment]
    modalities: list[Literal["text", "audio"]] | None = None  # type: ignore[assignment]
    audio: AudioOut | None = None  # type: ignore[assignment]


async def chat(http: Request) -> Response:
    """POST /v1/chat/completions."""
    front: Front = http.app.state.front
    born = time.monotonic()
    body = await read(http, VoiceChatBody)
    spoken = _audio_parts(body)
    speaks = "audio" in (body.modalities or ())
    if not spoken and not speaks:
        if body.audio is not None:
            raise BadRequest('audio: needs modalities ["text", "audio"]', "audio")
        return await answer_chat(http, front, msgspec.convert(msgspec.to_builtins(body), ChatBody), born)
    front.check_model(body.model)
    shape = _check(body, speaks, front)
    composite = composite_of(http)
    heard = [await in_decoder(_decode, data, name) for data, name in spoken]
    messages = await _messages(composite, body, heard[:-1])
    params = {"body": _rest(body), "messages": messages}
    wanted = ("text", "finish", *(("audio",) if speaks else ()))
    if heard:
        call = composite.open("converse", wanted, ("audio",), params)
        call.feed("audio", heard[-1])
    else:
        call = composite.open("chat", wanted, ("messages",), params)
        call.feed("messages", messages)
    call.watch(http.receive, http.scope.get("slipstream.cut"))
    head = {"id": "chatcmpl-" + http.scope["slipstream.id"], "created": int(time.time()), "model": front.model}
    if body.stream:
        usage = bool(body.stream_options and body.stream_options.include_usage)
        return Events(call, _events(call, head, speaks, usage), b"data: [DONE]\n\n")
    return await _whole(call, head, shape)


def _audio_parts(body: VoiceChatBody) -> list[tuple[str, str]]:
    """(base64 data, the field's name) of every spoken part, in order."""
    out = []
    for i, message in enumerate(body.messages):
        parts = message.content if isinstance(message.content, list) else []
        for j, part in enumerate(parts):
            if isinstance(part, AudioPart):
                if message.role != "user":
                    raise BadRequest("input_audio: allowed only in messages with the role user", f"messages[{i}].content[{j}]")
                out.append((part.input_audio.data, f"messages[{i}].content[{j}].input_audio"))
    if len(out) > MAX_AUDIO_PARTS:
        raise BadRequest(f"messages: may hold at most {MAX_AUDIO_PARTS} input_audio parts", "messages")
    return out


_WITHOUT = ("logprobs", "top_logprobs", "return_token_ids", "tools", "response_format", "structured_outputs")


def _check(body: VoiceChatBody, speaks: bool, front: Front) -> str:
    """The format of the answer's audio, "" for none. Raises BadRequest for fields that speech does not support."""
    for field in _WITHOUT:
        if getattr(body, field, None) and not (field == "response_format" and body.response_format == {"type": "text"}):
            raise BadRequest(f"{field}: not supported with audio", field)
    if body.prompt_logprobs is not None:
        raise BadRequest("prompt_logprobs: not supported with audio", "prompt_logprobs")
    if body.stream_options is not None and not body.stream:
        raise BadRequest("stream_options: needs stream=true", "stream_options")
    if body.stream_options is not None and body.stream_options.continuous_usage_stats:
        where = "stream_options.continuous_usage_stats"
        raise BadRequest(f"{where}: not supported with audio", where)
    if (body.n or 1) != 1:
        raise BadRequest("n: must be 1 with audio", "n")
    if body.continue_final_message:
        raise BadRequest("continue_final_message: not supported with audio", "continue_final_message")
    plain = msgspec.convert({**_rest(body), "messages": [{"role": "user", "content": "x"}], "stream": True}, ChatBody)
    make_plan(plain, front.ready_tokenizer())  # refuses a bad field before anything is transcribed
    if not speaks:
        return ""
    if body.audio is None:
        raise BadRequest("audio: {format, voice} is required with the modality audio", "audio")
    check_voice(body.audio.voice, "audio.voice")
    name = body.audio.format
    if body.stream and name != "pcm16":
        raise BadRequest("audio.format: must be pcm16 with stream=true", "audio.format")
    if name != "pcm16" and (why := audio_file.unavailable(name)):
        raise BadRequest(f"audio.format: {why}", "audio.format")
    return name


def _rest(body: VoiceChatBody) -> dict[str, Any]:
    """The body of the language model's own request."""
    whole = msgspec.to_builtins(body)
    drop = {"messages", "modalities", "audio", "stream", "stream_options", "model"}
    return {k: v for k, v in whole.items() if v is not None and k not in drop}


def _decode(data: str, param: str) -> np.ndarray:
    head, _, tail = data.partition(",")
    if head.startswith("data:"):
        if not head.startswith("data:audio/") or not head.endswith(";base64"):
            raise BadRequest("data: a data URL must hold audio in base64", param)
        data = tail
    if len(data) > audio_file.MAX_BYTES * 4 // 3 + 4:
        raise BadRequest(f"data: may hold at most {audio_file.MAX_BYTES} bytes of audio", param, 413)
    try:
        raw = base64.b64decode(data, validate=True)
    except ValueError:
        raise BadRequest("data: must be valid base64", param) from None
    return audio_file.decode(raw, HEARD_RATE, param=param)


async def _messages(composite: Composite, body: VoiceChatBody, earlier: list[np.ndarray]) -> list[dict[str, Any]]:
    """The conversation in text. Spoken parts before the last are transcribed now; the last one's message has a
    `content` with a placeholder for its words."""
    texts = [await _transcribe(composite, audio) for audio in earlier]
    count = len(_audio_parts(body))
    out, at = [], 0
    for message in body.messages:
        plain: dict[str, Any] = {"role": message.role}
        if message.name is not None:
            plain["name"] = message.name
        content = message.content
        if isinstance(content, list):
            parts: list[str | None] = []
            for part in content:
                if not isinstance(part, AudioPart):
                    parts.append(part.text)
                    continue
                at += 1
                parts.append(None if at == count else texts[at - 1])
            content = _joined(parts)
        plain["content"] = content if content is not None else ""
        out.append(plain)
    return out


def _joined(parts: list[str | None]) -> str | list[str | None]:
    """The texts joined by newlines, or a list with None in place of the last spoken part's words."""
    return parts if None in parts else "\n".join(p for p in parts if p is not None)


async def _transcribe(composite: Composite, audio: np.ndarray) -> str:
    async with composite.open("transcribe", ("heard",), ("audio",), {"timestamps": True}) as call:
        call.feed("audio", audio)
        return "".join([o.value async for o in call.run if o.value is not None]).strip()


async def _events(call: Call, head: dict, speaks: bool, with_usage: bool) -> AsyncIterator[dict]:
    """Chunks in OpenAI's format. With audio, text goes out as the audio's transcript."""
    chunk = {**head, "object": "chat.completion.chunk", **({"usage": None} if with_usage else {})}

    def event(delta: dict, finish: str | None = None) -> dict:
        return {**chunk, "choices": [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}]}

    sound = {"id": "audio-" + head["id"].removeprefix("chatcmpl-")}
    finish: dict[str, Any] = {"reason": "stop", "usage": None}
    yield event({"role": "assistant", "content": None if speaks else ""})
    if speaks:
        yield event({"audio": {**sound, "transcript": ""}})
    async for output in call.run:
        if output.value is None:
            continue
        if output.port == "text":
            yield event({"audio": {**sound, "transcript": output.value}} if speaks else {"content": output.value})
        elif output.port == "audio":
            yield event({"audio": {**sound, "data": base64.b64encode(audio_file.pcm16(output.value)).decode()}})
        elif output.port == "finish":
            finish = output.value
    if speaks:
        yield event({"audio": {**sound, "expires_at": int(time.time()) + _EXPIRES}})
    yield event({}, finish["reason"])
    if with_usage:
        yield {**chunk, "choices": [], "usage": finish["usage"]}


async def _whole(call: Call, head: dict, shape: str) -> Response:
    text, sound, finish = "", [], {"reason": "stop", "usage": None}
    async with call:
        async for output in call.run:
            if output.value is None:
                continue
            if output.port == "text":
                text += output.value
            elif output.port == "audio":
                sound.append(output.value)
            else:
                finish = output.value
    if call.gone:
        return Response(status_code=499)
    message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
    fillings = []
    if shape:
        samples = np.concatenate(sound) if sound else np.zeros(0, np.int16)
        data = await in_thread(audio_file.encode, samples, RATE, "pcm" if shape == "pcm16" else shape)
        fillings.append(_quoted(data))
        id = "audio-" + head["id"].removeprefix("chatcmpl-")
        expires = int(time.time()) + _EXPIRES
        message |= {"content": None}
        message["audio"] = {"id": id, "data": HOLE, "expires_at": expires, "transcript": text}
    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": finish["reason"]}
    body = {**head, "object": "chat.completion", "choices": [choice], "usage": finish["usage"]}
    return LongResponse(await run_sliced(filled(body, fillings)))


def _quoted(data: bytes) -> Iterator[bytes]:
    """The bytes in base64 as a JSON string, in pieces: minutes of sound are megabytes."""
    yield b'"'
    for at in range(0, len(data), _PIECE_BYTES):
        yield base64.b64encode(data[at : at + _PIECE_BYTES])
    yield b'"'
