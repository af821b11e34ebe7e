"""Writes /v1/responses: the response object, its output items, and the events of a stream. Pure."""

import secrets
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from slipstream.serve.errors import Failure
from slipstream.serve.openai.read_writer import parses
from slipstream.serve.openai.responses_body import ResponsesBody, shown_tool
from slipstream.serve.openai.writers import encode, usage
from slipstream.serve.text.calls import Part
from slipstream.serve.text.choice import Choice
from slipstream.serve.text.logprobs import TokenNames
from slipstream.serve.text.params import GenerationParams

Event = tuple[str, dict[str, Any]]


class Items:
    """Output items built from an answer's parts. Each change is an event: (name, fields)."""

    def __init__(self) -> None:
        self.done: list[dict[str, Any]] = []
        self._kind = ""  # of the open item
        self._item: dict[str, Any] = {}
        self._texts: list[str] = []  # of the open item

    def push(self, part: Part) -> list[Event]:
        begins = part.kind in ("call", "custom")
        kind = {"call": "arguments", "custom": "input"}.get(part.kind, part.kind)
        out: list[Event] = []
        if kind != self._kind or begins:
            out += self.close()
            out += self._open(kind, part)
        if not begins:
            out += self._grow(part.text)
        return out

    def _place(self, **fields: Any) -> dict[str, Any]:
        return {"item_id": self._item["id"], "output_index": len(self.done), **fields}

    def _open(self, kind: str, part: Part) -> list[Event]:
        self._kind = kind
        if kind == "content":
            self._item = {"id": _id("msg"), "type": "message", "role": "assistant", "status": "in_progress", "content": []}
        elif kind == "reasoning":
            self._item = {"id": _id("rs"), "type": "reasoning", "summary": [], "content": [], "status": "in_progress"}
        elif kind == "input":
            names = {"call_id": part.id, "name": part.text, "input": ""}
            self._item = {"id": _id("ctc"), "type": "custom_tool_call", "status": "in_progress", **names}
        else:
            names = {"call_id": part.id, "name": part.text, "arguments": ""}
            self._item = {"id": _id("fc"), "type": "function_call", "status": "in_progress", **names}
        out: list[Event] = [("response.output_item.added", {"output_index": len(self.done), "item": _copy(self._item)})]
        if kind not in ("arguments", "input"):
            empty = _text_part(kind, "")
            self._item["content"] = [empty]
            out.append(("response.content_part.added", self._place(content_index=0, part=dict(empty))))
        return out

    def _grow(self, text: str) -> list[Event]:
        self._texts.append(text)  # joined once, since an answer may have 100,000 pieces
        if self._kind == "arguments":
            return [("response.function_call_arguments.delta", self._place(delta=text))]
        if self._kind == "input":
            return [("response.custom_tool_call_input.delta", self._place(delta=text))]
        if self._kind == "content":
            return [("response.output_text.delta", self._place(content_index=0, delta=text, logprobs=[]))]
        return [("response.reasoning_text.delta", self._place(content_index=0, delta=text))]

    def close(self, status: str = "completed") -> list[Event]:
        """Ends the open item."""
        if not self._kind:
            return []
        item, kind, self._kind = self._item, self._kind, ""
        item["status"] = status
        text, self._texts = "".join(self._texts), []
        if kind == "arguments":
            item["arguments"] = arguments = text
            item["status"] = "completed" if parses(arguments) else "incomplete"
            ends: list[Event] = [
                ("response.function_call_arguments.done", self._place(arguments=arguments, name=item["name"])),
            ]
        elif kind == "input":
            item["input"], item["status"] = text, "completed"  # it is reported once it is whole
            ends = [("response.custom_tool_call_input.done", self._place(input=text))]
        else:
            part = item["content"][0]
            part["text"] = text
            name = "response.output_text.done" if kind == "content" else "response.reasoning_text.done"
            extra = {"logprobs": []} if kind == "content" else {}
            ends = [
                (name, self._place(content_index=0, text=part["text"], **extra)),
                ("response.content_part.done", self._place(content_index=0, part=dict(part))),
            ]
        ends.append(("response.output_item.done", {"output_index": len(self.done), "item": _copy(item)}))
        if kind != "arguments" or item["status"] == "completed":  # a call that was cut off is left out
            self.done.append(item)
        return ends


def _id(prefix: str) -> str:
    return f"{prefix}_{secrets.token_hex(12)}"


