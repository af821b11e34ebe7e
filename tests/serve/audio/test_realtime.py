"""A realtime session without a server: its settings, its conversation, and a client that stops reading."""

import asyncio
import base64
import json
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.config import ServerConfig
from slipstream.errors import BadRequest
from slipstream.serve.audio import realtime
from slipstream.serve.audio.realtime import Gone, Session
from slipstream.serve.audio.realtime_session import MAX_ITEMS, Conversation, fitted
from slipstream.serve.audio.realtime_settings import Settings
from slipstream.serve.audio.vad import Turns
from slipstream.serve.audio.wire_format import FORMATS
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
        ({"tools": 1}, "session.tools"),
        ({"tools": [1]}, "session.tools[0]"),
        ({"tools": [{"type": "mcp", "name": "x"}]}, "session.tools[0]"),
        ({"tool_choice": "some"}, "session.tool_choice"),
        ({"truncation": {"type": "retention_ratio", "retention_ratio": 0.5}}, "session.truncation"),
        ({"type": "transcription", "instructions": "x"}, "session.instructions"),
        ({"audio": {"output": {"format": {"type": "audio/pcmu", "rate": 24000}}}}, "session.audio.output.format"),
        ({"instructions": 5}, "session.instructions"),
        ({"output_modalities": ["text", "audio"]}, "session.output_modalities"),
        ({"max_output_tokens": 0}, "session.max_output_tokens"),
        ({"audio": {"output": {"voice": "adam"}}}, "session.audio.output.voice"),
        ({"audio": {"output": {"voice": 5}}}, "session.audio.output.voice"),
        ({"audio": {"output": {"voice": {"id": 5}}}}, "session.audio.output.voice"),
        ({"audio": {"output": {"speed": 9}}}, "session.audio.output.speed"),
        ({"audio": {"input": {"format": {"type": "audio/pcm", "rate": 8000}}}}, "session.audio.input.format"),
        ({"audio": {"input": {"turn_detection": {"type": "vad"}}}}, "session.audio.input.turn_detection.type"),
        (
            {"audio": {"input": {"turn_detection": {"type": "semantic_vad", "eagerness": "very"}}}},
            "session.audio.input.turn_detection.eagerness",
        ),
        ({"audio": {"input": {"turn_detection": {"threshold": 7}}}}, "session.audio.input.turn_detection.threshold"),
        ({"audio": {"input": {"turn_detection": {"eagerness": "low"}}}}, "session.audio.input.turn_detection.eagerness"),
        ({"audio": {"input": {"noise_reduction": {"strength": 5}}}}, "session.audio.input.noise_reduction.strength"),
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
    session = Session(client, SimpleNamespace(), None, Settings("voice", **settings))  # type: ignore[arg-type]
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


WEATHER = {"type": "function", "name": "weather", "description": "Of a city", "parameters": {"type": "object"}}


def test_a_session_takes_what_agents_send_and_tells_it_back():
    s = Settings(model="voice", models=("voice", "gpt-realtime")).updated(
        {
            "type": "realtime",
            "model": "gpt-realtime",
            "instructions": "Be brief.",
            "truncation": "auto",
            "tools": [WEATHER],
            "tool_choice": {"type": "function", "name": "weather"},
            "parallel_tool_calls": False,
            "audio": {
                "input": {
                    "format": {"type": "audio/pcmu"},
                    "transcription": {"model": "gpt-4o-mini-transcribe"},
                    "turn_detection": {"type": "semantic_vad", "eagerness": "low", "interrupt_response": False},
                },
                "output": {"voice": "ash", "format": {"type": "audio/pcma"}},
            },
        }
    )
    told = s.describe()
    assert told["audio"]["input"]["turn_detection"]["type"] == "semantic_vad" and not s.interrupts
    assert s.turns and s.turns.silence_duration_ms > Turns().silence_duration_ms
    assert (s.hears_as.rate, s.speaks_as.type, told["audio"]["output"]["voice"]) == (8000, "audio/pcma", "ash")
    assert s.updated(told).describe() == told, "a client may send back what it was told"
    body = s.body()
    assert body["tools"] == [{"type": "function", "function": {k: v for k, v in WEATHER.items() if k != "type"}}]
    assert body["tool_choice"] == {"type": "function", "function": {"name": "weather"}} and not body["parallel_tool_calls"]
    assert "tools" not in Settings().body() and Settings().for_response({"tools": [WEATHER], "tool_choice": "none"}).tools


