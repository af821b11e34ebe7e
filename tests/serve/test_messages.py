"""/v1/messages, with the `anthropic` client and by hand."""

import dataclasses

import anthropic
import pytest

from tests.serve.fake import EOS, Script
from tests.serve.test_chat import prompt_of
from tests.serve.test_tools import CALL, thinking  # noqa: F401

TOOL = {
    "name": "get_weather",
    "description": "The weather of a city",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
HI = [{"role": "user", "content": "hi"}]


def script(text: str) -> Script:
    return Script([*text.encode(), EOS])


@pytest.fixture
def client(roomy):
    with anthropic.Anthropic(base_url=roomy.url, api_key="none", max_retries=0) as c:
        yield c


def test_a_message_is_answered(client, roomy):
    m = client.messages.create(model="fake", max_tokens=50, system="be brief", messages=HI)
    assert m.content[0].text == "hello" and m.stop_reason == "end_turn" and m.role == "assistant"
    assert m.usage.output_tokens == 6 and m.usage.input_tokens > 0 and m.id.startswith("msg_")
    assert prompt_of(roomy).startswith("|system\nbe brief||user\nhi|")
    assert client.messages.create(model="fake", max_tokens=3, messages=HI).stop_reason == "max_tokens"
    m = client.messages.create(model="fake", max_tokens=50, messages=HI, stop_sequences=["l"])
    assert m.stop_reason == "stop_sequence" and m.stop_sequence == "l" and m.content[0].text == "he"
    assert client.messages.count_tokens(model="fake", messages=HI).input_tokens > 2


def test_a_stream_has_anthropic_s_events_in_order(client, roomy):
    with client.messages.stream(model="fake", max_tokens=50, messages=HI) as stream:
        assert "".join(stream.text_stream) == "hello"
        assert stream.get_final_message().stop_reason == "end_turn"
    body = {"model": "fake", "max_tokens": 50, "messages": HI, "stream": True}
    lines = roomy.client.post("/v1/messages", json=body).text.splitlines()
    kinds = [line[7:] for line in lines if line.startswith("event: ")]
    assert kinds[:3] == ["message_start", "ping", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert set(kinds[3:-3]) == {"content_block_delta"}


def test_an_agent_s_loop_of_three_turns(client, roomy):
    said = [CALL, "Then:\n" + CALL, "Rain."]
    roomy.script = lambda request: script(said.pop(0))
    messages: list = [{"role": "user", "content": "weather?"}]
    for _ in range(4):
        with client.messages.stream(model="fake", max_tokens=300, messages=messages, tools=[TOOL]) as stream:  # type: ignore
            m = stream.get_final_message()
        messages.append({"role": "assistant", "content": [b.model_dump() for b in m.content]})
        if m.stop_reason != "tool_use":
            break
        use = m.content[-1]
        assert use.type == "tool_use" and use.name == "get_weather" and use.input == {"city": "Paris"}
        result = {"type": "tool_result", "tool_use_id": use.id, "content": [{"type": "text", "text": "rain"}]}
        messages.append({"role": "user", "content": [result]})
    assert len(roomy.leader.requests) == 3 and m.content[0].text == "Rain." and "<tool_response>\nrain" in prompt_of(roomy)


def test_forced_tools_and_reasoning(client, thinking):  # noqa: F811
    thinking.script = script('[{"name": "get_weather", "arguments": {"city": "Rome"}}]')
    m = client.messages.create(model="fake", max_tokens=99, messages=HI, tools=[TOOL], tool_choice={"type": "any"})  # type: ignore
    assert m.content[0].input == {"city": "Rome"} and m.stop_reason == "tool_use" and thinking.leader.requests[-1].grammar
    thinking.script = script("<think>hm</think>hello")
    m = client.messages.create(model="fake", max_tokens=99, messages=HI)
    assert [b.type for b in m.content] == ["thinking", "text"] and m.content[0].thinking == "hm"


def test_an_answer_may_be_bound_by_a_format(client, roomy):
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    for text, tools in (('{"a": 1}', []), ('{"a": 1}', [TOOL]), (CALL, [TOOL])):
        roomy.script = script(text)
        format = {"format": {"type": "json_schema", "schema": schema}}
        m = client.messages.create(model="fake", max_tokens=200, messages=HI, tools=tools, output_config=format)
        assert roomy.leader.requests[-1].grammar and m.content[0].type == ("tool_use" if text == CALL else "text")
    bad = {"format": {"type": "json_schema", "schema": {"type": "nonsense"}}}
    with pytest.raises(anthropic.BadRequestError, match="output_config.format.schema"):
        client.messages.create(model="fake", max_tokens=50, messages=HI, output_config=bad)


def test_the_last_assistant_message_is_gone_on_with(client, roomy):
    client.messages.create(model="fake", max_tokens=9, messages=[*HI, {"role": "assistant", "content": "so far"}])
    assert prompt_of(roomy) == "|user\nhi||assistant\nso far"


def test_errors_have_anthropic_s_shape(client, roomy):
    with pytest.raises(anthropic.BadRequestError) as e:
        client.messages.create(model="fake", max_tokens=9000, messages=HI)
    assert e.value.body["type"] == "error" and e.value.body["error"]["type"] == "invalid_request_error"
    assert "max_tokens" in e.value.body["error"]["message"]
    with pytest.raises(anthropic.NotFoundError):
        client.messages.create(model="other", max_tokens=9, messages=HI)
    r = roomy.client.post("/v1/messages", json={"messages": HI})
    assert r.status_code == 400 and "max_tokens" in r.json()["error"]["message"]
    roomy.script = Script([*b"ab"], reason="error", error="the device is gone")
    stream = client.messages.create(model="fake", max_tokens=9, messages=HI, stream=True)
    with pytest.raises(anthropic.APIStatusError, match="device"):
        list(stream)


def test_a_system_message_stands_where_it_was_said(roomy):
    messages = [
        *HI,
        {"role": "assistant", "content": "so"},
        {"role": "system", "content": "once", "clear_at": "next_user_message"},
        {"role": "user", "content": "go"},
        {"role": "system", "content": [{"type": "text", "text": "be brief"}], "clear_at": "next_user_message"},
    ]
    assert roomy.client.post("/v1/messages", json={"max_tokens": 9, "system": "s", "messages": messages}).status_code == 200
    assert prompt_of(roomy) == "|system\ns||user\nhi||assistant\nso||user\ngo||system\nbe brief||assistant\n"
    messages[2]["content"] = [{"type": "tool_use", "id": "a", "name": "b", "input": {}}]
    messages[2]["clear_at"] = "never"
    r = roomy.client.post("/v1/messages", json={"max_tokens": 9, "messages": messages})
    assert r.status_code == 400 and "messages[2].content" in r.json()["error"]["message"]


def test_what_changes_no_answer_is_taken(roomy):
    """As Claude Code and Anthropic's SDK send it."""
    assistant = [{"type": "redacted_thinking", "data": "xyz"}, {"type": "text", "text": "so"}]
    messages = [*HI, {"role": "assistant", "content": assistant}, *HI]
    tool = {**TOOL, "eager_input_streaming": True, "defer_loading": False, "allowed_callers": ["direct"]}
    body = {
        "max_tokens": 9,
        "messages": messages,
        "tools": [tool],
        "output_config": {"effort": "high"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "inference_geo": "eu",
        "mcp_servers": [],
        "diagnostics": {"previous_message_id": None},
        "metadata": {"user_id": "x"},
        "prompt_cache_retention": "24h",
        "client_metadata": {"a": "b"},
    }
    r = roomy.client.post("/v1/messages", json=body)
    assert r.status_code == 200 and r.json()["content"][0]["text"] == "hello", r.text
    count = roomy.client.post("/v1/messages/count_tokens", json={k: v for k, v in body.items() if k != "max_tokens"})
    assert count.json()["input_tokens"] == len(prompt_of(roomy).encode()) == r.json()["usage"]["input_tokens"]


@pytest.mark.parametrize(
    "change,named",
    [
        ({"mcp_servers": [{"type": "url", "url": "http://x", "name": "x"}]}, "mcp_servers: is not supported"),
        ({"container": "x"}, "container: is not supported"),
        ({"compaction": {"type": "summarize"}}, "compaction: is not supported"),
        ({"tools": [{**TOOL, "allowed_callers": ["code_execution_20250825"]}]}, "tools.allowed_callers"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0]"),
        ({"messages": [{"role": "user", "content": [{"text": "x"}]}]}, "messages[0].content[0].type"),
        ({"system": [{"text": "x"}]}, "system[0].type"),
        ({"output_config": {"format": {"schema": {}}}}, "output_config.format.type"),
        ({"frequency_penalty": 1}, "frequency_penalty"),
    ],
)
def test_what_would_change_the_answer_is_refused_by_name(roomy, change, named):
    r = roomy.client.post("/v1/messages", json={"max_tokens": 9, "messages": HI, **change})
    assert r.status_code == 400 and named in r.json()["error"]["message"], r.text
    assert not roomy.leader.requests


def test_effort_reaches_a_template_that_has_a_setting_for_it(roomy, monkeypatch):
    given = []
    plain = roomy.tokenizer.apply_chat
    monkeypatch.setattr(
        roomy.tokenizer, "apply_chat", lambda *a, **k: given.append(k.get("reasoning_effort")) or plain(*a, **k)
    )
    body = {"max_tokens": 9, "messages": HI, "output_config": {"effort": "max"}}
    assert roomy.client.post("/v1/messages", json=body).status_code == 200
    monkeypatch.setattr(roomy.front, "dialect", dataclasses.replace(roomy.front.dialect, template="{{ reasoning_effort }}"))
    for effort in ("max", "low"):
        body["output_config"] = {"effort": effort}
        assert roomy.client.post("/v1/messages", json=body).status_code == 200
    assert given == [None, "high", "low"]


def test_anthropic_s_tool_runner_goes_on_without_a_thread(client, roomy):
    calls = []

    @anthropic.beta_tool
    def get_weather(city: str) -> str:
        """The weather of a city."""
        calls.append(city)
        return "rain"

    said = [CALL, "Rain."]
    roomy.script = lambda request: script(said.pop(0))
    runner = client.beta.messages.tool_runner(model="fake", max_tokens=300, messages=HI, tools=[get_weather])
    assert runner.until_done().content[0].text == "Rain." and calls == ["Paris"]
    with pytest.raises(anthropic.BadRequestError) as e:
        client.beta.messages.create(model="fake", max_tokens=9, messages=HI, thread={"type": "create"})
    details = e.value.body["error"]["details"]  # type: ignore[index]
    assert details["error_code"] == "thread_unsupported_request" and details["unsupported"] == ["thread"]


def test_the_key_may_come_as_anthropic_s_clients_send_it(own_front):
    front = own_front(api_key="sesame")
    with anthropic.Anthropic(base_url=front.url, api_key="sesame", max_retries=0) as client:
        assert client.messages.create(model="fake", max_tokens=9, messages=HI).content[0].text == "hello"  # type: ignore
    wrong = anthropic.Anthropic(base_url=front.url, api_key="wrong", max_retries=0)
    with wrong as client, pytest.raises(anthropic.AuthenticationError):
        client.messages.create(model="fake", max_tokens=9, messages=HI)  # type: ignore
