"""Tool calls and reasoning over HTTP: chat completions, whole and streamed."""

import dataclasses
import json
from array import array

import msgspec
import openai
import pytest

from slipstream.config import ServerConfig
from slipstream.grammar.matcher import Maker, Vocabulary
from slipstream.serve.engine.engine import RequestLimits
from slipstream.serve.openai.bodies import ChatBody
from slipstream.serve.openai.chat import plan_chat
from slipstream.serve.text.calls import FORMS
from slipstream.serve.text.dialect import PLAIN, Dialect, detect
from tests.serve.fake import EOS, FakeTokenizer, Script, wait_for
from tests.serve.test_chat import prompt_of

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
BOUND = '{"name": "get_weather", "arguments": {"city": "Paris"}}'


@pytest.fixture
def thinking(roomy):
    """The shared front end, as one of a model that reasons."""
    before = roomy.front.dialect
    roomy.front.dialect = dataclasses.replace(before, thinking="qwen3")
    yield roomy
    roomy.front.dialect = before


def script(text: str) -> Script:
    return Script([*text.encode(), EOS])


def test_a_tool_call_is_told_from_content(roomy):
    roomy.script = script("Let me look.\n" + CALL)
    b = roomy.chat("weather?", tools=[WEATHER]).json()
    choice = b["choices"][0]
    assert choice["finish_reason"] == "tool_calls" and choice["message"]["content"] == "Let me look."
    (call,) = choice["message"]["tool_calls"]
    assert call["type"] == "function" and call["id"].startswith("call_") and call["function"]["name"] == "get_weather"
    assert json.loads(call["function"]["arguments"]) == {"city": "Paris"}
    assert '"name": "get_weather"' in prompt_of(roomy) and "<tools>" in prompt_of(roomy)


def test_a_malformed_call_comes_back_as_content(roomy):
    text = '<tool_call>{"name": "get_weather", "arguments": {"city": "Paris"}</tool_call>'
    roomy.script = script(text)
    choice = roomy.chat("weather?", tools=[WEATHER]).json()["choices"][0]
    assert choice["message"] == {"role": "assistant", "content": text} and choice["finish_reason"] == "stop"


def test_streamed_calls_add_up_to_whole_ones(roomy):
    roomy.script = script("Hm. " + CALL + "\n" + CALL)
    events = roomy.events("/v1/chat/completions", messages=[{"role": "user", "content": "x"}], tools=[WEATHER])
    assert events.pop() == "[DONE]"
    calls: dict[int, dict] = {}
    for e in events:
        for d in e["choices"][0]["delta"].get("tool_calls", ()):
            call = calls.setdefault(d["index"], {"arguments": ""})
            call.update({k: v for k, v in d.items() if k == "id"})
            call["arguments"] += d["function"]["arguments"]
    assert [json.loads(c["arguments"]) for c in calls.values()] == [{"city": "Paris"}] * 2
    assert len({c["id"] for c in calls.values()}) == 2
    assert "".join(e["choices"][0]["delta"].get("content") or "" for e in events) == "Hm."
    assert events[-1]["choices"][0]["finish_reason"] == "tool_calls"


def test_without_parallel_calls_the_answer_ends_with_the_first(roomy):
    roomy.script = Script([*(CALL + CALL).encode(), *b"x" * 300])
    choice = roomy.chat("x", tools=[WEATHER], parallel_tool_calls=False, max_tokens=400).json()["choices"][0]
    assert len(choice["message"]["tool_calls"]) == 1 and choice["finish_reason"] == "tool_calls"
    wait_for(lambda: len(roomy.leader.aborts) == 1)