def test_settings_of_agents_without_effect_here_do_not_cost_a_session_its_instructions():
    """What openai-agents writes for input_audio_noise_reduction and for a version of the turn detection."""
    for kind in ("server_vad", "semantic_vad"):
        detection = {"type": kind, "model_version": "default"}
        hears = {"noise_reduction": {"type": "near_field"}, "turn_detection": detection}
        new = Settings("voice").updated({"instructions": "Be brief.", "audio": {"input": hears}})
        assert new.instructions == "Be brief." and new.turns is not None
    assert Settings("voice").updated({"audio": {"input": {"noise_reduction": None}}}) is not None
    for wrong in ({"type": "other"}, {"strength": 5}, "near_field"):
        with pytest.raises(BadRequest, match="noise_reduction"):
            Settings("voice").updated({"audio": {"input": {"noise_reduction": wrong}}})


def test_a_transcription_session_gives_no_answers():
    seen = converse({"type": "session.update", "session": {"type": "transcription"}}, {"type": "response.create"})
    assert seen[0]["session"]["type"] == "transcription" and "output" not in seen[0]["session"]["audio"]
    assert "does not make answers" in seen[1]["error"]["message"]


def test_an_item_is_retrieved_by_its_id():
    item = {"type": "message", "id": "mine", "role": "user", "content": [{"type": "input_text", "text": "Hi."}]}
    seen = converse(
        {"type": "conversation.item.create", "item": item},
        {"type": "conversation.item.retrieve", "item_id": "mine"},
        {"type": "conversation.item.retrieve", "item_id": "other"},
    )
    assert seen[2]["type"] == "conversation.item.retrieved" and seen[2]["item"]["content"][0]["text"] == "Hi."
    assert seen[3]["error"]["param"] == "item_id"


def test_an_item_is_put_where_the_client_wants_it():
    talk = Conversation()
    say = lambda text: {"type": "message", "role": "user", "content": [{"type": "input_text", "text": text}]}
    b = talk.create(say("b"))
    talk.create(say("a"), "root")
    talk.create(say("d"))
    assert talk.create(say("c"), b.id).previous == b.id
    assert [m["content"] for m in talk.messages("")] == ["a", "b", "c", "d"]
    with pytest.raises(BadRequest, match="previous_item_id"):
        talk.create(say("e"), "other")


def test_calls_and_what_they_gave_go_back_to_the_model_in_order():
    talk = Conversation()
    talk.add("user", "input_text").text = "Weather?"
    talk.create({"type": "function_call", "call_id": "a", "name": "weather", "arguments": "{}"})
    talk.create({"type": "function_call_output", "call_id": "a", "output": "Sun."})
    user, assistant, tool = talk.messages("")
    assert assistant["tool_calls"][0]["function"]["name"] == "weather" and assistant["content"] is None
    assert tool == {"role": "tool", "tool_call_id": "a", "content": "Sun."}
    with pytest.raises(BadRequest, match="no function was called"):
        talk.create({"type": "function_call_output", "call_id": "b", "output": "x"})
    talk.delete(talk.items[1].id)
    assert talk.messages("") == [user], "what a forgotten call gave is left out"


def test_the_oldest_messages_are_left_out_where_they_do_not_fit():
    say = lambda role, text, **kw: {"role": role, "content": text, **kw}
    call = say("assistant", None, tool_calls=["x"])
    talk = [say("system", "s"), say("user", "a" * 50), call, say("tool", "t"), say("user", "b"), say("assistant", "c")]
    assert fitted(talk, 1000, len) == talk
    assert fitted(talk, 90, len) == [talk[0], *talk[2:]]
    assert fitted(talk, 45, len) == [talk[0], *talk[4:]], "what a function gave goes with its call"
    assert fitted(talk, 1, len) == [talk[0], *talk[4:]], "the last that the user said stays"


