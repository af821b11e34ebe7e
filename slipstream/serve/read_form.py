"""Chat completions whose answers hold reasoning or tool calls, whole and as server-sent events. Pure."""

import json
from typing import Any, NamedTuple

from slipstream.serve.answer import Answer, Piece
from slipstream.serve.calls import Part
from slipstream.serve.forms import ChatForm, encode, usage


class Said(NamedTuple):
    """A whole answer."""

    content: str
    reasoning: str
    calls: list[tuple[str, str, str]]  # (id, function, arguments); one that was cut off is left out


def gather(parts: list[Part]) -> Said:
    """Puts an answer's parts together."""
    content, reasoning = [], []
    calls: dict[int, list[str]] = {}
    for part in parts:
        if part.kind == "content":
            content.append(part.text)
        elif part.kind == "reasoning":
            reasoning.append(part.text)
        elif part.kind == "call":
            calls[part.call] = [part.id, part.text, ""]
        else:
            calls[part.call][2] += part.text
    whole = [(id, name, arguments) for id, name, arguments in calls.values() if parses(arguments)]
    return Said("".join(content), "".join(reasoning), whole)


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
    return {"tool_calls": [{"index": part.call, "function": {"arguments": part.text}}]}


class ReadForm(ChatForm):
    """POST /v1/chat/completions, for a plan with a reading."""

    def events(self, answer: Answer) -> bytes:
        out = b""
        if not answer.opened and (answer.ids or answer.ended):
            answer.opened = True
            out = self.opening(answer)
        piece = answer.take()
        for i, part in enumerate(piece.parts):
            out += self._part(answer, delta(part), piece if i == 0 else None, False)
        left = piece if not piece.parts else None
        if answer.finish_reason is not None:
            return out + self._part(answer, {}, left, True)
        if left is not None and left.ids:
            out += self._part(answer, {}, left, False)
        return out

    def _part(self, answer: Answer, delta: dict[str, Any], piece: Piece | None, last: bool) -> bytes:
        """One event; the first of a piece carries the piece's tokens."""
        choice: dict[str, Any] = {"index": answer.index, "delta": delta, "logprobs": None, "finish_reason": None}
        if piece is not None and piece.ids and self._plan.logprobs >= 0:
            choice["logprobs"] = self._logprobs(piece)
        if last:
            choice["finish_reason"], choice["stop_reason"] = answer.finish_reason, answer.stop_reason
        if self._plan.return_token_ids:
            choice["token_ids"] = piece.ids if piece is not None else []
        return self._with_usage({**self._chunk, "choices": [choice]})

    def whole(self) -> bytes:
        choices = []
        for a in self._answers:
            piece = a.take()
            choice = {
                "index": a.index,
                "message": message(gather(piece.parts)),
                "logprobs": self._logprobs(piece) if self._plan.logprobs >= 0 else None,
                "finish_reason": a.finish_reason,
                "stop_reason": a.stop_reason,
            }
            if self._plan.return_token_ids:
                choice["token_ids"] = piece.ids
            choices.append(choice)
        body = {**self._head, "choices": choices, "usage": usage(self._answers, self._plan.n)}
        return encode({**body, **self._prompt_fields()})


def message(said: Said) -> dict[str, Any]:
    out: dict[str, Any] = {"role": "assistant", "content": said.content or (None if said.calls or said.reasoning else "")}
    if said.reasoning:
        out["reasoning_content"] = out["reasoning"] = said.reasoning
    if said.calls:
        out["tool_calls"] = [
            {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}
            for id, name, arguments in said.calls
        ]
    return out