def test_stop_strings_do_not_cut_calls(roomy):
    roomy.script = script("a STOP b" + CALL)
    choice = roomy.chat("x", tools=[WEATHER], stop=["Paris"]).json()["choices"][0]
    assert json.loads(choice["message"]["tool_calls"][0]["function"]["arguments"]) == {"city": "Paris"}
    roomy.script = script("a STOP b" + CALL)
    choice = roomy.chat("x", tools=[WEATHER], stop=["STOP"]).json()["choices"][0]
    assert choice["message"] == {"role": "assistant", "content": "a "} and choice["stop_reason"] == "STOP"


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}])
def test_a_forced_call_is_bound_by_a_grammar_and_streams_its_arguments(roomy, choice):
    text = f"[{BOUND}]" if choice == "required" else BOUND
    roomy.script = script(text)
    r = roomy.chat("x", tools=[WEATHER], tool_choice=choice)
    message = r.json()["choices"][0]["message"]
    assert message["content"] is None and json.loads(message["tool_calls"][0]["function"]["arguments"]) == {"city": "Paris"}
    assert roomy.leader.requests[-1].grammar
    events = roomy.events(
        "/v1/chat/completions", messages=[{"role": "user", "content": "x"}], tools=[WEATHER], tool_choice=choice
    )
    deltas = [d for e in events[:-1] for d in e["choices"][0]["delta"].get("tool_calls", ())]
    assert len(deltas) > 2 and deltas[0]["function"]["name"] == "get_weather"
    assert json.loads("".join(d["function"]["arguments"] for d in deltas)) == {"city": "Paris"}


FORMAT = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object", "required": ["n"]}}}


def test_with_a_format_the_answer_is_calls_or_fits_it(roomy):
    """What agents send that have both tools and a type of output."""
    for text, calls in ((CALL + "\n" + CALL, 2), ('{"n": 1}', 0)):
        roomy.script = script(text)
        choice = roomy.chat("weather?", tools=[WEATHER], response_format=FORMAT).json()["choices"][0]
        assert len(choice["message"].get("tool_calls", ())) == calls and roomy.leader.requests[-1].grammar
        assert choice["message"]["content"] == (None if calls else text)
    roomy.script = script(BOUND)
    forced = roomy.chat("weather?", tools=[WEATHER], response_format=FORMAT, tool_choice="required").json()["choices"][0]
    assert forced["finish_reason"] == "tool_calls"
    bad = {"type": "json_schema", "json_schema": {"name": "n"}}
    for choice in ("auto", "required"):
        answer = roomy.chat("weather?", tools=[WEATHER], response_format=bad, tool_choice=choice)
        assert answer.status_code == 400 and answer.json()["error"]["param"].startswith("response_format.json_schema")