def _text_part(kind: str, text: str) -> dict[str, Any]:
    if kind == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _copy(item: dict[str, Any]) -> dict[str, Any]:
    return {**item, "content": [dict(p) for p in item["content"]]} if "content" in item else dict(item)


class ResponsesWriter:
    """Writes one response, whole or streamed. Calls `on_end` once with the finished object."""

    def __init__(self, value: dict[str, Any], on_end: Callable[[dict[str, Any]], None]):
        """value: the object made by `response_object`, with its id and time."""
        self.value = value
        self._items = Items()
        self._answer: Choice | None = None
        self._on_end = on_end
        self._sequence = 0

    def bind(
        self, id: str, created: int, model: str, plan: GenerationParams, names: TokenNames, answers: list[Choice]
    ) -> "ResponsesWriter":
        """The answer to shape; the signature is that of every form."""
        self._answer = answers[0]
        return self

    def beginning(self) -> bytes:
        return self._sse("response.created", response=self.value) + self._sse("response.in_progress", response=self.value)

    def events(self, answer: Choice) -> Iterator[bytes]:
        for part in answer.take().parts:
            for name, fields in self._items.push(part):
                yield self._sse(name, **fields)

    def closing(self) -> bytes:
        incomplete = self._incomplete()
        out = b"".join(self._sse(name, **fields) for name, fields in self._items.close(self._status()))
        name = "response.incomplete" if incomplete else "response.completed"
        return out + self._sse(name, response=self.end())

    def failed(self, failure: Failure) -> bytes:
        self._items.close("incomplete")
        code = "rate_limit_exceeded" if failure.status == 429 else "server_error"
        self._settle("failed", {"code": code, "message": failure.message})
        return self._sse("response.failed", response=self.value)

    def whole(self) -> Iterator[bytes]:
        assert self._answer is not None
        for part in self._answer.take().parts:
            self._items.push(part)
            yield b""
        self._items.close(self._status())
        yield encode(self.end())

    def end(self) -> dict[str, Any]:
        """The finished object."""
        return self._settle(self._status(), None)

    def cancel(self) -> dict[str, Any]:
        self._items.close("incomplete")
        return self._settle("cancelled", None)

    def _settle(self, status: str, error: dict[str, Any] | None) -> dict[str, Any]:
        value = self.value
        value["status"], value["error"], value["output"] = status, error, self._items.done
        if status == "incomplete":
            value["incomplete_details"] = {"reason": "max_output_tokens"}
        if self._answer is not None and status in ("completed", "incomplete"):
            value["usage"] = _usage(self._answer)
        self._on_end(value)
        return value

    def _incomplete(self) -> bool:
        return self._answer is not None and self._answer.finish_reason == "length"

    def _status(self) -> str:
        return "incomplete" if self._incomplete() else "completed"

    def _sse(self, kind: str, /, **fields: Any) -> bytes:
        body = encode({"type": kind, "sequence_number": self._sequence, **fields})
        self._sequence += 1
        return b"event: " + kind.encode() + b"\ndata: " + body + b"\n\n"


def _usage(answer: Choice) -> dict[str, Any]:
    counts = usage([answer], 1)
    return {
        "input_tokens": counts["prompt_tokens"],
        "input_tokens_details": {"cached_tokens": answer.cached_tokens},
        "output_tokens": counts["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": answer.reasoning_tokens},
        "total_tokens": counts["total_tokens"],
    }


def response_object(body: ResponsesBody, model: str) -> dict[str, Any]:
    """The response object before generation, with the effective parameters. Its id and time are not set yet."""
    tools = [shown_tool(tool) for tool in body.tools or ()]
    choice = msgspec.to_builtins(body.tool_choice) if body.tool_choice is not None else "auto"
    format = body.text.format if body.text else None
    shown = {k: v for k, v in msgspec.to_builtins(format).items() if v is not None} if format else {"type": "text"}
    reasoning = body.reasoning
    return {
        "id": "",
        "object": "response",
        "created_at": 0,
        "status": "in_progress",
        "background": bool(body.background),
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata or {},
        "model": model,
        "output": [],
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "reasoning": {"effort": reasoning.effort if reasoning else None, "summary": None},
        "service_tier": "default",
        "store": body.store is not False,
        "temperature": 1.0 if body.temperature is None else body.temperature,
        "text": {"format": shown},
        "tool_choice": choice,
        "tools": tools,
        "top_p": 1.0 if body.top_p is None else body.top_p,
        "truncation": "disabled",
        "usage": None,
        "user": body.user if isinstance(body.user, str) else None,
    }
