"""The `openai` client works unchanged."""

import openai
import pytest

from tests.serve.fake import EOS, Script

MESSAGES = [{"role": "user", "content": "hi"}]


@pytest.fixture
def client(front):
    with openai.OpenAI(base_url=front.url + "/v1", api_key="none", max_retries=0) as c:
        yield c


def test_chat_whole_and_streaming(client):
    r = client.chat.completions.create(model="fake", messages=MESSAGES, logprobs=True, top_logprobs=2)
    assert r.choices[0].message.content == "hello" and r.usage.completion_tokens == 6
    assert len(r.choices[0].logprobs.content) == 6 and len(r.choices[0].logprobs.content[0].top_logprobs) == 2
    chunks = list(
        client.chat.completions.create(model="fake", messages=MESSAGES, stream=True, stream_options={"include_usage": True})
    )
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "hello"
    assert chunks[-1].usage.completion_tokens == 6 and chunks[0].choices[0].delta.role == "assistant"


def test_completions_whole_and_streaming(client):
    r = client.completions.create(model="fake", prompt="hi", logprobs=1, echo=True)
    assert r.choices[0].text == "hihello" and len(r.choices[0].logprobs.tokens) == 8
    assert "".join(c.choices[0].text for c in client.completions.create(model="fake", prompt="hi", stream=True)) == "hello"
    assert client.models.list().data[0].id == "fake" and client.models.retrieve("fake").id == "fake"


def test_errors_are_the_client_s_own_kinds(client, front):
    with pytest.raises(openai.BadRequestError, match="temperature") as e:
        client.chat.completions.create(model="fake", messages=MESSAGES, temperature=9)
    assert e.value.param == "temperature"
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="nope", messages=MESSAGES)
    front.script = Script([*b"ab"], reason="error", error="the device is gone")
    with pytest.raises(openai.InternalServerError, match="device"):
        client.chat.completions.create(model="fake", messages=MESSAGES)
    with pytest.raises(openai.APIError, match="device"):
        list(client.chat.completions.create(model="fake", messages=MESSAGES, stream=True))
    front.script = Script([*b"fine", EOS])
    assert client.chat.completions.create(model="fake", messages=MESSAGES).choices[0].message.content == "fine"