@pytest.mark.parametrize("form, special", [("hermes", ()), ("hermes", (256, 257)), ("llama3", (256,))])
@pytest.mark.parametrize("several", [True, False])
def test_the_grammar_of_a_format_beside_tools_lets_through_what_the_model_writes(form, special, several):
    """Markers may be special tokens or plain text."""
    names = {i: m for i, m in zip(special, (FORMS[form].start, FORMS[form].end), strict=False)}
    dialect = Dialect(form, "none", True, frozenset(special), frozenset(names.values()))
    tokens = [bytes([i]) for i in range(256)] + [names.get(i, f"<{i}>").encode() for i in (256, 257)] + [b"<end>"]
    make = Maker(Vocabulary(tokens, [256, 257, 258], [258], 259))
    asked = {"tools": [WEATHER], "response_format": FORMAT, "parallel_tool_calls": several}
    body = msgspec.convert({"messages": [{"role": "user", "content": "?"}], **asked}, ChatBody)
    plan, _ = plan_chat(body, dialect, FakeTokenizer(), RequestLimits(4096, 1, 1))

    def ends(text: str) -> bool | None:
        """Whether an answer of this text may end; None where it may not even be written."""
        for id, mark in names.items():
            text = text.replace(mark, chr(id))
        ids = [id for c in text for id in ([ord(c)] if ord(c) in names else c.encode())]
        matcher = make(plan.grammar)
        for id in ids:
            if not matcher.mask()[id // 32] >> id % 32 & 1:
                return None
            matcher.accept(id)
        return bool(matcher.mask()[258 // 32] >> 258 % 32 & 1)

    f = FORMS[form]
    call = f.start + BOUND.replace("arguments", f.key) + f.end
    assert ends('{"n": 1}') is True and ends('{"n": 1') is False and ends("Hello") is None
    assert ends(call) is True and ends(call[:-1]) is not True
    assert ends(call + f.between + call) is (True if several else None)
    assert ends(call.replace("get_weather", "get_money")) is None


def test_with_none_the_model_does_not_hear_of_tools(roomy):
    roomy.script = script(CALL)
    choice = roomy.chat("x", tools=[WEATHER], tool_choice="none").json()["choices"][0]
    assert choice["message"]["content"] == CALL and "get_weather" not in prompt_of(roomy)


def allowed(mode: str, *names: str) -> dict:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


TIME = {"type": "function", "function": {"name": "get_time"}}


def test_of_allowed_tools_alone_the_model_hears_and_only_they_are_called(roomy):
    roomy.script = script(CALL)
    for names, calls in ((("get_weather",), 1), (("get_time",), 0)):
        choice = roomy.chat("x", tools=[WEATHER, TIME], tool_choice=allowed("auto", *names)).json()["choices"][0]
        assert len(choice["message"].get("tool_calls") or ()) == calls
        assert [name in prompt_of(roomy) for name in ("get_weather", "get_time")] == [bool(calls), not calls]
    assert not roomy.leader.requests[-1].grammar
    roomy.script = script(f"[{BOUND}]")
    choice = roomy.chat("x", tools=[WEATHER, TIME], tool_choice=allowed("required", "get_weather")).json()["choices"][0]
    assert choice["message"]["tool_calls"][0]["function"]["name"] == "get_weather"
    grammar = roomy.leader.requests[-1].grammar
    assert "get_weather" in str(grammar) and "get_time" not in str(grammar)


@pytest.mark.parametrize(
    "change,param",
    [
        ({"tools": [WEATHER], "tool_choice": allowed("auto", "get_weather", "get_time")}, "tool_choice.allowed_tools"),
        ({"tools": [WEATHER], "tool_choice": allowed("auto")}, "tool_choice.allowed_tools"),
        ({"tools": [WEATHER], "tool_choice": allowed("none", "get_weather")}, "tool_choice.allowed_tools.mode"),
        ({"tool_choice": allowed("auto", "get_weather")}, "tool_choice.allowed_tools"),
        ({"tools": [{**WEATHER, "type": "retrieval"}]}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tools": [{"type": "function", "function": {"name": "a", "parameters": {"type": "array"}}}]}, "tools[0].function"),
        ({"tools": [{"type": "function", "function": {"name": "a", "parameters": {"properties": 1}}}]}, "tools[0].function"),
        ({"tools": [WEATHER, WEATHER]}, "tools[1].function.name"),
        ({"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": "sometimes"}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"lora_request": {}}, "lora_request"),
        ({"reasoning_effort": "high"}, "reasoning_effort"),
        (
            {"tools": [{"type": "function", "function": {"name": "a", "parameters": {"properties": {"x": {"type": "no"}}}}}],
             "tool_choice": "required"},
            "tools",
        ),
    ],
)  # fmt: skip
def test_bad_tools_are_refused_by_name(roomy, change, param):
    r = roomy.chat("x", **change)
    assert r.status_code == 400 and r.json()["error"]["param"].startswith(param), r.text
    assert not roomy.leader.requests


def test_a_conversation_with_calls_and_results_is_rendered(roomy):
    messages = [
        {"role": "user", "content": "weather?"},
        {"role": "assistant", "content": None, "tool_calls": [
            {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Paris"}'}}]},
        {"role": "tool", "tool_call_id": "call_1", "content": "rain"},
    ]  # fmt: skip
    r = roomy.client.post("/v1/chat/completions", json={"messages": messages, "tools": [WEATHER]})
    assert r.status_code == 200, r.text
    assert CALL in prompt_of(roomy) and "<tool_response>\nrain\n</tool_response>" in prompt_of(roomy)


@pytest.mark.parametrize("arguments", ["[1]", '{"city": "Par', "no JSON at all", '"text"', "1", '{"n": ' + "9" * 5000 + "}"])
def test_a_call_in_history_whose_arguments_are_no_object_is_taken_as_it_is(roomy, arguments):
    """What max_tokens cut comes back in the next request, on each route."""
    function = {"name": "get_weather", "arguments": arguments}
    calls = [{"id": "call_1", "type": "function", "function": function}]
    last = {"role": "user", "content": "and?"}
    bodies = {
        "/v1/chat/completions": {"messages": [{"role": "assistant", "content": None, "tool_calls": calls}, last]},
        "/v1/responses": {"input": [{"type": "function_call", "call_id": "call_1", **function}, last], "instructions": "x"},
        "/v1/messages": {
            "messages": [
                {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "get_weather", "input": arguments}]},
                last,
            ],
            "max_tokens": 5,
        },
    }
    for path, body in bodies.items():
        r = roomy.client.post(path, json=body)
        assert r.status_code == 200, (path, r.text)
        assert json.dumps(arguments) in prompt_of(roomy)


CUT = [
    ("required", '[\n{\n    "name'),
    ("required", '[{"name": "get_weather", "arguments": {"ci'),
    ("auto", CALL[:30]),
    ("auto", CALL[:50]),
]


@pytest.mark.parametrize("choice, text", CUT)
@pytest.mark.parametrize("stream", [False, True])
def test_a_call_that_max_tokens_cut_gives_no_content(roomy, choice, text, stream):
    roomy.script = Script([*text.encode(), *b"x" * 50])
    said = [{"role": "user", "content": "x"}]
    function = WEATHER["function"]
    anthropic = {"name": "get_weather", "input_schema": function["parameters"]}
    chat = {"messages": said, "max_tokens": len(text), "tools": [WEATHER], "tool_choice": choice}
    responses = {
        "input": "x",
        "max_output_tokens": len(text),
        "tools": [{"type": "function", **function}],
        "tool_choice": choice,
    }
    kind = {"type": "any" if choice == "required" else "auto"}
    messages = {"messages": said, "max_tokens": len(text), "tools": [anthropic], "tool_choice": kind}
    if not stream:
        answer = roomy.client.post("/v1/chat/completions", json=chat).json()["choices"][0]
        assert (
            answer["finish_reason"] == "length" and not answer["message"]["content"] and "tool_calls" not in answer["message"]
        )
        answer = roomy.client.post("/v1/responses", json=responses).json()
        assert answer["status"] == "incomplete" and answer["output"] == []
        answer = roomy.client.post("/v1/messages", json=messages).json()
        assert answer["stop_reason"] == "max_tokens" and answer["content"] == []
        return
    events = roomy.events("/v1/chat/completions", **chat)[:-1]
    assert events[-1]["choices"][0]["finish_reason"] == "length"
    assert not any(e["choices"][0]["delta"].get("content") for e in events)
    kinds = [e["type"] for e in roomy.events("/v1/responses", **responses)]
    assert kinds[-1] == "response.incomplete" and "response.output_text.delta" not in kinds
    assert not any(e.get("delta", {}).get("type") == "text_delta" for e in roomy.events("/v1/messages", **messages))


def test_text_before_a_call_that_was_cut_stays(roomy):
    roomy.script = Script([*("Let me look.\n" + CALL[:40]).encode(), *b"x" * 50])
    choice = roomy.chat("x", tools=[WEATHER], max_tokens=53).json()["choices"][0]
    assert choice["message"]["content"] == "Let me look." and choice["finish_reason"] == "length"


def accepts(grammar: bytes, answer: str) -> bool:
    matcher = Maker(Vocabulary.of(FakeTokenizer()))(grammar)
    for byte in [*answer.encode(), EOS]:
        if not matcher.mask()[byte // 32] >> byte % 32 & 1:
            return False
        matcher.accept(byte)
    return True


def test_schemas_of_functions_keep_their_own_references_and_are_closed(roomy):
    own = {
        "$defs": {"P": {"type": "object", "properties": {"x": {"type": "string"}}}},
        "properties": {"p": {"$ref": "#/$defs/P"}},
    }
    other = {"$defs": {"P": {"type": "integer"}}, "properties": {"p": {"$ref": "#/$defs/P"}}}
    functions = [{"name": "f", "parameters": own}, {"name": "g", "parameters": other}, {"name": "h"}]
    r = roomy.chat("x", tools=[{"type": "function", "function": f} for f in functions], tool_choice="required")
    assert r.status_code == 200, r.text
    grammar = roomy.leader.requests[-1].grammar
    good = ('"f", "arguments": {"p": {"x": "y"}}', '"g", "arguments": {"p": 1}', '"h", "arguments": {}')
    bad = (
        '"f", "arguments": {"p": 1}',
        '"f", "arguments": {"p": {"z": 1}}',
        '"g", "arguments": {"q": 1}',
        '"h", "arguments": {"q": 1}',
    )
    assert all(accepts(grammar, f'[{{"name": {call}}}]') for call in good)
    assert not any(accepts(grammar, f'[{{"name": {call}}}]') for call in bad)


def test_names_and_data_of_functions_are_no_keywords(roomy):
    properties = {"$schema": {"type": "integer"}, "$id": {"const": {"$ref": "#/x"}}, "e": {"enum": [{"$schema": "x"}]}}
    function = {"name": "f", "parameters": {"type": "object", "properties": properties, "required": [*properties]}}
    assert roomy.chat("x", tools=[{"type": "function", "function": function}], tool_choice="required").status_code == 200
    call = '[{"name": "f", "arguments": {"$schema": 1, "$id": {"$ref": "#/x"}, "e": {"$schema": "x"}}}]'
    assert accepts(roomy.leader.requests[-1].grammar, call)


@pytest.mark.parametrize("depth", [110, 600, 960])
@pytest.mark.parametrize("choice", ["auto", "required"])
def test_a_tool_that_is_nested_deeply_is_no_error_of_the_server(roomy, depth, choice):
    schema = '{"type": "array", "items": ' * depth + "{}" + "}" * depth
    tool = f'{{"type": "function", "function": {{"name": "f", "parameters": {{"properties": {{"a": {schema}}}}}}}}}'
    body = f'{{"messages": [{{"role": "user", "content": "x"}}], "tool_choice": "{choice}", "tools": [{tool}]}}'
    r = roomy.client.post("/v1/chat/completions", content=body, headers={"content-type": "application/json"})
    assert r.status_code in (200, 400), r.text
    if choice == "required":
        assert r.status_code == 400 and "deep" in r.json()["error"]["message"], r.text


def test_an_error_in_a_tools_schema_names_the_clients_own_field(roomy):
    good = {"type": "object", "properties": {"a": {"type": "integer"}}}
    bad = {"type": "object", "properties": {"a": {"$ref": "#/nowhere"}}}
    functions = [{"name": "f", "parameters": good}, {"name": "g", "parameters": bad}]
    chat = {"messages": [{"role": "user", "content": "x"}], "tools": [{"type": "function", "function": f} for f in functions]}
    responses = {"input": "x", "tools": [{"type": "function", **f} for f in functions], "tool_choice": "required"}
    tools = [{"name": f["name"], "input_schema": f["parameters"]} for f in functions]
    messages = {"messages": chat["messages"], "max_tokens": 5, "tools": tools, "tool_choice": {"type": "any"}}
    r = roomy.client.post("/v1/chat/completions", json={**chat, "tool_choice": "required"})
    assert (r.status_code, r.json()["error"]["param"]) == (400, "tools[1].function.parameters")
    r = roomy.client.post("/v1/responses", json=responses)
    assert (r.status_code, r.json()["error"]["param"]) == (400, "tools[1].parameters")
    r = roomy.client.post("/v1/messages", json=messages)
    assert r.status_code == 400 and r.json()["error"]["message"].startswith("tools[1].input_schema: $ref at #/properties/a")


def test_reasoning_is_apart_from_content_and_counted(thinking):
    thinking.script = script("<think>\nhm\n</think>\n\nhello")
    b = thinking.chat("x").json()
    message = b["choices"][0]["message"]
    assert message["content"] == "hello" and message["reasoning_content"] == message["reasoning"] == "hm"
    assert b["usage"]["completion_tokens_details"]["reasoning_tokens"] == len(">\nhm\n</think>")
    events = thinking.events("/v1/chat/completions", messages=[{"role": "user", "content": "x"}])[:-1]
    deltas = [e["choices"][0]["delta"] for e in events]
    assert "".join(d.get("content") or "" for d in deltas) == "hello"
    assert "".join(d.get("reasoning_content") or "" for d in deltas) == "hm"


@pytest.mark.parametrize("stop", [["k>"], ["</"], ["think"], ["\n\n"]])
def test_ff81_stop_strings_do_not_let_a_reasoning_marker_into_content(thinking, stop):
    thinking.script = script("<think>\nhm\n\nk\n</think>\n\nhello\n\nthere")
    message = thinking.chat("x", stop=stop).json()["choices"][0]["message"]
    assert message["reasoning_content"] == "hm\n\nk"
    assert message["content"] == ("hello" if stop == ["\n\n"] else "hello\n\nthere")


def test_a_template_that_opens_the_reasoning_in_the_prompt(thinking, monkeypatch):
    plain = thinking.tokenizer.apply_chat
    monkeypatch.setattr(thinking.tokenizer, "apply_chat", lambda *a, **k: [*plain(*a, **k), *b"<think>\n"])
    thinking.script = script("hm\n</think>\n\nhello")
    message = thinking.chat("x").json()["choices"][0]["message"]
    assert message["content"] == "hello" and message["reasoning_content"] == "hm"


@pytest.mark.parametrize(
    "opened,begun,answer,content,reasoning",
    [
        ("", "<think>\nLet me see", " if so</think>Paris", "Paris", "if so"),
        ("", "", "<think>a</think>Paris", "Paris", "a"),
        ("", " \n", "<think>a</think>Paris", "Paris", "a"),
        ("", "<think>a</think>", "Paris", "Paris", None),
        ("", "The answer: ", "Paris", "Paris", None),
        ("", "The answer: ", "<think>a", "<think>a", None),
        ("<think>\n", "Let me see", " if so</think>Paris", "Paris", "if so"),
        ("<think>\n", "", "a</think>Paris", "Paris", "a"),
        ("<think>\n\n</think>\n\n", "", "Paris", "Paris", None),
        ("<think>\n\n</think>\n\n", "<think>\nLet me see", " if so</think>Paris", "Paris", "if so"),
    ],
)
def test_reasoning_goes_on_where_the_beginning_of_the_answer_leaves_it(
    thinking, monkeypatch, opened, begun, answer, content, reasoning
):
    """opened: what the template writes before the assistant's last text."""

    def apply(messages, **options):
        return [*b"|assistant\n", *(opened + messages[-1]["content"]).encode()]

    monkeypatch.setattr(thinking.tokenizer, "apply_chat", apply)
    thinking.script = script(answer)
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": begun}]
    body = {"messages": messages, "continue_final_message": True}
    message = thinking.client.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]
    assert (message["content"], message.get("reasoning_content")) == (content, reasoning)


class Templated:
    special_ids = frozenset({7})

    def __init__(self, source):
        self.template = type("T", (), {"source": source})

    def token_text(self, id):
        return "<|python_tag|>"


def test_the_form_is_seen_in_the_template_or_said_by_a_flag():
    auto = ServerConfig()
    assert detect(Templated("{{ tools }} <tool_call>"), auto).calls == "hermes"
    llama = detect(Templated("{{ tools }} Environment: ipython"), auto)
    assert llama.calls == "llama3" and llama.keep == {7} and llama.template_tools
    assert detect(Templated("{{ tools }} [TOOL_CALLS]"), auto).calls == "unknown"
    assert detect(Templated("{{ messages }}"), auto).calls == "hermes"
    assert detect(Templated("{{ x.split('</think>') }}"), auto).thinking == "qwen3"
    said = detect(Templated("</think>"), ServerConfig(tool_call_parser="llama3", reasoning_parser="none"))
    assert said.calls == "llama3" and said.thinking == "none" and PLAIN.calls == "none"


def test_an_agent_s_loop_of_three_turns_with_the_openai_client(roomy):
    """Two calls, each answered by the agent, then the final text."""
    said = [CALL, '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>', "Rain in both."]
    roomy.script = lambda request: script(said.pop(0))
    messages: list = [{"role": "user", "content": "Compare Paris and Rome."}]
    cities = []
    with openai.OpenAI(base_url=roomy.url + "/v1", api_key="none", max_retries=0) as client:
        while True:
            r = client.chat.completions.create(model="fake", messages=messages, tools=[WEATHER], max_tokens=90)  # type: ignore
            message = r.choices[0].message
            messages.append(message.model_dump(exclude_none=True))
            if r.choices[0].finish_reason != "tool_calls":
                break
            for call in message.tool_calls or ():
                cities.append(json.loads(call.function.arguments)["city"])
                messages.append({"role": "tool", "tool_call_id": call.id, "content": "rain"})
    assert cities == ["Paris", "Rome"] and message.content == "Rain in both." and len(roomy.leader.requests) == 3


def test_the_openai_client_puts_streamed_calls_together(roomy):
    roomy.script = script(CALL)
    with (
        openai.OpenAI(base_url=roomy.url + "/v1", api_key="none", max_retries=0) as client,
        client.chat.completions.stream(
            model="fake",
            messages=[{"role": "user", "content": "x"}],
            tools=[WEATHER],  # type: ignore
        ) as stream,
    ):
        for _ in stream:
            pass
        call = stream.get_final_completion().choices[0].message.tool_calls[0]  # type: ignore
    assert call.function.name == "get_weather" and json.loads(call.function.arguments) == {"city": "Paris"}


def test_tokens_of_a_conversation_with_tools_are_those_of_its_prompt(roomy):
    body = {"messages": [{"role": "user", "content": "x"}], "tools": [WEATHER]}
    roomy.client.post("/v1/chat/completions", json=body)
    tokens = roomy.client.post("/tokenize", json=body).json()["tokens"]
    assert tokens == list(array("i", roomy.leader.requests[-1].prompt))


def test_a_template_that_knows_tools_is_given_them_as_objects(roomy, monkeypatch):
    """Llama's and Qwen's templates write arguments out themselves, so they must not get them as a text."""
    seen = {}

    def apply_chat(messages, tools=None, **kwargs):
        seen.update(messages=messages, tools=tools, **kwargs)
        return [*b"x"]

    monkeypatch.setattr(roomy.tokenizer, "apply_chat", apply_chat)
    monkeypatch.setattr(roomy.front, "dialect", Dialect("llama3", "none", True, template="enable_thinking"))
    call = {"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Rome"}'}}
    messages = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "hm"},
        {"role": "tool", "tool_call_id": "c1", "content": "rain"},
    ]
    roomy.script = script('{"name": "get_weather", "parameters": {"city": "Paris"}}')
    body = {"messages": messages, "tools": [WEATHER], "reasoning_effort": "none"}
    choice = roomy.client.post("/v1/chat/completions", json=body).json()["choices"][0]
    assert json.loads(choice["message"]["tool_calls"][0]["function"]["arguments"]) == {"city": "Paris"}
    assert seen["tools"] == [WEATHER] and seen["enable_thinking"] is False
    assert seen["messages"][1]["tool_calls"][0]["function"]["arguments"] == {"city": "Rome"}
    assert seen["messages"][1]["reasoning_content"] == "hm" and seen["messages"][2]["tool_call_id"] == "c1"
