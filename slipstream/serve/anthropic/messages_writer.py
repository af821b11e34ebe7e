"""Writes /v1/messages: Anthropic's message object, its content blocks, and the events of a stream. Pure."""

import json
from collections.abc import Iterator
from typing import Any

from slipstream.serve.errors import Failure
from slipstream.serve.openai.read_writer import parses
from slipstream.serve.openai.writers import encode
from slipstream.serve.text.calls import Part
from slipstream.serve.text.choice import Choice
from slipstream.serve.text.logprobs import TokenNames
from slipstream.serve.text.params import GenerationParams

Event = dict[str, Any]


class Blocks:
    """Content blocks built from an answer's parts. Each change is an event."""

    def __init__(self) -> None:
        self.done: list[dict[str, Any]] = []
        self._kind = ""  # of the open block
        self._block: dict[str, Any] = {}
        self._texts: list[str] = []

    def push(self, part: Part) -> list[Event]:
        kind = "arguments" if part.kind == "call" else part.kind
        out: list[Event] = []
        if kind != self._kind or part.kind == "call":
            out += self.close()
            self._kind, self._texts = kind, []
            self._block = _empty(kind, part)
            out.append({"type": "content_block_start", "index": len(self.done), "content_block": dict(self._block)})
        if part.kind != "call":
            self._texts.append(part.text)
            out.append({"type": "content_block_delta", "index": len(self.done), "delta": _delta(kind, part.text)})
        return out

    def close(self) -> list[Event]:
        if not self._kind:
            return []
        text, kind, self._kind = "".join(self._texts), self._kind, ""
        ends: list[Event] = [{"type": "content_block_stop", "index": len(self.done)}]
        if kind == "arguments" and not parses(text):
            return ends  # cut off, so it is not a call
        field = {"content": "text", "reasoning": "thinking", "arguments": "input"}[kind]
        self.done.append({**self._block, field: json.loads(text) if kind == "arguments" else text})
        return ends


def _empty(kind: str, part: Part) -> dict[str, Any]:
    if kind == "content":
        return {"type": "text", "text": ""}
    if kind == "reasoning":
        return {"type": "thinking", "thinking": "", "signature": ""}
    return {"type": "tool_use", "id": "toolu_" + part.id.removeprefix("call_"), "name": part.text, "input": {}}


def _delta(kind: str, text: str) -> dict[str, Any]:
    if kind == "content":
        return {"type": "text_delta", "text": text}
    if kind == "reasoning":
        return {"type": "thinking_delta", "thinking": text}
    return {"type": "input_json_delta", "partial_json": text}


class MessagesWriter:
    """Writes one message, whole or streamed."""

    def __init__(self, id: str, created: int, model: str, plan: GenerationParams, names: TokenNames, answers: list[Choice]):
        self._id, self._model, self._answer = id, model, answers[0]
        self._blocks = Blocks()

    def beginning(self) -> bytes:
        start = {**self._message([], None, None), "usage": self._usage(0)}
        return _sse({"type": "message_start", "message": start}) + _sse({"type": "ping"})

    def events(self, answer: Choice) -> Iterator[bytes]:
        return (_sse(event) for part in answer.take().parts for event in self._blocks.push(part))

    def closing(self) -> bytes:
        out = b"".join(map(_sse, self._blocks.close()))
        reason, sequence = self._reason()
        delta = {"stop_reason": reason, "stop_sequence": sequence}
        out += _sse({"type": "message_delta", "delta": delta, "usage": self._usage(len(self._answer.ids))})
        return out + _sse({"type": "message_stop"})

    def failed(self, failure: Failure) -> bytes:
        return b"event: error\ndata: " + failure.anthropic_body() + b"\n\n"

    def whole(self) -> Iterator[bytes]:
        for part in self._answer.take().parts:
            self._blocks.push(part)
            yield b""
        self._blocks.close()
        reason, sequence = self._reason()
        yield encode({**self._message(self._blocks.done, reason, sequence), "usage": self._usage(len(self._answer.ids))})

    def _message(self, content: list, reason: str | None, sequence: str | None) -> dict[str, Any]:
        head = {"id": self._id, "type": "message", "role": "assistant", "model": self._model, "content": content}
        return {**head, "stop_reason": reason, "stop_sequence": sequence}

    def _reason(self) -> tuple[str, str | None]:
        answer = self._answer
        if isinstance(answer.stop_reason, str):
            return "stop_sequence", answer.stop_reason
        return {"length": "max_tokens", "tool_calls": "tool_use"}.get(answer.finish_reason or "", "end_turn"), None

    def _usage(self, output: int) -> dict[str, Any]:
        cached = self._answer.cached_tokens
        counts = {"input_tokens": len(self._answer.prompt.ids) - cached, "cache_read_input_tokens": cached}
        return {**counts, "cache_creation_input_tokens": 0, "output_tokens": output}


def _sse(event: Event) -> bytes:
    return b"event: " + event["type"].encode() + b"\ndata: " + encode(event) + b"\n\n"
