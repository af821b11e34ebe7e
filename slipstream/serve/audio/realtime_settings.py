"""A realtime session's settings: from `session.update` and `response.create` to OpenAI's session object. Plain values."""

import dataclasses
import secrets
from dataclasses import dataclass, field
from typing import Any

from slipstream.components.speech import VOICES
from slipstream.errors import BadRequest
from slipstream.serve.audio.speech import check_speed, check_voice
from slipstream.serve.audio.vad import Turns
from slipstream.serve.audio.wire_format import FORMATS, PCM, WireFormat

MAX_TEXT_CHARS = 32_768  # characters of one item or of the instructions
MAX_TOOLS = 128
# Silence that ends a turn under `semantic_vad`: this server measures loudness only, so eagerness sets how long a pause may be.
EAGERNESS_MS = {"low": 1500, "medium": 800, "auto": 800, "high": 400}


def as_dict(value: Any, param: str) -> dict[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise BadRequest(f"{param}: expected an object", param)
    return value


def only(given: dict[str, Any], names: str, param: str) -> dict[str, Any]:
    """Raises BadRequest for a field that is not one of `names`; null, [] and {} count as absent."""
    for name, value in given.items():
        if value not in (None, [], {}) and name not in names.split():
            raise BadRequest(f"unknown parameter: {param}.{name[:100]}", f"{param}.{name[:100]}")
    return given


def as_text(value: Any, param: str) -> str:
    if not isinstance(value, str) or len(value) > MAX_TEXT_CHARS:
        raise BadRequest(f"{param}: expected a text of at most {MAX_TEXT_CHARS} characters", param)
    return value


# tracing has no effect; the rest are further fields of a session or a response that a client sends back
_IDLE = "tracing metadata object id expires_at"
_COMMON = "instructions output_modalities max_output_tokens audio tools tool_choice parallel_tool_calls"


@dataclass(frozen=True)
class Settings:
    """The settings of `session.update` and `response.create`."""

    model: str = ""
    models: tuple[str, ...] = ()  # all names of the model
    id: str = field(default_factory=lambda: "sess_" + secrets.token_hex(8))
    transcribes: bool = False  # a transcription session: it makes no answers
    instructions: str = ""
    speaks: bool = True
    voice: str = VOICES[0]
    speed: float = 1.0
    max_tokens: int | None = 512
    hears_as: WireFormat = PCM
    speaks_as: WireFormat = PCM
    transcription: dict[str, Any] = field(default_factory=dict)  # as the client wrote it; transcripts are always sent
    turns: Turns | None = field(default_factory=Turns)
    eagerness: str | None = None  # of `semantic_vad`
    answers: bool = True  # whether the end of a turn starts an answer
    interrupts: bool = True  # whether the beginning of a turn ends one
    truncates: bool = True  # whether the oldest items are left out of a conversation that is too long
    tools: tuple[dict[str, Any], ...] = ()  # as the client wrote them
    tool_choice: Any = "auto"
    parallel: bool = True

    def updated(self, session: Any) -> "Settings":
        """A copy with the fields of a session object. Raises BadRequest for those that are not supported."""
        given = as_dict(session, "session")
        kind = given.get("type", "transcription" if self.transcribes else "realtime")
        if kind not in ("realtime", "transcription"):
            raise BadRequest("session.type: must be realtime or transcription", "session.type")
        if given.get("model") not in (None, self.model, *self.models):
            raise BadRequest(f"session.model: this server has {self.model!r}", "session.model")
        transcribes = kind == "transcription"
        only(given, f"type audio {_IDLE}" if transcribes else f"type model truncation {_COMMON} {_IDLE}", "session")
        new = dataclasses.replace(self, transcribes=transcribes)._common(given, "session")
        sound = only(as_dict(given.get("audio"), "session.audio"), "input" if transcribes else "input output", "session.audio")
        hears, says = as_dict(sound.get("input"), "session.audio.input"), as_dict(sound.get("output"), "session.audio.output")
        new = new._input(hears, "session.audio.input")._output(says, "session.audio.output")
        if given.get("truncation") is not None:
            if given["truncation"] not in ("auto", "disabled"):
                raise BadRequest('session.truncation: must be "auto" or "disabled"', "session.truncation")
            new = dataclasses.replace(new, truncates=given["truncation"] == "auto")
        return new

    def for_response(self, given: Any) -> "Settings":
        given = as_dict(given, "response")
        if given.get("input") or given.get("conversation") not in (None, "auto"):
            raise BadRequest("response: input and conversation are not supported; leave them out", "response")
        only(given, f"input conversation {_COMMON} {_IDLE}", "response")
        sound = only(as_dict(given.get("audio"), "response.audio"), "output", "response.audio")
        says = as_dict(sound.get("output"), "response.audio.output")
        return self._common(given, "response")._output(says, "response.audio.output")

    def _common(self, given: dict[str, Any], param: str) -> "Settings":
        new = self
        if given.get("instructions") is not None:
            new = dataclasses.replace(new, instructions=as_text(given["instructions"], f"{param}.instructions"))
        if given.get("output_modalities") is not None:
            kinds = given["output_modalities"]
            if kinds not in (["text"], ["audio"]):
                raise BadRequest(f'{param}.output_modalities: must be ["text"] or ["audio"]', f"{param}.output_modalities")
            new = dataclasses.replace(new, speaks=kinds == ["audio"])
        if (limit := given.get("max_output_tokens")) is not None:
            if limit != "inf" and not (isinstance(limit, int) and 1 <= limit <= 4096):
                raise BadRequest(f'{param}.max_output_tokens: must be 1 to 4096, or "inf"', f"{param}.max_output_tokens")
            new = dataclasses.replace(new, max_tokens=None if limit == "inf" else limit)
        if given.get("tools") is not None:
            new = dataclasses.replace(new, tools=_tools(given["tools"], f"{param}.tools"))
        if given.get("tool_choice") is not None:
            new = dataclasses.replace(new, tool_choice=_tool_choice(given["tool_choice"], f"{param}.tool_choice"))
        if given.get("parallel_tool_calls") is not None:
            new = dataclasses.replace(new, parallel=bool(given["parallel_tool_calls"]))
        return new

    def _input(self, hears: dict[str, Any], param: str) -> "Settings":
        new = self
        only(hears, "format transcription turn_detection noise_reduction", param)
        where = f"{param}.noise_reduction"  # not done here; it changes what the server hears, and no event
        kind = only(as_dict(hears.get("noise_reduction"), where), "type", where).get("type")
        if kind not in (None, "near_field", "far_field"):
            raise BadRequest(f"{where}.type: must be near_field or far_field", f"{where}.type")
        if hears.get("format") is not None:
            new = dataclasses.replace(new, hears_as=_format(hears["format"], f"{param}.format"))
        if hears.get("transcription") is not None:
            where = f"{param}.transcription"
            words = only(as_dict(hears["transcription"], where), "model language prompt", where)
            if words.get("language") not in (None, "en"):
                raise BadRequest(f"{where}.language: must be en", f"{where}.language")
            as_text(words.get("prompt") or "", f"{where}.prompt")
            new = dataclasses.replace(new, transcription=words)
        return new._detection(hears["turn_detection"], f"{param}.turn_detection") if "turn_detection" in hears else new

    def _output(self, says: dict[str, Any], param: str) -> "Settings":
        new = self
        only(says, "format voice speed", param)
        if says.get("format") is not None:
            new = dataclasses.replace(new, speaks_as=_format(says["format"], f"{param}.format"))
        if says.get("voice") is not None:
            new = dataclasses.replace(new, voice=check_voice(says["voice"], param + ".voice"))
        if (speed := says.get("speed")) is not None:
            if not isinstance(speed, int | float):
                raise BadRequest(f"{param}.speed: expected a number", param + ".speed")
            check_speed(speed, param + ".speed")
            new = dataclasses.replace(new, speed=float(speed))
        return new

    def _detection(self, given: Any, param: str) -> "Settings":
        if given is None:
            return dataclasses.replace(self, turns=None)
        given = as_dict(given, param)
        answers, interrupts = given.get("create_response", True), given.get("interrupt_response", True)
        new = dataclasses.replace(self, answers=bool(answers), interrupts=bool(interrupts))
        kind, flags = given.get("type", "server_vad"), "type create_response interrupt_response model_version"
        if kind == "semantic_vad":
            only(given, f"{flags} eagerness", param)
            eagerness = given.get("eagerness") or "auto"
            if not isinstance(eagerness, str) or eagerness not in EAGERNESS_MS:
                raise BadRequest(f"{param}.eagerness: must be one of {', '.join(EAGERNESS_MS)}", f"{param}.eagerness")
            turns = Turns(silence_duration_ms=EAGERNESS_MS[eagerness])
            return dataclasses.replace(new, turns=turns, eagerness=eagerness)
        if kind != "server_vad":
            raise BadRequest(f"{param}.type: must be server_vad or semantic_vad", param + ".type")
        only(given, f"{flags} threshold prefix_padding_ms silence_duration_ms", param)
        numbers = {}
        for name, most in (("threshold", 1.0), ("prefix_padding_ms", 5000), ("silence_duration_ms", 10_000)):
            value = given.get(name)
            if value is not None:
                if not isinstance(value, int | float) or not 0 <= value <= most:
                    raise BadRequest(f"{param}.{name}: must be a number from 0 to {most}", f"{param}.{name}")
                numbers[name] = value if name == "threshold" else int(value)
        before = self.turns if self.turns and not self.eagerness else Turns()
        return dataclasses.replace(new, turns=dataclasses.replace(before, **numbers), eagerness=None)

    def body(self) -> dict[str, Any]:
        """The language model's parameters. Decoding is greedy, since a session has no temperature."""
        out: dict[str, Any] = {"temperature": 0.0} | ({} if self.max_tokens is None else {"max_tokens": self.max_tokens})
        if self.tools:
            functions = [{k: v for k, v in tool.items() if k != "type" and v is not None} for tool in self.tools]
            named = isinstance(self.tool_choice, dict)
            choice = {"type": "function", "function": {"name": self.tool_choice["name"]}} if named else self.tool_choice
            out |= {"tools": [{"type": "function", "function": f} for f in functions], "tool_choice": choice}
            out |= {"parallel_tool_calls": self.parallel}
        return out

    def describe(self) -> dict[str, Any]:
        """The session object. A client may send it back unchanged."""
        detection: dict[str, Any] | None = None
        if self.turns and self.eagerness:
            detection = {"type": "semantic_vad", "eagerness": self.eagerness}
        elif self.turns:
            names = ("threshold", "prefix_padding_ms", "silence_duration_ms")
            detection = {"type": "server_vad", **{name: getattr(self.turns, name) for name in names}}
        if detection is not None:
            detection |= {"create_response": self.answers, "interrupt_response": self.interrupts}
        hears = {"format": self.hears_as.describe(), "turn_detection": detection, "transcription": self.transcription or None}
        if self.transcribes:
            kind = {"type": "transcription", "object": "realtime.transcription_session"}
            return {**kind, "id": self.id, "audio": {"input": hears}}
        return {
            "type": "realtime",
            "object": "realtime.session",
            "id": self.id,
            "model": self.model,
            "instructions": self.instructions,
            "output_modalities": ["audio" if self.speaks else "text"],
            "max_output_tokens": "inf" if self.max_tokens is None else self.max_tokens,
            "truncation": "auto" if self.truncates else "disabled",
            "tools": list(self.tools),
            "tool_choice": self.tool_choice,
            "parallel_tool_calls": self.parallel,
            "audio": {
                "input": hears,
                "output": {"format": self.speaks_as.describe(), "voice": self.voice, "speed": self.speed},
            },
        }


def _format(given: Any, param: str) -> WireFormat:
    given = only(as_dict(given, param), "type rate", param)
    found = FORMATS.get(given.get("type", PCM.type)) if isinstance(given.get("type", ""), str) else None
    if found is None or given.get("rate", found.rate) != found.rate:
        raise BadRequest(f"{param}: must be audio/pcm at 24000 Hz, or audio/pcmu or audio/pcma at 8000 Hz", param)
    return found


def _tools(given: Any, param: str) -> tuple[dict[str, Any], ...]:
    if not isinstance(given, list) or len(given) > MAX_TOOLS:
        raise BadRequest(f"{param}: expected a list of at most {MAX_TOOLS} functions", param)
    for i, tool in enumerate(given):
        where = f"{param}[{i}]"
        only(as_dict(tool, where), "type name description parameters strict", where)
        if not tool or tool.get("type", "function") != "function" or not isinstance(tool.get("name"), str):
            raise BadRequest(f"{where}: must be of type function and have a name", where)
        as_dict(tool.get("parameters"), f"{where}.parameters")
    return tuple(given)


def _tool_choice(given: Any, param: str) -> Any:
    named = isinstance(given, dict) and given.get("type") == "function" and isinstance(given.get("name"), str)
    if not named and given not in ("auto", "none", "required"):
        raise BadRequest(f'{param}: must be "auto", "none", "required", or a function by its name', param)
    return given
