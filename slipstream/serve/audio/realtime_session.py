"""A realtime session's settings and its conversation: plain state, no I/O but waiting for words that are being heard."""

import asyncio
import dataclasses
import secrets
from dataclasses import dataclass, field
from typing import Any

from slipstream.components.speech import VOICES
from slipstream.errors import BadRequest
from slipstream.serve.audio.audio import check_speed, check_voice
from slipstream.serve.audio.vad import Turns

MAX_ITEMS = 128
MAX_TEXT = 32_768  # characters of one item or of the instructions


def _dict(value: Any, param: str) -> dict[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise BadRequest(f"{param}: expected an object", param)
    return value


def _only(given: dict[str, Any], names: str, param: str) -> dict[str, Any]:
    """Raises BadRequest for a field that is not one of `names`; null, [] and {} count as absent."""
    for name, value in given.items():
        if value not in (None, [], {}) and name not in names.split():
            raise BadRequest(f"unknown parameter: {param}.{name[:100]}", f"{param}.{name[:100]}")
    return given


def _text(value: Any, param: str) -> str:
    if not isinstance(value, str) or len(value) > MAX_TEXT:
        raise BadRequest(f"{param}: expected a text of at most {MAX_TEXT} characters", param)
    return value


# no tools are had, nothing is traced, and the rest is what a client's copy of a session or a response carries besides
_IDLE = "tool_choice parallel_tool_calls tracing metadata object id expires_at tools"
_COMMON = "instructions output_modalities max_output_tokens audio"


@dataclass(frozen=True)
class Settings:
    """What `session.update` and `response.create` set."""

    model: str = ""
    id: str = field(default_factory=lambda: "sess_" + secrets.token_hex(8))
    instructions: str = ""
    speaks: bool = True
    voice: str = VOICES[0]
    speed: float = 1.0
    max_tokens: int | None = 512
    turns: Turns | None = field(default_factory=Turns)
    answers: bool = True  # the end of a turn begins an answer
    interrupts: bool = True  # the begin of a turn ends one

    def updated(self, session: Any) -> "Settings":
        """With the fields of a session object. Raises BadRequest for what is not had here."""
        given = _dict(session, "session")
        if given.get("type") not in (None, "realtime"):
            raise BadRequest("session.type: only realtime", "session.type")
        if given.get("model") not in (None, self.model):
            raise BadRequest(f"session.model: this server has {self.model!r}", "session.model")
        new = self._common(given, "session")
        _only(given, f"type model {_COMMON} {_IDLE}", "session")
        sound = _only(_dict(given.get("audio"), "session.audio"), "input output", "session.audio")
        hears, says = _dict(sound.get("input"), "session.audio.input"), _dict(sound.get("output"), "session.audio.output")
        _only(hears, "format transcription turn_detection", "session.audio.input")
        where = "session.audio.input.transcription"
        words = _only(_dict(hears.get("transcription"), where), "model language", where)  # words are always given
        if words.get("language") not in (None, "en"):
            raise BadRequest(f"{where}.language: only en", f"{where}.language")
        for name, side in (("input", hears), ("output", says)):
            format = _dict(side.get("format"), f"session.audio.{name}.format")
            if format.get("type", "audio/pcm") != "audio/pcm" or format.get("rate", 24_000) != 24_000:
                raise BadRequest(f"session.audio.{name}.format: only audio/pcm at 24000 Hz", f"session.audio.{name}.format")
        if "turn_detection" in hears:
            new = new._detection(hears["turn_detection"])
        return new._output(says, "session.audio.output")

    def for_response(self, given: Any) -> "Settings":
        given = _dict(given, "response")
        if given.get("tools") or given.get("input") or given.get("conversation") not in (None, "auto"):
            raise BadRequest("response: tools, input and conversation are not taken here", "response")
        _only(given, f"input conversation {_COMMON} {_IDLE}", "response")
        sound = _only(_dict(given.get("audio"), "response.audio"), "output", "response.audio")
        says = _dict(sound.get("output"), "response.audio.output")
        return self._common(given, "response")._output(says, "response.audio.output")

    def _common(self, given: dict[str, Any], param: str) -> "Settings":
        new = self
        if given.get("tools"):
            raise BadRequest(f"{param}.tools: tools are not supported", f"{param}.tools")
        if given.get("instructions") is not None:
            new = dataclasses.replace(new, instructions=_text(given["instructions"], f"{param}.instructions"))
        if given.get("output_modalities") is not None:
            kinds = given["output_modalities"]
            if kinds not in (["text"], ["audio"]):
                raise BadRequest(f'{param}.output_modalities: ["text"] or ["audio"]', f"{param}.output_modalities")
            new = dataclasses.replace(new, speaks=kinds == ["audio"])
        if (limit := given.get("max_output_tokens")) is not None:
            if limit != "inf" and not (isinstance(limit, int) and 1 <= limit <= 4096):
                raise BadRequest(f'{param}.max_output_tokens: 1 to 4096, or "inf"', f"{param}.max_output_tokens")
            new = dataclasses.replace(new, max_tokens=None if limit == "inf" else limit)
        return new

    def _output(self, says: dict[str, Any], param: str) -> "Settings":
        new = self
        _only(says, "format voice speed", param)
        if says.get("voice") is not None:
            new = dataclasses.replace(new, voice=check_voice(says["voice"], param + ".voice"))
        if (speed := says.get("speed")) is not None:
            if not isinstance(speed, int | float):
                raise BadRequest(f"{param}.speed: expected a number", param + ".speed")
            check_speed(speed, param + ".speed")
            new = dataclasses.replace(new, speed=float(speed))
        return new

    def _detection(self, given: Any) -> "Settings":
        if given is None:
            return dataclasses.replace(self, turns=None)
        param = "session.audio.input.turn_detection"
        given = _dict(given, param)
        if given.get("type", "server_vad") != "server_vad":
            raise BadRequest(f"{param}.type: only server_vad", param + ".type")
        numbered = "threshold prefix_padding_ms silence_duration_ms"
        _only(given, f"type {numbered} create_response interrupt_response", param)
        numbers = {}
        for name, most in (("threshold", 1.0), ("prefix_padding_ms", 5000), ("silence_duration_ms", 10_000)):
            value = given.get(name)
            if value is not None:
                if not isinstance(value, int | float) or not 0 <= value <= most:
                    raise BadRequest(f"{param}.{name}: a number from 0 to {most}", f"{param}.{name}")
                numbers[name] = value if name == "threshold" else int(value)
        turns = dataclasses.replace(self.turns or Turns(), **numbers)
        answers, interrupts = given.get("create_response", True), given.get("interrupt_response", True)
        return dataclasses.replace(self, turns=turns, answers=bool(answers), interrupts=bool(interrupts))

    def body(self) -> dict[str, Any]:
        """The language model's parameters: the likeliest words, since a session has no temperature."""
        return {"temperature": 0.0} | ({} if self.max_tokens is None else {"max_tokens": self.max_tokens})

    def describe(self) -> dict[str, Any]:
        detection = None
        if self.turns:
            detection = {
                "type": "server_vad",
                "threshold": self.turns.threshold,
                "prefix_padding_ms": self.turns.prefix_padding_ms,
                "silence_duration_ms": self.turns.silence_duration_ms,
                "create_response": self.answers,
                "interrupt_response": self.interrupts,
            }
        pcm = {"type": "audio/pcm", "rate": 24_000}
        return {
            "type": "realtime",
            "object": "realtime.session",
            "id": self.id,
            "model": self.model,
            "instructions": self.instructions,
            "output_modalities": ["audio" if self.speaks else "text"],
            "max_output_tokens": "inf" if self.max_tokens is None else self.max_tokens,
            "audio": {
                "input": {"format": pcm, "turn_detection": detection},
                "output": {"format": pcm, "voice": self.voice, "speed": self.speed},
            },
        }


@dataclass(eq=False)
class Item:
    """One turn. `words` is the task that hears it, for a spoken one."""

    id: str
    role: str
    kind: str  # input_text, input_audio, text, audio
    previous: str | None
    text: str = ""
    words: asyncio.Task | None = None
    milliseconds: int = 0  # of its audio, for an answer

    def describe(self, status: str = "completed") -> dict[str, Any]:
        name = "transcript" if "audio" in self.kind else "text"
        kind = f"output_{self.kind}" if self.role == "assistant" else self.kind
        content = [{"type": kind, name: self.text}]
        status = status if status in ("completed", "in_progress") else "incomplete"
        return {
            "id": self.id,
            "object": "realtime.item",
            "type": "message",
            "status": status,
            "role": self.role,
            "content": content,
        }


class Conversation:
    """Items in order, at most `MAX_ITEMS`: the oldest are forgotten."""

    def __init__(self) -> None:
        self.items: list[Item] = []
        self.next_id = self._id()

    def _id(self) -> str:
        return "item_" + secrets.token_hex(8)

    def reserve(self, role: str, kind: str) -> Item:
        """An item that is not yet part of the conversation."""
        item = Item(self.next_id, role, kind, None)
        self.next_id = self._id()
        return item

    def append(self, item: Item) -> Item:
        item.previous = self.items[-1].id if self.items else None
        self.items.append(item)
        del self.items[:-MAX_ITEMS]
        return item

    def add(self, role: str, kind: str) -> Item:
        return self.append(self.reserve(role, kind))

    def create(self, given: Any) -> Item:
        given = _dict(given, "item")
        role, parts = given.get("role"), given.get("content")
        if given.get("type", "message") != "message" or role not in ("user", "assistant", "system"):
            raise BadRequest("item: only messages of user, assistant and system", "item")
        if not isinstance(parts, list) or not parts:
            raise BadRequest("item.content: expected a list of parts", "item.content")
        texts = []
        for part in parts:
            part = _dict(part, "item.content")
            if part.get("type") not in ("input_text", "text", "output_text"):
                raise BadRequest("item.content: only text; speech goes through input_audio_buffer", "item.content")
            texts.append(_text(part.get("text"), "item.content.text"))
        item = self.add(role, "text" if role == "assistant" else "input_text")
        if isinstance(given.get("id"), str) and 0 < len(given["id"]) <= 64:
            item.id = given["id"]
        item.text = "\n".join(texts)
        return item

    def _find(self, id: Any) -> Item:
        item = next((i for i in self.items if i.id == id), None)
        if item is None:
            raise BadRequest("item_id: there is no such item", "item_id")
        return item

    def delete(self, id: Any) -> None:
        self.items.remove(self._find(id))

    def truncate(self, id: Any, audio_end_ms: Any) -> None:
        """Keeps of an answer's words the share that was heard."""
        item = self._find(id)
        if item.role != "assistant" or not isinstance(audio_end_ms, int) or audio_end_ms < 0:
            raise BadRequest("audio_end_ms: a whole number, of an answer's audio", "audio_end_ms")
        if item.milliseconds and audio_end_ms < item.milliseconds:
            item.text = item.text[: len(item.text) * audio_end_ms // item.milliseconds]
            item.milliseconds = audio_end_ms

    async def settled(self) -> None:
        """Waits until every spoken turn has its words."""
        for item in list(self.items):
            if item.words is not None:
                await asyncio.shield(item.words)

    def messages(self, instructions: str) -> list[dict[str, Any]]:
        """The conversation as the language model reads it. Raises BadRequest where nobody has said anything."""
        said = [{"role": i.role, "content": i.text} for i in self.items if i.text.strip()]
        if not any(m["role"] == "user" for m in said):
            raise BadRequest("no speech was heard and no text was given", "input")
        return [*([{"role": "system", "content": instructions}] if instructions else []), *said]
