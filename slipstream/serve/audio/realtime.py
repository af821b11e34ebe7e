"""/v1/realtime: a spoken conversation over one WebSocket, with OpenAI's event names.

The client's speech is a streaming input of a running `transcribe` request from its first sample on. Each answer is a `chat`
request of its own, so late output of one cannot enter the next. Speech that begins during an answer ends that answer.
"""

import asyncio
import base64
import binascii
import json
import secrets
from typing import Any

import numpy as np
from starlette.websockets import WebSocket, WebSocketDisconnect

from slipstream.errors import BadRequest
from slipstream.serve.audio.audio import in_thread
from slipstream.serve.audio.client_secret import settings_of
from slipstream.serve.audio.realtime_answer import Answering, Gone, logged
from slipstream.serve.audio.realtime_hearing import Hearing
from slipstream.serve.audio.realtime_session import Conversation, Item, fitted
from slipstream.serve.audio.realtime_settings import Settings
from slipstream.serve.audio.secret_token import token_of
from slipstream.serve.audio.vad import Detector
from slipstream.serve.audio.wire_format import WireFormat
from slipstream.serve.engine.composite import Composite
from slipstream.serve.front import Front

SEND_SECONDS = 20.0  # that one event waits for the client to read
MAX_SESSIONS = 32
MAX_TURN_SECONDS = 60
MIN_TURN_SECONDS = 0.1


async def realtime(ws: WebSocket) -> None:
    """The WebSocket route."""
    front: Front = ws.app.state.front
    assert front.composite
    sessions: set[Session] = ws.app.state.__dict__.setdefault("realtime_sessions", set())
    offered = ws.scope.get("subprotocols", ())
    await ws.accept("realtime" if "realtime" in offered else None)  # a browser requires one of the subprotocols that it offered
    begins_with = settings_of(ws.app.state, token_of(dict(ws.scope["headers"])))
    settings = begins_with or Settings(front.model, tuple(front.models))
    if ws.query_params.get("intent") == "transcription":
        settings = settings.updated({"type": "transcription"})
    session = Session(ws, front, front.composite, settings)
    if len(sessions) >= MAX_SESSIONS or front.engine.draining:
        await session.error("the server has as many sessions as it takes; try again later", code="unavailable")
        return await ws.close(1013)
    sessions.add(session)
    try:
        front.check_model(ws.query_params.get("model"))
        await session.run()
    except BadRequest as e:
        await session.error(str(e), e.param)
        await ws.close(1008)
    except (Gone, WebSocketDisconnect, RuntimeError):
        pass
    finally:
        session.close()
        sessions.discard(session)


