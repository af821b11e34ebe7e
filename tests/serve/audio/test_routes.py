"""The audio routes, with a script in place of the model behind them."""

import base64
import json
import time
from types import SimpleNamespace

import numpy as np
import pytest
from starlette.testclient import TestClient
from starlette.websockets import WebSocketDisconnect

from slipstream.config import ServerConfig
from slipstream.graph.conductor import Output, RequestFailed
from slipstream.serve.app import build
from slipstream.serve.audio.audio_file import decode, encode
from slipstream.serve.audio.secret_token import signed
from slipstream.serve.budget import Budget
from slipstream.serve.observe.shared_counters import SharedCounters

RATE = 24_000
TONE = (np.sin(np.arange(RATE) * 0.1) * 12_000).astype(np.int16)


class Call:
    """One request whose outputs are known beforehand."""

    gone = False

    def __init__(self, outputs):
        self.run = self._run(outputs)
        self.closed = False

    async def _run(self, outputs):
        for output in outputs:
            if isinstance(output, Exception):
                raise output
            yield output

    async def __aenter__(self):
        return self

    async def __aexit__(self, *_):
        self.close()

    def watch(self, receive, cut=None):
        pass

    def feed(self, port, value):
        pass

    async def write(self, send, data, more):
        await send({"type": "http.response.body", "body": data, "more_body": more})

    def close(self):
        self.closed = True


class Composite:
    def __init__(self):
        self.outputs, self.calls, self.params = [], [], None

    def open(self, walk, wanted, given, params):
        self.params = params
        self.calls.append(Call(self.outputs))
        return self.calls[-1]


@pytest.fixture
def composite():
    made = Composite()
    yield made
    assert all(call.closed for call in made.calls)


def front_of(composite, key: str | None = None, **more):
    return SimpleNamespace(
        server_config=ServerConfig(api_key=key),
        bodies=Budget(1 << 30),
        composite=composite,
        encoder=None,
        shared_counters=SharedCounters(),
        metrics=SimpleNamespace(),
        model="voice",
        models=["voice"],
        check_model=lambda name: None,
        **more,
    )


@pytest.fixture
def http(composite):
    tokenizer = SimpleNamespace(encode=lambda text, special=True: text.split())
    front = front_of(composite, ready_tokenizer=lambda: tokenizer)
    return TestClient(build(front), base_url="http://127.0.0.1", raise_server_exceptions=False)  # type: ignore[arg-type]


@pytest.mark.parametrize("path", ["/v1/audio/speech", "/v1/audio/transcriptions", "/v1/chat/completions"])
def test_another_method_on_a_route_that_is_there_is_not_allowed(http, path):
    answer = http.get(path)
    assert answer.status_code == 405 and answer.headers["allow"] == "POST"


def test_the_voices_are_listed_with_openai_s_names_for_them(http):
    assert {"heart", "alloy", "nova", "verse"} <= set(http.get("/v1/audio/voices").json()["voices"])


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input": "日本語"}, "input"),
        ({"input": "..."}, "input"),
        ({"input": "x", "voice": "adam"}, "voice"),
        ({"input": "x", "voice": {"id": "adam"}}, "voice"),
        ({"input": "x", "voice": "alloy", "speed": 3.0}, "speed"),
    ],
)
def test_speech_that_cannot_be_made_is_refused_before_it_begins(http, body, param):
    answer = http.post("/v1/audio/speech", json=body)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == param


@pytest.mark.parametrize("how", [{}, {"stream_format": "audio"}, {"stream_format": "sse"}])
def test_a_text_without_sound_or_with_a_failure_is_an_error_and_no_empty_file(http, composite, how):
    composite.outputs = [Output("audio", None, False)]
    answer = http.post("/v1/audio/speech", json={"input": "x", **how})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "input"
    composite.outputs = [RequestFailed("speech", "cannot read it", 400)]
    answer = http.post("/v1/audio/speech", json={"input": "x", **how})
    assert answer.status_code == 400 and "speech: cannot read it" in answer.json()["error"]["message"]