class Spoken:
    """A `chat` request whose outputs are known beforehand."""

    def __init__(self, *outputs):
        self.run = self._run(outputs)

    async def _run(self, outputs):
        for port, value in outputs:
            yield SimpleNamespace(port=port, value=value)

    def feed(self, port, value):
        pass

    def close(self):
        pass


def answer(*outputs, **settings):
    """The events of one answer to "Hi."."""

    async def main():
        client, call = Client(), Spoken(*outputs)
        composite = SimpleNamespace(open=lambda *_: call)
        front = SimpleNamespace(engine=SimpleNamespace(limits=None), ready_tokenizer=lambda: None)
        session = Session(client, front, composite, Settings("voice", **settings))  # type: ignore[arg-type]
        session.talk.add("user", "input_text").text = "Hi."
        await session._respond({})
        await asyncio.gather(*session._tasks)
        return client.seen, session

    return asyncio.run(main())


def test_calls_of_functions_are_items_of_the_answer():
    finish = {"reason": "tool_calls", "usage": None, "calls": [("call_1", "weather", '{"city": "Rome"}')]}
    seen, session = answer(("text", "Let me look."), ("finish", finish), tools=(WEATHER,), speaks=False)
    done = seen[-1]["response"]
    assert [item["type"] for item in done["output"]] == ["message", "function_call"] and done["status"] == "completed"
    (arguments,) = [e for e in seen if e["type"] == "response.function_call_arguments.done"]
    assert (arguments["call_id"], arguments["output_index"]) == ("call_1", 1)
    assert json.loads(arguments["arguments"]) == {"city": "Rome"} and arguments["name"] == "weather"
    session.talk.create({"type": "function_call_output", "call_id": "call_1", "output": "Sun."})
    assert [m["role"] for m in session.talk.messages("")] == ["user", "assistant", "tool"]


@pytest.mark.parametrize("type", ["audio/pcm", "audio/pcmu", "audio/pcma"])
def test_an_answer_is_spoken_in_the_session_s_format(type):
    tone = (np.sin(np.arange(24_000) * 2 * np.pi * 440 / 24_000) * 16_000).astype(np.int16)
    format = FORMATS[type]
    end = ("finish", {"reason": "stop", "usage": None, "calls": []})
    seen, _ = answer(("text", "Hm."), ("audio", tone), ("audio", tone), end, speaks_as=format)
    data = b"".join(base64.b64decode(e["delta"]) for e in seen if e["type"] == "response.output_audio.delta")
    samples = format.decode(data)
    assert len(samples) == 2 * format.rate and abs(np.abs(samples).max() - 0.49) < 0.02
    assert abs(np.abs(np.fft.rfft(samples)).argmax() / 2 - 440) < 1
    kinds = [e["type"] for e in seen]
    assert kinds.index("response.output_audio.done") > max(i for i, k in enumerate(kinds) if k == "response.output_audio.delta")


def test_g711_is_its_standard_s():
    """A few codes of ITU-T G.711, and every level is read back."""
    law = FORMATS["audio/pcmu"]
    levels = (law.decode(bytes(range(256))) * 32768).astype(int)
    assert [levels[0xFF], levels[0x80], levels[0x00], levels[0x7F]] == [0, 32124, -32124, 0]
    for format in (law, FORMATS["audio/pcma"]):
        levels = format.decode(bytes(range(256)))
        assert np.array_equal(format.decode(format.encode((levels * 32768).astype(np.int16))), levels)
    with pytest.raises(ValueError):
        FORMATS["audio/pcm"].decode(b"abc")


def test_a_client_that_stops_reading_ends_its_session(monkeypatch):
    monkeypatch.setattr(realtime, "SEND_SECONDS", 0.05)
    closed = []

    class Deaf:
        async def send_text(self, data):
            await asyncio.sleep(60)

    async def main():
        session = Session(Deaf(), SimpleNamespace(), None, Settings("voice"))  # type: ignore[arg-type]
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
