"""A realtime session's conversation: plain state. Its only I/O is to wait for transcripts."""

import asyncio
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from slipstream.errors import BadRequest
from slipstream.serve.audio.realtime_settings import as_dict, as_text

MAX_ITEMS = 128


@dataclass(eq=False)
class Item:
    """One message, function call, or function result. `words` is the task that transcribes a spoken message."""

    id: str
    role: str  # for a message; "" for the other two
    kind: str  # for a message input_text, input_audio, text or audio; else function_call or function_call_output
    previous: str | None
    text: str = ""  # a call's arguments, or a function's result
    name: str = ""  # the called function's
    call_id: str = ""
    words: asyncio.Task | None = None
    milliseconds: int = 0  # of its audio, for an answer

    def describe(self, status: str = "completed") -> dict[str, Any]:
        status = status if status in ("completed", "in_progress") else "incomplete"
        head = {"id": self.id, "object": "realtime.item", "status": status}
        if self.kind == "function_call":
            return {**head, "type": self.kind, "call_id": self.call_id, "name": self.name, "arguments": self.text}
        if self.kind == "function_call_output":
            return {**head, "type": self.kind, "call_id": self.call_id, "output": self.text}
        name = "transcript" if "audio" in self.kind else "text"
        kind = f"output_{self.kind}" if self.role == "assistant" else self.kind
        return {**head, "type": "message", "role": self.role, "content": [{"type": kind, name: self.text}]}


class Conversation:
    """Items in order, at most `MAX_ITEMS`: beyond that the oldest are dropped."""

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

    def append(self, item: Item, after: Any = None) -> Item:
        """Inserts at the end, or after the item with the id `after` ("root": at the beginning). Raises BadRequest."""
        at = len(self.items)
        if after is not None:
            at = 0 if after == "root" else self.items.index(self.find(after, "previous_item_id")) + 1
        item.previous = self.items[at - 1].id if at else None
        self.items.insert(at, item)
        del self.items[:-MAX_ITEMS]
        return item

    def add(self, role: str, kind: str) -> Item:
        return self.append(self.reserve(role, kind))

    def create(self, given: Any, after: Any = None) -> Item:
        """Adds a client's item. Raises BadRequest."""
        given = as_dict(given, "item")
        kind = given.get("type", "message")
        if kind in ("function_call", "function_call_output"):
            item = self._create_call(given, kind)
        elif kind == "message":
            item = self._create_message(given)
        else:
            raise BadRequest("item.type: must be message, function_call or function_call_output", "item.type")
        if isinstance(given.get("id"), str) and 0 < len(given["id"]) <= 64:
            item.id = given["id"]
        return self.append(item, after)

    def _create_call(self, given: dict[str, Any], kind: str) -> Item:
        item = self.reserve("", kind)
        item.call_id = as_text(given.get("call_id"), "item.call_id")
        if kind == "function_call":
            item.name = as_text(given.get("name"), "item.name")
            item.text = as_text(given.get("arguments"), "item.arguments")
            return item
        item.text = as_text(given.get("output"), "item.output")
        if not any(i.kind == "function_call" and i.call_id == item.call_id for i in self.items):
            raise BadRequest(f"item.call_id: no function was called with {item.call_id[:64]!r}", "item.call_id")
        return item

    def _create_message(self, given: dict[str, Any]) -> Item:
        role, parts = given.get("role"), given.get("content")
        if role not in ("user", "assistant", "system"):
            raise BadRequest("item.role: must be user, assistant or system", "item.role")
        if not isinstance(parts, list) or not parts:
            raise BadRequest("item.content: expected a list of parts", "item.content")
        texts = []
        for part in parts:
            part = as_dict(part, "item.content")
            if part.get("type") not in ("input_text", "text", "output_text"):
                raise BadRequest("item.content: must be text; send speech with input_audio_buffer.append", "item.content")
            texts.append(as_text(part.get("text"), "item.content.text"))
        item = self.reserve(role, "text" if role == "assistant" else "input_text")
        item.text = "\n".join(texts)
        return item

    def find(self, id: Any, param: str = "item_id") -> Item:
        item = next((i for i in self.items if i.id == id), None)
        if item is None:
            raise BadRequest(f"{param}: the conversation has no item {str(id)[:64]!r}", param)
        return item

    def delete(self, id: Any) -> None:
        self.items.remove(self.find(id))

    def truncate(self, id: Any, audio_end_ms: Any) -> None:
        """Shortens an answer's words to the share that was played."""
        item = self.find(id)
        if item.role != "assistant" or not isinstance(audio_end_ms, int) or audio_end_ms < 0:
            raise BadRequest("audio_end_ms: must be a whole number of milliseconds, for an item with audio", "audio_end_ms")
        if item.milliseconds and audio_end_ms < item.milliseconds:
            item.text = item.text[: len(item.text) * audio_end_ms // item.milliseconds]
            item.milliseconds = audio_end_ms

    async def settled(self) -> None:
        """Waits until every spoken turn is transcribed."""
        for item in list(self.items):
            if item.words is not None:
                await asyncio.shield(item.words)

    def messages(self, instructions: str) -> list[dict[str, Any]]:
        """The conversation as the language model reads it. Raises BadRequest if it is empty."""
        said: list[dict[str, Any]] = []
        called: set[str] = set()
        for item in self.items:
            if item.kind == "function_call":
                function = {"name": item.name, "arguments": item.text}
                if not said or said[-1]["role"] != "assistant":
                    said.append({"role": "assistant", "content": None})
                said[-1].setdefault("tool_calls", []).append({"id": item.call_id, "type": "function", "function": function})
                called.add(item.call_id)
            elif item.kind == "function_call_output":
                if item.call_id in called:  # the call may have been dropped
                    said.append({"role": "tool", "tool_call_id": item.call_id, "content": item.text})
            elif item.text.strip():
                said.append({"role": item.role, "content": item.text})
        if not any(m["role"] == "user" for m in said):
            raise BadRequest("no speech was heard and no text was given", "input")
        return [*([{"role": "system", "content": instructions}] if instructions else []), *said]


def fitted(messages: list[dict[str, Any]], room: int, tokens_of: Callable[[str], int]) -> list[dict[str, Any]]:
    """Drops the oldest messages, so that the rest fits in `room` tokens.

    System messages stay, and so do the last user's message and those after it. A message's frame counts 8 tokens."""
    counts = [8 + tokens_of(str(m["content"] or "") + str(m.get("tool_calls", ""))) for m in messages]
    last = max(i for i, m in enumerate(messages) if m["role"] == "user")
    over, keep = sum(counts) - room, [True] * len(messages)
    for i in range(last):
        loose = i and not keep[i - 1] and messages[i]["role"] == "tool"  # a function's result is dropped with its call
        if messages[i]["role"] != "system" and (over > 0 or loose):
            keep[i], over = False, over - counts[i]
    return [m for m, kept in zip(messages, keep, strict=True) if kept]
