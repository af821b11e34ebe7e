"""OpenAI's custom tools, whose input is a text: chat completions and responses, whole, streamed and in history."""

import json

import openai
import pytest

from slipstream.grammar.matcher import Bound
from tests.serve.fake import EOS, Script
from tests.serve.test_chat import prompt_of
from tests.serve.test_tools import WEATHER, accepts

SQL = {"type": "custom", "custom": {"name": "sql", "description": "Runs a query"}}
TEXT = 'SELECT "a}" FROM t\nWHERE x = 1'
ARGUMENTS = json.dumps({"input": TEXT})
CALL = f'<tool_call>\n{{"name": "sql", "arguments": {ARGUMENTS}}}\n</tool_call>'
ASK = [{"role": "user", "content": "x"}]
NAMED = {"type": "custom", "custom": {"name": "sql"}}


def script(text: str) -> Script:
    return Script([*text.encode(), EOS])


def with_format(syntax: str, definition: str, **more) -> dict:
    grammar = {"syntax": syntax, "definition": definition, **more}
    return {"type": "custom", "custom": {"name": "sql", "format": {"type": "grammar", "grammar": grammar}}}


@pytest.fixture
def client(roomy):
    return openai.OpenAI(base_url=roomy.url + "/v1", api_key="x", max_retries=0)


FORMS = {
    "auto": ("Hm. " + CALL, {}),
    "required": ("[" + json.dumps({"name": "sql", "arguments": {"input": TEXT}}) + "]", {"tool_choice": "required"}),
    "named": (json.dumps({"name": "sql", "arguments": {"input": TEXT}}), {"tool_choice": NAMED}),
}


@pytest.mark.parametrize("form", FORMS)
def test_a_call_of_a_custom_tool_has_its_input_as_text(roomy, client, form):
    text, more = FORMS[form]
    roomy.script = script(text)
    choice = client.chat.completions.create(model="fake", messages=ASK, tools=[SQL, WEATHER], **more).choices[0]
    (call,) = choice.message.tool_calls
    assert call.type == "custom" and call.custom.name == "sql" and call.custom.input == TEXT
    assert choice.finish_reason == ("tool_calls") and bool(roomy.leader.requests[-1].grammar) == (form != "auto")
    assert '"input"' in prompt_of(roomy) and "get_weather" in prompt_of(roomy)
    events = roomy.events("/v1/chat/completions", messages=ASK, tools=[SQL, WEATHER], **more)
    deltas = [d for e in events[:-1] for d in e["choices"][0]["delta"].get("tool_calls", ())]
    assert deltas[0]["type"] == "custom" and deltas[0]["custom"]["name"] == "sql" and deltas[0]["id"].startswith("call_")
    assert "".join(d["custom"]["input"] for d in deltas) == TEXT
    content = "".join(e["choices"][0]["delta"].get("content") or "" for e in events[:-1])
    assert content == ("Hm." if form == "auto" else "")


def test_functions_beside_custom_tools_keep_their_arguments(roomy):
    roomy.script = script(CALL + '\n<tool_call>{"name": "get_weather", "arguments": {"city": "Paris"}}</tool_call>')
    calls = roomy.chat("x", tools=[SQL, WEATHER]).json()["choices"][0]["message"]["tool_calls"]
    assert [c["type"] for c in calls] == ["custom", "function"]
    assert calls[0]["custom"]["input"] == TEXT and json.loads(calls[1]["function"]["arguments"]) == {"city": "Paris"}


def test_a_custom_call_that_max_tokens_cut_is_left_out(roomy):
    for text, more in FORMS.values():
        roomy.script = Script([*text[:-30].encode()])
        choice = roomy.chat("x", tools=[SQL], max_tokens=len(text[:-30]), **more).json()["choices"][0]
        assert choice["finish_reason"] == "length" and "tool_calls" not in choice["message"], choice
    roomy.script = Script([*b"12"])
    tool = with_format("regex", "[0-9]{4}")
    choice = roomy.chat("x", tools=[tool], max_tokens=2, tool_choice=NAMED).json()["choices"][0]
    assert choice["finish_reason"] == "length" and choice["message"]["content"] == "", choice


LARK = 'start: "SELECT " COLUMN\nCOLUMN: /[a-z]+/'