@pytest.mark.parametrize("format", ["mp3", "opus", "aac", "flac", "wav", "pcm"])
def test_speech_is_streamed_in_every_format(http, composite, format):
    composite.outputs = [Output("audio", TONE, False), Output("audio", None, False), Output("audio", TONE, False)]
    body = {"input": "two words", "response_format": format}
    streamed = http.post("/v1/audio/speech", json={**body, "stream_format": "audio"})
    assert streamed.headers["x-accel-buffering"] == "no"
    lines = http.post("/v1/audio/speech", json={**body, "stream_format": "sse"}).text.splitlines()
    events = [json.loads(line[6:]) for line in lines if line]
    usage = {"input_tokens": 2, "output_tokens": 40, "total_tokens": 42}
    assert events.pop() == {"type": "speech.audio.done", "usage": usage}
    for data in (streamed.content, b"".join(base64.b64decode(e["audio"]) for e in events)):
        samples = np.frombuffer(data, "<i2") if format == "pcm" else decode(data, RATE)
        assert abs(len(samples) - 2 * RATE) < 0.1 * RATE


def test_a_client_secret_opens_a_session_with_its_settings_and_nothing_else(composite):
    front = front_of(composite, "secret", engine=SimpleNamespace(draining=False))
    http = TestClient(build(front), base_url="http://127.0.0.1")  # type: ignore[arg-type]
    path, key = "/v1/realtime/client_secrets", {"authorization": "Bearer secret"}
    socket = "ws://127.0.0.1/v1/realtime"
    assert http.post(path, json={}).status_code == 401
    assert http.post(path, headers=key, json={"session": {"voice": 5}}).json()["error"]["param"] == "session.voice"
    made = http.post(path, headers=key, json={"session": {"type": "realtime", "instructions": "Be brief."}}).json()
    bearer = {"authorization": f"Bearer {made['value']}"}
    assert made["session"]["instructions"] == "Be brief." and 500 < made["expires_at"] - time.time() <= 600
    assert http.post(path, headers=bearer, json={}).status_code == 401
    with http.websocket_connect(socket, headers=bearer) as ws:
        assert ws.receive_json()["session"]["instructions"] == "Be brief."
    offered = ["realtime", f"openai-insecure-api-key.{made['value']}"]
    with http.websocket_connect(socket, subprotocols=offered) as ws:
        assert ws.accepted_subprotocol == "realtime" and ws.receive_json()["session"]["instructions"] == "Be brief."
    for wrong in (made["value"][:-1] + "x", signed("0" * 16, int(time.time()) - 1, b"secret"), "ek_", "other"):
        bearer = {"authorization": f"Bearer {wrong}"}
        with pytest.raises(WebSocketDisconnect), http.websocket_connect(socket, headers=bearer):
            pass


def transcribe(http, **fields):
    return http.post("/v1/audio/transcriptions", data=fields, files={"file": ("a.wav", encode(TONE, RATE, "wav"))})


def test_every_json_form_of_a_transcription_carries_its_usage(http, composite):
    segment = {"start": 0.0, "end": 1.0, "text": " Hi.", "compression_ratio": 0.3}
    composite.outputs = [Output("heard", " Hi.", False), Output("segments", [segment], False)]
    for form in ("json", "verbose_json"):
        body = transcribe(http, response_format=form).json()
        assert body["text"] == "Hi." and body["usage"] == {"type": "duration", "seconds": 1}
    assert body["segments"][0]["compression_ratio"] == 0.3 and body["segments"][0]["id"] == 0


def test_verbose_json_has_the_times_that_were_asked_for(http, composite):
    word = {"word": "Hi", "start": 0.1, "end": 0.5}
    segment = {"start": 0.0, "end": 1.0, "text": " Hi.", "words": [word]}
    composite.outputs = [Output("heard", " Hi.", False), Output("segments", [segment], False)]
    ask = lambda *kinds: transcribe(http, response_format="verbose_json", **{"timestamp_granularities[]": list(kinds)}).json()
    both, words = ask("word", "segment"), ask("word")
    assert both["words"] == words["words"] == [word] and composite.params["words"]
    assert "words" not in both["segments"][0] and "segments" not in words and "words" not in ask("segment")
    answer = transcribe(http, **{"timestamp_granularities[]": "word"})
    assert answer.status_code == 400 and "verbose_json" in answer.json()["error"]["message"]
