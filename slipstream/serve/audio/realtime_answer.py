"""One answer of a realtime session: a `chat` request of its own, sent to the client as it runs."""

import base64
import logging
import secrets
from typing import TYPE_CHECKING, Any

import numpy as np

from slipstream.components.speech import RATE
from slipstream.serve.audio.audio import failure_of
from slipstream.serve.audio.audio_file import Resampler
from slipstream.serve.audio.realtime_session import Item
from slipstream.serve.audio.realtime_settings import Settings
from slipstream.serve.errors import Failure

if TYPE_CHECKING:
    from slipstream.serve.audio.realtime import Session

log = logging.getLogger("slipstream.http")


class Gone(Exception):
    """The client does not read, or has left."""


def logged(error: Exception) -> Failure:
    """The error as the client sees it. An unexpected one is logged with its traceback."""
    failure = failure_of(error)
    if failure.code == "internal_error":
        log.error("realtime: fault in the front end", exc_info=error)
    return failure


class Answering:
    """One answer: waits for the transcript, runs a `chat` request, and sends the client its events."""

    def __init__(self, session: "Session", settings: Settings):
        self.session, self.settings = session, settings
        self.id = "resp_" + secrets.token_hex(8)
        self.item = session.talk.reserve("assistant", "audio" if settings.speaks else "text")
        self.call: Any = _NoCall()
        self.cancelled: str | None = None
        self.finish: dict[str, Any] = {"reason": "stop", "usage": None, "calls": []}
        self.items: list[Item] = []  # items of the conversation that this answer has made
        self.samples = 0
        format = settings.speaks_as
        self._resampler = Resampler(RATE, format.rate) if format.rate != RATE else None
        self._begun = self._message_ended = False
        self._ended = False

    async def cancel(self, why: str) -> None:
        """Sends response.done; nothing of this answer is sent after it."""
        self.cancelled = why
        self.call.close()
        await self._end("cancelled", {"type": "cancelled", "reason": why})

    async def run(self) -> None:
        session = self.session
        try:
            await session.send("response.created", response=self._describe("in_progress"))
            await session.talk.settled()
            if self.cancelled:
                return
            messages = await session.messages(self.settings)
            wanted = ("text", "finish", *(("audio",) if self.settings.speaks else ()))
            params = {"body": self.settings.body(), "messages": messages, "speed": self.settings.speed}
            self.call = session.composite.open("chat", wanted, ("messages",), params)
            self.call.feed("messages", messages)
            await self._speak()
            if not self.cancelled:
                length = self.finish["reason"] == "length"
                if not length:
                    await self._call()
                details = {"type": "incomplete", "reason": "max_output_tokens"} if length else None
                await self._end("incomplete" if length else "completed", details)
        except Gone:
            raise
        except Exception as e:
            failure = logged(e)
            error = {"type": "server_error", "code": str(failure.code or failure.status), "message": failure.message}
            if not self.cancelled:
                await self._end("failed", {"type": "failed", "error": error})
        finally:
            self.call.close()
            session.answered(self)

    async def _speak(self) -> None:
        kind = "response.output_audio_transcript.delta" if self.settings.speaks else "response.output_text.delta"
        async for output in self.call.run:
            if output.value is None:
                continue
            if output.port == "finish":
                self.finish = output.value
                continue
            await self._begin()
            if self.cancelled:
                return
            if output.port == "text":
                self.item.text += output.value
                await self.session.send(kind, **self._at(), delta=output.value)
            else:
                self.samples += len(output.value)
                await self._sound(output.value)
        if self._resampler and self.samples and not self.cancelled:
            await self._sound(np.zeros(0, np.int16), last=True)

    async def _sound(self, samples: np.ndarray, last: bool = False) -> None:
        """Sends int16 samples at RATE to the client in the client's format."""
        if self._resampler:
            samples = self._resampler.feed(samples.astype(np.float32) / 32768, last)
        if len(samples):
            data = base64.b64encode(self.settings.speaks_as.encode(samples)).decode()
            await self.session.send("response.output_audio.delta", **self._at(), delta=data)

    async def _call(self) -> None:
        """The answer's function calls, each an item of its own after the message."""
        await self._end_message("completed")
        send = self.session.send
        for call_id, name, arguments in self.finish["calls"]:
            item = self.session.talk.add("", "function_call")
            item.call_id, item.name = call_id, name
            place = {"response_id": self.id, "output_index": len(self.items)}
            self.items.append(item)
            at = {**place, "item_id": item.id, "call_id": call_id}
            await send("response.output_item.added", **place, item=item.describe("in_progress"))
            await send("conversation.item.added", item=item.describe("in_progress"), previous_item_id=item.previous)
            await send("response.function_call_arguments.delta", **at, delta=arguments)
            item.text = arguments
            await send("response.function_call_arguments.done", **at, name=name, arguments=arguments)
            await send("response.output_item.done", **place, item=item.describe())
            await send("conversation.item.done", item=item.describe(), previous_item_id=item.previous)

    def _at(self) -> dict[str, Any]:
        return {"response_id": self.id, "item_id": self.item.id, "output_index": 0, "content_index": 0}

    def _part(self) -> dict[str, Any]:
        name = "transcript" if self.settings.speaks else "text"
        return {"type": "audio" if self.settings.speaks else "text", name: self.item.text}

    async def _begin(self) -> None:
        if self._begun:
            return
        self._begun = True
        send, place = self.session.send, {"response_id": self.id, "output_index": 0}
        self.items.append(self.session.talk.append(self.item))
        await send("response.output_item.added", **place, item=self.item.describe("in_progress"))
        await send("conversation.item.added", item=self.item.describe("in_progress"), previous_item_id=self.item.previous)
        await send("response.content_part.added", **self._at(), part={**self._part(), "transcript": ""})

    async def _end(self, status: str, details: dict[str, Any] | None) -> None:
        if self._ended:
            return
        self._ended = True
        self.session.answered(self)
        await self._end_message(status)
        await self.session.send("response.done", response=self._describe(status, details))

    async def _end_message(self, status: str) -> None:
        if not self._begun or self._message_ended:
            return
        self._message_ended = True
        send = self.session.send
        self.item.milliseconds = self.samples * 1000 // RATE
        if self.settings.speaks:
            await send("response.output_audio.done", **self._at())
            await send("response.output_audio_transcript.done", **self._at(), transcript=self.item.text)
        else:
            await send("response.output_text.done", **self._at(), text=self.item.text)
        await send("response.content_part.done", **self._at(), part=self._part())
        done = self.item.describe("completed" if status == "completed" else "incomplete")
        await send("response.output_item.done", response_id=self.id, output_index=0, item=done)
        await send("conversation.item.done", item=done, previous_item_id=self.item.previous)

    def _describe(self, status: str, details: dict[str, Any] | None = None) -> dict[str, Any]:
        usage = self.finish["usage"] or {}
        counts = {"input_tokens": usage.get("prompt_tokens", 0), "output_tokens": usage.get("completion_tokens", 0)}
        return {
            "id": self.id,
            "object": "realtime.response",
            "status": status,
            "status_details": details,
            "output": [item.describe(status if item is self.item else "completed") for item in self.items],
            "output_modalities": ["audio" if self.settings.speaks else "text"],
            "usage": {**counts, "total_tokens": sum(counts.values())} if self.finish["usage"] else None,
        }


class _NoCall:
    def close(self) -> None:
        pass