@pytest.mark.parametrize(("syntax", "definition"), [("lark", LARK), ("regex", "SELECT [a-z]+")])
def test_a_grammar_binds_the_input_of_a_named_tool(roomy, syntax, definition):
    roomy.script = script("SELECT a")
    r = roomy.chat("x", tools=[with_format(syntax, definition), WEATHER], tool_choice=NAMED)
    assert r.status_code == 200, r.text
    (call,) = r.json()["choices"][0]["message"]["tool_calls"]
    assert call["custom"] == {"name": "sql", "input": "SELECT a"} and r.json()["choices"][0]["finish_reason"] == "tool_calls"
    grammar = roomy.leader.requests[-1].grammar
    assert Bound.decode(grammar).text and accepts(grammar, "SELECT a") and not accepts(grammar, "DROP a")


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"tools": [with_format("lark", LARK)]}, "tools[0].custom.format"),
        (
            {"tools": [SQL | {"custom": {"name": "b"}}, with_format("lark", LARK)], "tool_choice": "required"},
            "tools[1].custom.format",
        ),
        ({"tools": [with_format("gbnf", "x")]}, "tools[0].custom.format.grammar.syntax"),
        ({"tools": [with_format("lark", "start: /(/")], "tool_choice": NAMED}, "tools[0].custom.format.grammar.definition"),
        ({"tools": [{"type": "custom", "custom": {"name": "sql", "format": {"type": "json"}}}]}, "tools[0].custom.format.type"),
        ({"tools": [SQL, SQL]}, "tools[1].custom.name"),
        ({"tools": [WEATHER], "tool_choice": NAMED}, "tool_choice.custom.name"),
    ],
)
def test_forms_that_are_not_supported_are_refused_by_name(roomy, body, param):
    r = roomy.chat("x", **body)
    assert r.status_code == 400 and r.json()["error"]["param"] == param, r.text


def test_custom_calls_in_history_are_shown_to_the_model(roomy):
    call = {"id": "call_1", "type": "custom", "custom": {"name": "sql", "input": TEXT}}
    messages = [*ASK, {"role": "assistant", "content": None, "tool_calls": [call]}]
    messages += [{"role": "tool", "tool_call_id": "call_1", "content": "3 rows"}]
    r = roomy.client.post("/v1/chat/completions", json={"messages": messages, "tools": [SQL]})
    assert r.status_code == 200, r.text
    assert CALL in prompt_of(roomy) and "3 rows" in prompt_of(roomy)
    messages[1]["tool_calls"] = [{"id": "call_1", "type": "custom", "function": {"name": "sql"}}]
    assert roomy.client.post("/v1/chat/completions", json={"messages": messages}).status_code == 400


ITEM = {"type": "custom", "name": "sql", "description": "Runs a query"}


def test_responses_hold_custom_calls_and_take_their_outputs(roomy, client):
    roomy.script = script(CALL)
    found = client.responses.create(model="fake", input="x", tools=[ITEM])
    (call,) = found.output
    assert call.type == "custom_tool_call" and call.name == "sql" and call.input == TEXT
    assert found.tools[0].type == "custom" and found.tools[0].format.type == "text"
    roomy.script = script("done")
    output = {"type": "custom_tool_call_output", "call_id": call.call_id, "output": "3 rows"}
    client.responses.create(model="fake", input=[output], previous_response_id=found.id, tools=[ITEM])
    assert CALL in prompt_of(roomy) and "3 rows" in prompt_of(roomy)
    given = [{"role": "user", "content": "x"}, call.model_dump(), output]
    client.responses.create(model="fake", input=given, tools=[ITEM])
    assert CALL in prompt_of(roomy) and "3 rows" in prompt_of(roomy)


def test_a_streamed_response_has_the_events_of_a_custom_call(roomy, client):
    roomy.script = script(CALL)
    events = list(client.responses.create(model="fake", input="x", tools=[ITEM], stream=True))
    kinds = [e.type for e in events]
    assert "response.custom_tool_call_input.delta" in kinds and kinds[-1] == "response.completed"
    done = next(e for e in events if e.type == "response.custom_tool_call_input.done")
    assert done.input == TEXT and events[-1].response.output[0].input == TEXT


def test_responses_bind_and_refuse_grammars_by_their_own_names(roomy, client):
    format = {"type": "grammar", "syntax": "lark", "definition": LARK}
    roomy.script = script("SELECT a")
    choice = {"type": "custom", "name": "sql"}
    found = client.responses.create(model="fake", input="x", tools=[{**ITEM, "format": format}], tool_choice=choice)
    assert found.output[0].input == "SELECT a" and found.tools[0].format.definition == LARK
    with pytest.raises(openai.BadRequestError) as e:
        client.responses.create(model="fake", input="x", tools=[{**ITEM, "format": format}])
    assert e.value.param == "tools[0].format"
