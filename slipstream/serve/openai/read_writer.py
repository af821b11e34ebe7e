"""Chat completions whose answers hold reasoning or tool calls, whole and as server-sent events. Pure."""

import json
from collections.abc import Iterator
from typing import Any, NamedTuple

from slipstream.serve.openai.writers import ChatWriter
from slipstream.serve.text.calls import Part
from slipstream.serve.text.choice import Choice, Piece


class Said(NamedTuple):
    """A whole answer."""

    content: str
    reasoning: str
    calls: list[tuple[str, str, str]]  # (id, function, arguments); a call that was cut off is left out
    custom: frozenset[str] = frozenset()  # ids of those that are calls of custom tools: the third text is the input


def gather(parts: list[Part]) -> Said:
    """Puts an answer's parts together."""
    content, reasoning = [], []
    calls: dict[int, tuple[str, str, list[str]]] = {}
    for part in parts:
        if part.kind == "content":
            content.append(part.text)
        elif part.kind == "reasoning":
            reasoning.append(part.text)
        elif part.kind in ("call", "custom"):
            calls[part.call] = (part.id, part.text, [])
        else:
            calls[part.call][2].append(part.text)
    custom = frozenset(part.id for part in parts if part.kind == "custom")
    whole = [(id, name, "".join(arguments)) for id, name, arguments in calls.values()]
    return Said("".join(content), "".join(reasoning), [c for c in whole if c[0] in custom or parses(c[2])], custom)


def parses(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def delta(part: Part) -> dict[str, Any]:
    if part.kind == "content":
        return {"content": part.text}
    if part.kind == "reasoning":
        return {"reasoning_content": part.text, "reasoning": part.text}
    if part.kind == "call":
        function = {"name": part.text, "arguments": ""}
        return {"tool_calls": [{"index": part.call, "id": part.id, "type": "function", "function": function}]}
    if part.kind == "custom":
        custom = {"name": part.text, "input": ""}
        return {"tool_calls": [{"index": part.call, "id": part.id, "type": "custom", "custom": custom}]}
    if part.kind == "input":
        return {"tool_calls": [{"index": part.call, "custom": {"input": part.text}}]}
    return {"tool_calls": [{"index": part.call, "function": {"arguments": part.text}}]}


class ReadWriter(ChatWriter):
    """POST /v1/chat/completions, for a plan with a reading."""

    def events(self, answer: Choice) -> Iterator[bytes]:
        yield from self._opened(answer)
        piece = answer.take()
        for i, part in enumerate(piece.parts):  # the tokens go with the first event
            yield from self._event(answer, {"delta": delta(part)}, piece if i == 0 else None, False)
        left = piece if not piece.parts else None
        if answer.finish_reason is not None:
            yield from self._event(answer, {"delta": {}}, left, True)
        elif left is not None and left.ids:
            yield from self._event(answer, {"delta": {}}, left, False)

    def _message(self, piece: Piece) -> dict[str, Any]:
        return message(gather(piece.parts))


def message(said: Said) -> dict[str, Any]:
    out: dict[str, Any] = {"role": "assistant", "content": said.content or (None if said.calls or said.reasoning else "")}
    if said.reasoning:
        out["reasoning_content"] = out["reasoning"] = said.reasoning
    if said.calls:
        out["tool_calls"] = [
            {"id": id, "type": "custom", "custom": {"name": name, "input": text}}
            if id in said.custom
            else {"id": id, "type": "function", "function": {"name": name, "arguments": text}}
            for id, name, text in said.calls
        ]
    return out
