"""A realtime session without a server: its settings, its conversation, and a client that stops reading."""

import asyncio
import json
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.config import ServerConfig
from slipstream.errors import BadRequest
from slipstream.serve.audio import realtime
from slipstream.serve.audio.realtime import Gone, Session
from slipstream.serve.audio.realtime_session import MAX_ITEMS, Conversation, Settings
from slipstream.serve.guard import Guard


def test_settings_are_taken_and_told_back():
    s = Settings(model="voice").updated(
        {
            "type": "realtime",
            "instructions": "Be brief.",
            "output_modalities": ["text"],
            "max_output_tokens": "inf",
            "audio": {
                "input": {"turn_detection": {"type": "server_vad", "silence_duration_ms": 200, "interrupt_response": False}},
                "output": {"voice": "heart", "speed": 1.5},
            },
        }
    )
    told = s.describe()
    assert told["instructions"] == "Be brief." and told["output_modalities"] == ["text"] and told["max_output_tokens"] == "inf"
    assert told["audio"]["input"]["turn_detection"]["silence_duration_ms"] == 200 and not s.interrupts
    assert told["id"] == s.updated(told).describe()["id"] != Settings().describe()["id"], (
        "a client may send back what it was told"
    )
    assert s.speed == 1.5 and s.body() == {"temperature": 0.0}
    assert s.updated({"audio": {"input": {"turn_detection": None}}}).turns is None
    assert s.for_response({"output_modalities": ["audio"], "max_output_tokens": 5}).body() == {
        "temperature": 0.0,
        "max_tokens": 5,
    }


@pytest.mark.parametrize(
    ("session", "param"),
    [
        ("x", "session"),
        ({"model": "other"}, "session.model"),
        ({"tools": [1]}, "session.tools"),
        ({"instructions": 5}, "session.instructions"),
        ({"output_modalities": ["text", "audio"]}, "session.output_modalities"),
        ({"max_output_tokens": 0}, "session.max_output_tokens"),
        ({"audio": {"output": {"voice": "adam"}}}, "session.audio.output.voice"),
        ({"audio": {"output": {"voice": 5}}}, "session.audio.output.voice"),
        ({"audio": {"output": {"voice": {"id": 5}}}}, "session.audio.output.voice"),
        ({"audio": {"output": {"speed": 9}}}, "session.audio.output.speed"),
        ({"audio": {"input": {"format": {"type": "audio/pcm", "rate": 8000}}}}, "session.audio.input.format"),
        ({"audio": {"input": {"turn_detection": {"type": "semantic_vad"}}}}, "session.audio.input.turn_detection.type"),
        ({"audio": {"input": {"turn_detection": {"threshold": 7}}}}, "session.audio.input.turn_detection.threshold"),
        ({"audio": {"input": {"turn_detection": {"eagerness": "low"}}}}, "session.audio.input.turn_detection.eagerness"),
        ({"audio": {"input": {"noise_reduction": {"type": "near_field"}}}}, "session.audio.input.noise_reduction"),
        ({"audio": {"input": {"transcription": {"language": "fr"}}}}, "session.audio.input.transcription.language"),
        ({"temperature": 0.7}, "session.temperature"),
        ({"voice": "heart"}, "session.voice"),
    ],
)
def test_what_a_session_cannot_have_is_refused_by_name(session, param):
    with pytest.raises(BadRequest) as e:
        Settings(model="voice").updated(session)
    assert e.value.param == param


def test_a_response_s_unknown_fields_are_refused_by_name():
    with pytest.raises(BadRequest) as e:
        Settings().for_response({"metadata": {"a": "b"}, "tools": [], "prompt": None, "temperature": 1})
    assert e.value.param == "response.temperature"


def test_a_conversation_is_bounded_and_truncated_answers_are_forgotten():
    talk = Conversation()
    with pytest.raises(BadRequest):
        talk.messages("")
    for i in range(MAX_ITEMS + 10):
        talk.add("user", "input_text").text = f"m{i}"
    assert len(talk.items) == MAX_ITEMS and talk.items[-1].previous == talk.items[-2].id
    answer = talk.add("assistant", "audio")
    answer.text, answer.milliseconds = "0123456789", 1000
    talk.truncate(answer.id, 300)
    assert talk.messages("Be brief.")[0]["role"] == "system" and talk.messages("")[-1]["content"] == "012"
    talk.delete(answer.id)
    assert talk.messages("")[-1]["content"] == f"m{MAX_ITEMS + 9}"