class Session:
    """One client. Its events are handled in order; the running answer is a task of its own."""

    def __init__(self, ws: WebSocket, front: Front, composite: Composite, settings: Settings):
        self.ws, self.front, self.composite = ws, front, composite
        self.settings = settings
        self.talk = Conversation()
        self._detector: Detector | None = None
        self._padding: list[np.ndarray] = []  # samples before the beginning of speech
        self._hearing: Hearing | None = None
        self._answer: Answering | None = None
        self._tasks: set[asyncio.Task] = set()
        self._lock = asyncio.Lock()
        self._reset_turns()

    async def run(self) -> None:
        await self.send("session.created", session=self.settings.describe())
        while True:
            message = await self.ws.receive()
            if message["type"] == "websocket.disconnect":
                raise Gone
            event: dict[str, Any] = {}
            try:
                event = _event(message.get("text"))
                await self._on(event)
            except Gone:
                raise
            except Exception as e:
                failure = logged(e)
                await self.error(failure.message, failure.param, event.get("event_id"), failure.code)

    async def send(self, type: str, **fields: Any) -> None:
        """Sends one event. Raises Gone if the client leaves it unread for too long."""
        data = json.dumps({"type": type, "event_id": "event_" + secrets.token_hex(8), **fields})
        try:
            async with self._lock, asyncio.timeout(SEND_SECONDS):
                await self.ws.send_text(data)
        except (TimeoutError, RuntimeError, WebSocketDisconnect):
            self.close()
            raise Gone from None

    async def error(self, message: str, param: str | None = None, cause: str | None = None, code: Any = None) -> None:
        kind = "server_error" if code in ("component_failed", "internal_error", "unavailable") else "invalid_request_error"
        await self.send(
            "error", error={"type": kind, "code": str(code or kind), "message": message, "param": param, "event_id": cause}
        )

    def close(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        if self._hearing:
            self._hearing.call.close()
        if self._answer:
            self._answer.call.close()

    # --- events from the client

    async def _on(self, event: dict[str, Any]) -> None:
        handler = getattr(self, "_on_" + event["type"].replace(".", "_"), None)
        if handler is None:
            raise BadRequest(f"type: {event['type'][:100]!r} is not an event that this server supports", "type")
        await handler(event)

    async def _on_session_update(self, event: dict[str, Any]) -> None:
        new = self.settings.updated(event.get("session"))
        if self._hearing is not None and new.hears_as != self.settings.hears_as:
            where = "session.audio.input.format"
            raise BadRequest(f"{where}: the buffer holds audio of another format; commit or clear it first", where)
        self.settings = new
        self._reset_turns()
        await self.send("session.updated", session=self.settings.describe())

    def _reset_turns(self) -> None:
        turns = self.settings.turns
        self._detector = Detector(self.settings.hears_as.rate, turns) if turns else None
        self._padding = []

    async def _on_input_audio_buffer_append(self, event: dict[str, Any]) -> None:
        samples = _samples(event.get("audio"), self.settings.hears_as)
        if self._detector is None:
            await self._hear(samples)
            return
        before = self._detector.speaking
        for what, _ in self._detector.feed(samples):
            if what == "started":
                await self._began()
            else:
                await self._hear(samples)
                samples = samples[:0]
                await self._commit(auto=True)
        if self._detector.speaking or before:
            await self._hear(samples)
        elif self.settings.turns:
            keep = self.settings.hears_as.rate * self.settings.turns.prefix_padding_ms // 1000
            self._padding = [np.concatenate([*self._padding, samples])[-keep:]] if keep else []

    async def _began(self) -> None:
        """Speech begins: a running answer ends at once."""
        await self.send("input_audio_buffer.speech_started", audio_start_ms=0, item_id=self.talk.next_id)
        if self._answer and self.settings.interrupts:
            await self._answer.cancel("turn_detected")
        padding, self._padding = self._padding, []
        for piece in padding:
            await self._hear(piece)

    async def _hear(self, samples: np.ndarray) -> None:
        if not len(samples):
            return
        rate = self.settings.hears_as.rate
        if self._hearing is None:
            prompt = self.settings.transcription.get("prompt") or ""
            call = self.composite.open("transcribe", ("heard",), ("audio",), {"timestamps": True, "prompt": prompt})
            self._hearing = Hearing(call, rate)
        if self._hearing.seconds + len(samples) / rate > MAX_TURN_SECONDS:
            self._drop_hearing()
            raise BadRequest(f"audio: a turn may have at most {MAX_TURN_SECONDS} s; the buffer was cleared", "audio")
        await self._hearing.feed(samples)

    def _drop_hearing(self) -> None:
        if self._hearing:
            self._hearing.call.close()
        self._hearing = None

    async def _on_input_audio_buffer_clear(self, event: dict[str, Any]) -> None:
        self._drop_hearing()
        self._reset_turns()
        await self.send("input_audio_buffer.cleared")

    async def _on_input_audio_buffer_commit(self, event: dict[str, Any]) -> None:
        if self._hearing is None or self._hearing.seconds < MIN_TURN_SECONDS:
            raise BadRequest(
                f"the buffer holds less than {MIN_TURN_SECONDS * 1000:.0f} ms of audio; append more first", "audio"
            )
        await self._commit(auto=False)

    async def _commit(self, auto: bool) -> None:
        """The turn has ended: its words become an item, and with `auto` an answer begins."""
        hearing, self._hearing = self._hearing, None
        if hearing is None:
            return
        item = self.talk.add("user", "input_audio")
        if auto:
            await self.send("input_audio_buffer.speech_stopped", audio_end_ms=int(hearing.seconds * 1000), item_id=item.id)
        await self.send("input_audio_buffer.committed", item_id=item.id, previous_item_id=item.previous)
        await self.send("conversation.item.added", item=item.describe(), previous_item_id=item.previous)
        item.words = self._task(self._words(hearing, item))
        if auto and self.settings.answers and not self.settings.transcribes:
            await self._respond({})

    async def _words(self, hearing: Hearing, item: Item) -> str:
        kind, text = "conversation.item.input_audio_transcription", ""
        try:
            async for piece in hearing.words():
                text += piece
                await self.send(f"{kind}.delta", item_id=item.id, content_index=0, delta=piece)
        except Gone:
            raise
        except Exception as e:
            await self.send(
                f"{kind}.failed",
                item_id=item.id, content_index=0, error={"type": "server_error", "message": logged(e).message},
            )  # fmt: skip
            text = ""
        item.text = text
        await self.send(
            f"{kind}.completed",
            item_id=item.id, content_index=0, transcript=text, usage={"type": "duration", "seconds": round(hearing.seconds, 2)},
        )  # fmt: skip
        await self.send("conversation.item.done", item=item.describe(), previous_item_id=item.previous)
        return text

    async def _on_conversation_item_create(self, event: dict[str, Any]) -> None:
        item = self.talk.create(event.get("item"), event.get("previous_item_id"))
        await self.send("conversation.item.added", item=item.describe(), previous_item_id=item.previous)
        await self.send("conversation.item.done", item=item.describe(), previous_item_id=item.previous)

    async def _on_conversation_item_retrieve(self, event: dict[str, Any]) -> None:
        await self.send("conversation.item.retrieved", item=self.talk.find(event.get("item_id")).describe())

    async def _on_conversation_item_delete(self, event: dict[str, Any]) -> None:
        self.talk.delete(event.get("item_id"))
        await self.send("conversation.item.deleted", item_id=event.get("item_id"))

    async def _on_conversation_item_truncate(self, event: dict[str, Any]) -> None:
        self.talk.truncate(event.get("item_id"), event.get("audio_end_ms"))
        keep = {k: event.get(k) for k in ("item_id", "content_index", "audio_end_ms")}
        await self.send("conversation.item.truncated", **keep)

    async def _on_response_create(self, event: dict[str, Any]) -> None:
        await self._respond(event.get("response") or {})

    async def _on_response_cancel(self, event: dict[str, Any]) -> None:
        if self._answer is None:
            raise BadRequest("no answer is running", "type")
        await self._answer.cancel("client_cancelled")

    # --- answers

    async def _respond(self, given: dict[str, Any]) -> None:
        if self.settings.transcribes:
            raise BadRequest("type: a transcription session does not make answers; use a realtime session", "type")
        if self._answer is not None:
            raise BadRequest("an answer is running; cancel it or wait for response.done", "type")
        settings = self.settings.for_response(given)
        self._answer = Answering(self, settings)
        self._task(self._answer.run())

    async def messages(self, settings: Settings) -> list[dict[str, Any]]:
        """The conversation as the language model reads it; without its oldest messages if it is too long."""
        messages = self.talk.messages(settings.instructions)
        limits, tokenizer = self.front.engine.limits, self.front.ready_tokenizer()
        if not settings.truncates or limits is None:
            return messages
        answer = min(settings.max_tokens or limits.max_len, limits.max_len // 2)
        room = limits.max_len - answer - len(str(settings.tools)) // 2  # two characters a token, at least
        return await in_thread(fitted, messages, room, lambda text: len(tokenizer.encode(text, False)))

    def answered(self, answer: "Answering") -> None:
        if self._answer is answer:
            self._answer = None

    def _task(self, work) -> asyncio.Task:
        task = asyncio.get_running_loop().create_task(_quiet(work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


async def _quiet(work) -> Any:
    try:
        return await work
    except Gone:
        return None


def _event(text: str | None) -> dict[str, Any]:
    """text: None for a binary message."""
    try:
        event = json.loads(text or "")
    except (ValueError, RecursionError):
        raise BadRequest("an event must be a JSON object") from None
    if not isinstance(event, dict) or not isinstance(event.get("type"), str):
        raise BadRequest("type: is required in every event", "type")
    return event


def _samples(data: Any, format: WireFormat) -> np.ndarray:
    """Decodes base64 of samples in a format to float32."""
    try:
        return format.decode(base64.b64decode(data, validate=True))
    except (TypeError, ValueError, binascii.Error):
        raise BadRequest(f"audio: expected base64 of {format.type} at {format.rate} Hz, in whole samples", "audio") from None
