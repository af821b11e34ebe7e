"""The audio routes without a model behind them."""

from types import SimpleNamespace

import pytest
from starlette.testclient import TestClient

from slipstream.config import ServerConfig
from slipstream.serve.app import build


@pytest.fixture
def http():
    front = SimpleNamespace(server_config=ServerConfig(), composite=True, model="voice", check_model=lambda name: None)
    return TestClient(build(front), base_url="http://127.0.0.1")  # type: ignore[arg-type]


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