FIELDS = (
    *("type", "model", "instructions", "output_modalities", "max_output_tokens", "audio", "input", "output", "format", "rate"),
    *("transcription", "turn_detection", "threshold", "voice", "speed", "id", "tools", "truncation", "item", "role", "content"),
    *("text", "conversation", "metadata", "name"),
)
WORDS = st.sampled_from(["realtime", "server_vad", "message", "user", ""])
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.sampled_from(["realtime", "server_vad", "message", "user", ""]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(FIELDS), inner, max_size=4),
    max_leaves=12,
)


@given(JSON)
def test_whatever_a_client_sends_is_taken_or_refused_as_its_own_mistake(value):
    for take in (Settings().updated, Settings().for_response, Conversation().create):
        message = {"type": "message", "role": "user", "content": [value]}
        for body in (value, {"audio": {"output": value, "input": value}}, message):
            try:
                take(body)
            except BadRequest:
                pass


class Client:
    """A WebSocket whose client sends these events and then goes."""

    def __init__(self, *events):
        self.events, self.seen = list(events), []

    async def receive(self):
        if not self.events:
            return {"type": "websocket.disconnect"}
        return {"type": "websocket.receive", "text": json.dumps(self.events.pop(0))}

    async def send_text(self, data):
        self.seen.append(json.loads(data))


def converse(*events, **settings):
    """What a session answers, after session.created."""
    client = Client(*events)
    session = Session(client, SimpleNamespace(model="voice", **settings), None)  # type: ignore[arg-type]
    with pytest.raises(Gone):
        asyncio.run(session.run())
    return client.seen[1:]


def test_a_fault_of_the_server_s_own_is_an_error_event_and_the_session_goes_on(monkeypatch):
    async def fault(self, event):
        raise ZeroDivisionError

    monkeypatch.setattr(Session, "_on_response_cancel", fault)
    seen = converse({"type": "response.cancel", "event_id": "mine"}, {"type": "session.update", "session": {}})
    assert [e["type"] for e in seen] == ["error", "session.updated"]
    assert seen[0]["error"]["type"] == "server_error" and seen[0]["error"]["event_id"] == "mine"


def test_a_client_that_stops_reading_ends_its_session(monkeypatch):
    monkeypatch.setattr(realtime, "SEND_SECONDS", 0.05)
    closed = []

    class Deaf:
        async def send_text(self, data):
            await asyncio.sleep(60)

    async def main():
        session = Session(Deaf(), SimpleNamespace(model="voice"), None)  # type: ignore[arg-type]
        session._answer = SimpleNamespace(call=SimpleNamespace(close=lambda: closed.append("answer")))  # type: ignore[assignment]
        task = session._task(asyncio.sleep(60))
        with pytest.raises(Gone):
            await session.send("session.created")
        await asyncio.sleep(0)
        assert closed == ["answer"] and task.cancelling()

    asyncio.run(main())


@pytest.mark.parametrize(
    ("headers", "passes"),
    [
        ({b"host": b"127.0.0.1:1", b"authorization": b"Bearer secret"}, True),
        ({b"host": b"127.0.0.1:1"}, False),
        ({b"host": b"127.0.0.1:1", b"authorization": b"Bearer wrong"}, False),
        ({b"host": b"evil.example", b"authorization": b"Bearer secret"}, False),
        ({b"host": b"127.0.0.1:1", b"authorization": b"Bearer secret", b"origin": b"http://evil.example"}, False),
    ],
)
def test_a_websocket_passes_the_same_guard_as_a_request(headers, passes):
    reached, sent = [], []

    async def app(scope, receive, send):
        reached.append(scope["path"])

    async def send(message):
        sent.append(message["type"])

    scope = {"type": "websocket", "path": "/v1/realtime", "headers": list(headers.items())}
    asyncio.run(Guard(app, ServerConfig(api_key="secret"))(scope, None, send))  # type: ignore[arg-type]
    assert (reached == ["/v1/realtime"]) is passes and (sent == ["websocket.close"]) is not passes
