"""/v1/responses, with the `openai` client and by hand."""

import asyncio
import json
import threading
import time
from urllib.parse import unquote

import openai
import pytest

from slipstream.serve.openai.event_log import Watcher
from slipstream.serve.openai.response_store import RECORD_BYTES, ResponseStore
from tests.serve.fake import EOS, START, Script, wait_for
from tests.serve.test_chat import prompt_of
from tests.serve.test_tools import CALL, thinking  # noqa: F401

TOOL = {
    "type": "function",
    "name": "get_weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}


def script(text: str) -> Script:
    return Script([*text.encode(), EOS])


@pytest.fixture
def client(roomy):
    with openai.OpenAI(base_url=roomy.url + "/v1", api_key="none", max_retries=0) as c:
        yield c


def test_a_response_is_made_retrieved_and_deleted(client, roomy):
    r = client.responses.create(model="fake", input="hi", instructions="be brief", max_output_tokens=40, metadata={"a": "b"})
    assert r.output_text == "hello" and r.status == "completed" and r.metadata == {"a": "b"}
    assert r.usage.output_tokens == 6 and r.usage.total_tokens == r.usage.input_tokens + 6
    assert prompt_of(roomy).startswith("|system\nbe brief||user\nhi|")
    again = client.responses.retrieve(r.id)
    assert again.output_text == "hello" and again.id == r.id and again.usage == r.usage
    client.responses.delete(r.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(r.id)


def test_the_conversation_goes_on_from_a_stored_response(client, roomy):
    first = client.responses.create(model="fake", input="one", instructions="brief")
    second = client.responses.create(model="fake", input="two", previous_response_id=first.id)
    assert prompt_of(roomy) == "|user\none||assistant\nhello||user\ntwo||assistant\n"
    client.responses.create(model="fake", input="three", previous_response_id=second.id)
    assert prompt_of(roomy).startswith("|user\none||assistant\nhello||user\ntwo||assistant\nhello||user\nthree|")
    unstored = client.responses.create(model="fake", input="x", store=False)
    with pytest.raises(openai.NotFoundError) as e:
        client.responses.create(model="fake", input="x", previous_response_id=unstored.id)
    assert e.value.param == "previous_response_id"


def test_a_stream_has_openai_s_events_in_order(client, roomy):
    options: dict = {"stream_options": {"include_usage": True}}  # chat's; here the last event has the usage always
    events = list(client.responses.create(model="fake", input="hi", stream=True, **options))
    assert [e.sequence_number for e in events] == list(range(len(events)))
    kinds = [e.type for e in events if e.type != "response.output_text.delta"]
    assert kinds == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert "".join(e.delta for e in events if e.type == "response.output_text.delta") == "hello"
    assert events[-1].response.output_text == "hello" and events[-1].response.usage.output_tokens == 6
    assert client.responses.retrieve(events[0].response.id).output_text == "hello"
    with client.responses.stream(model="fake", input="hi") as stream:
        for _ in stream:
            pass
        assert stream.get_final_response().output_text == "hello"


def test_calls_and_their_results(client, roomy):
    roomy.script = script("Wait.\n" + CALL)
    r = client.responses.create(model="fake", input="weather?", tools=[TOOL])
    text, call = r.output
    assert text.type == "message" and call.type == "function_call" and json.loads(call.arguments) == {"city": "Paris"}
    roomy.script = script("rain")
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
    r2 = client.responses.create(model="fake", input=[output], previous_response_id=r.id, tools=[TOOL])
    assert r2.output_text == "rain" and CALL in prompt_of(roomy) and "<tool_response>\nrain" in prompt_of(roomy)
    items = [{"role": "user", "content": "weather?"}, *[o.model_dump() for o in r.output], output]
    client.responses.create(model="fake", input=items, tools=[TOOL])
    assert CALL in prompt_of(roomy)
    roomy.script = script(CALL)
    events = list(client.responses.create(model="fake", input="x", tools=[TOOL], stream=True))
    assert "".join(e.delta for e in events if e.type == "response.function_call_arguments.delta") == '{"city": "Paris"}'
    (done,) = [e for e in events if e.type == "response.function_call_arguments.done"]
    assert done.name == "get_weather" and events[-1].response.output[0].status == "completed"


def test_forced_calls_and_formats_are_bound(client, roomy):
    roomy.script = script('{"name": "get_weather", "arguments": {"city": "Rome"}}')
    r = client.responses.create(model="fake", input="x", tools=[TOOL], tool_choice={"type": "function", "name": "get_weather"})
    assert r.output[0].name == "get_weather" and roomy.leader.requests[-1].grammar
    allowed = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "get_weather"}]}
    roomy.script = script('[{"name": "get_weather", "arguments": {"city": "Rome"}}]')
    r = client.responses.create(model="fake", input="x", tools=[TOOL], tool_choice=allowed)
    assert r.output[0].name == "get_weather" and r.tool_choice.to_dict() == allowed
    roomy.script = script('{"a": 1}')
    format = {"type": "json_schema", "name": "x", "schema": {"type": "object", "properties": {"a": {"type": "integer"}}}}
    r = client.responses.create(model="fake", input="x", text={"format": format})
    assert r.output_text == '{"a": 1}' and roomy.leader.requests[-1].grammar


def test_parameters_beyond_openai_s_reach_the_engine(roomy):
    """As load generators send them."""
    own = {"ignore_eos": True, "stop": None, "stop_token_ids": [9], "min_tokens": 2, "logit_bias": {"5": 2}}
    r = roomy.client.post(
        "/v1/responses", json={"input": "x", "max_output_tokens": 5, "presence_penalty": 0.5, "frequency_penalty": 0.25, **own}
    )
    s = roomy.leader.requests[-1].sampling
    assert r.status_code == 200 and (s.stop_ids, s.min_tokens, s.logit_bias) == ((9,), 2, ((5, 2.0),))
    assert (s.presence_penalty, s.frequency_penalty) == (0.5, 0.25)
    r = roomy.client.post("/v1/responses", json={"input": "x", "stop": ["ll"]}).json()
    assert r["status"] == "completed" and r["output"][0]["content"][0]["text"] == "he"


def test_a_stop_string_may_name_a_special_token_where_an_answer_is_read_in_parts(roomy):
    roomy.script = Script([*b"ab", START, *b"cd", EOS])
    r = roomy.client.post("/v1/responses", json={"input": "x", "stop": ["<|start|>c"]}).json()
    assert r["output"][0]["content"][0]["text"] == "ab"
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 9, "stop_sequences": ["<|start|>"]}
    r = roomy.client.post("/v1/messages", json=body).json()
    assert r["content"][0]["text"] == "ab" and r["stop_sequence"] == "<|start|>"


def test_an_answer_that_was_cut_off_is_incomplete(client, roomy):
    r = client.responses.create(model="fake", input="x", max_output_tokens=3)
    assert r.status == "incomplete" and r.incomplete_details.reason == "max_output_tokens" and r.output_text == "hel"
    roomy.script = script('{"name": "get_weather", "arguments": {"city": "Rome"}}')
    r = client.responses.create(model="fake", input="x", tools=[TOOL], tool_choice="required", max_output_tokens=45)
    assert r.status == "incomplete" and r.output == []
    events = list(client.responses.create(model="fake", input="x", max_output_tokens=3, stream=True))
    assert events[-1].type == "response.incomplete"


def test_reasoning_is_an_item_of_its_own(thinking):  # noqa: F811
    thinking.script = script("<think>hm</think>hello")
    r = thinking.client.post("/v1/responses", json={"input": "x"}).json()
    assert [o["type"] for o in r["output"]] == ["reasoning", "message"] and r["output"][0]["content"][0]["text"] == "hm"
    assert r["usage"]["output_tokens_details"]["reasoning_tokens"] > 0


def test_a_failure_ends_a_stream_with_its_event(client, roomy):
    roomy.script = Script([*b"ab"], reason="error", error="the device is gone")
    roomy.leader.hold.set()  # a failure before the first event would be the answer's status
    stream = client.responses.create(model="fake", input="x", stream=True)
    roomy.leader.hold.clear()
    events = list(stream)
    assert events[-1].type == "response.failed" and "device" in events[-1].response.error.message
    with pytest.raises(openai.InternalServerError, match="device"):
        client.responses.create(model="fake", input="x")


def test_background_responses_are_retrieved_and_cancelled(client, roomy):
    r = client.responses.create(model="fake", input="x", background=True)
    assert r.status in ("in_progress", "completed")
    wait_for(lambda: client.responses.retrieve(r.id).status == "completed")
    assert client.responses.retrieve(r.id).output_text == "hello"
    roomy.script = Script([*b"abc"])  # goes on for ever
    r = client.responses.create(model="fake", input="x", background=True)
    assert client.responses.cancel(r.id).status == "cancelled"
    wait_for(lambda: roomy.leader.aborts and not roomy.front.open)
    with pytest.raises(openai.BadRequestError):
        done = client.responses.create(model="fake", input="x", max_output_tokens=2)
        client.responses.cancel(done.id)


@pytest.mark.parametrize(
    "change,param",
    [
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input[0].content[0]"),
        ({"input": [{"role": "wizard", "content": "x"}]}, "input[0].role"),
        ({"max_output_tokens": 100_000}, "max_output_tokens"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"text": {"format": {"type": "json_schema", "schema": {"type": "nonsense"}}}}, "text.format.schema"),
        ({"reasoning": {"effort": "high"}}, "reasoning.effort"),
        ({"truncation": "auto"}, "truncation"),
        ({"conversation": "x"}, "conversation"),
        ({"background": True, "store": False}, "background"),
        ({"max_tokens": 5}, "max_tokens"),
    ],
)
def test_bad_fields_are_named_as_the_client_knows_them(roomy, change, param):
    r = roomy.client.post("/v1/responses", json={"input": "x", **change})
    assert r.status_code == 400 and r.json()["error"]["param"].startswith(param), r.text
    assert not roomy.leader.requests


def test_a_background_response_is_watched_as_it_comes(client, roomy):
    roomy.leader.hold.set()
    stream = client.responses.create(model="fake", input="x", background=True, stream=True)
    created = next(stream)
    assert created.type == "response.created" and client.responses.retrieve(created.response.id).status == "in_progress"
    roomy.leader.hold.clear()
    events = [created, *stream]
    assert "".join(e.delta for e in events if e.type == "response.output_text.delta") == "hello"
    assert events[-1].type == "response.completed" and [e.sequence_number for e in events] == list(range(len(events)))
    assert client.responses.retrieve(created.response.id).output_text == "hello"


def test_a_background_response_goes_on_without_its_watcher(client, roomy):
    roomy.leader.hold.set()
    with client.responses.create(model="fake", input="x", background=True, stream=True) as stream:
        id = next(stream).response.id
    time.sleep(0.2)  # the connection's end arrives
    roomy.leader.hold.clear()
    wait_for(lambda: client.responses.retrieve(id).status == "completed")
    assert client.responses.retrieve(id).output_text == "hello"


def test_a_cancelled_background_response_ends_its_stream(client, roomy):
    roomy.script = Script([*b"abc"])  # goes on for ever
    stream = client.responses.create(model="fake", input="x", background=True, stream=True)
    client.responses.cancel(next(stream).response.id)
    assert {e.type for e in stream} <= {
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
    }


def resumed(roomy, id, **query) -> list[dict]:
    r = roomy.client.get(f"/v1/responses/{id}", params={"stream": "true", **query})
    assert r.status_code == 200 and r.headers["content-type"].startswith("text/event-stream"), r.text
    return [json.loads(line[6:]) for line in r.text.splitlines() if line.startswith("data: ")]


def test_the_stream_of_a_background_response_is_resumed_after_its_end(client, roomy):
    events = list(client.responses.create(model="fake", input="x", background=True, stream=True))
    id = events[0].response.id
    again = list(client.responses.retrieve(id, stream=True, starting_after=3))
    assert [e.model_dump() for e in again] == [e.model_dump() for e in events[4:]]
    wait_for(lambda: not roomy.front.event_logs)
    assert [e["sequence_number"] for e in resumed(roomy, id)] == list(range(len(events)))
    assert resumed(roomy, id, starting_after=len(events) - 1) == []
    client.responses.delete(id)
    assert roomy.client.get(f"/v1/responses/{id}", params={"stream": "true"}).status_code == 404


def test_the_stream_of_a_background_response_is_resumed_while_it_runs(client, roomy):
    roomy.leader.hold.set()
    with client.responses.create(model="fake", input="x", background=True, stream=True) as stream:
        first = next(stream)
    again = client.responses.retrieve(first.response.id, stream=True, starting_after=0)
    second = next(again)
    assert second.type == "response.in_progress" and second.sequence_number == 1
    roomy.leader.hold.clear()
    rest = list(again)
    assert "".join(e.delta for e in rest if e.type == "response.output_text.delta") == "hello"
    assert rest[-1].type == "response.completed"


def test_a_front_end_that_does_not_run_a_response_resumes_it_once_it_has_ended(client, roomy, monkeypatch):
    class Elsewhere(dict):
        """Logs that this front end does not see."""

        def get(self, key):
            return None

    monkeypatch.setattr(roomy.front, "event_logs", Elsewhere())
    roomy.leader.hold.set()
    with client.responses.create(model="fake", input="x", background=True, stream=True) as stream:
        id = next(stream).response.id
    threading.Timer(0.3, roomy.leader.hold.clear).start()
    assert resumed(roomy, id)[-1]["type"] == "response.completed"


def test_streams_that_cannot_be_resumed_are_refused_by_name(client, roomy, monkeypatch):
    def refusal(id, **query) -> str:
        r = roomy.client.get(f"/v1/responses/{id}", params=query)
        assert r.status_code == 400, r.text
        return r.json()["error"]["param"]

    whole = client.responses.create(model="fake", input="x", background=True).id
    assert refusal(whole, stream="true") == "stream"
    assert refusal(whole, starting_after=1) == "starting_after"
    assert refusal(client.responses.create(model="fake", input="x").id, stream="true") == "stream"
    streamed = next(iter(client.responses.create(model="fake", input="x", background=True, stream=True))).response.id
    assert refusal(streamed, stream="true", starting_after="-1") == "starting_after"
    monkeypatch.setattr("slipstream.serve.openai.event_log.RECORD_BYTES", 2000)
    events = list(client.responses.create(model="fake", input="x", background=True, stream=True))
    assert events[-1].type == "response.completed", "the first client has them all"
    assert refusal(events[0].response.id, stream="true") == "stream"


def test_a_watcher_that_does_not_keep_up_is_cut_off(monkeypatch):
    monkeypatch.setattr("slipstream.serve.openai.event_log.MAX_UNREAD_BYTES", 100)
    cut, sent = [], []

    async def run():
        blocked = asyncio.Event()

        async def send(message):
            sent.append(message)
            if message.get("body"):
                await blocked.wait()

        watcher = Watcher(lambda: (cut.append(True), blocked.set()))
        answer = asyncio.create_task(watcher({}, asyncio.Event().wait, send))  # type: ignore[arg-type]
        for _ in range(4):
            watcher.tell(b"x" * 30)
            await asyncio.sleep(0)
            assert not cut
        watcher.tell(b"x" * 30)
        await answer

    asyncio.run(run())
    assert cut and sum(len(m.get("body", b"")) for m in sent) <= 5 * 30


def test_input_tokens_are_those_of_the_prompt(client, roomy):
    more = {"instructions": "be brief", "tools": [TOOL]}
    count = client.responses.input_tokens.count(model="fake", input="hi", **more)
    assert not roomy.leader.requests and count.object == "response.input_tokens"
    r = client.responses.create(model="fake", input="hi", **more)
    assert count.input_tokens == r.usage.input_tokens
    longer = client.responses.input_tokens.count(model="fake", input="hi", previous_response_id=r.id, **more)
    assert longer.input_tokens > count.input_tokens
    r = roomy.client.post("/v1/responses/input_tokens", json={"max_output_tokens": 0})
    assert r.status_code == 400 and r.json()["error"]["param"] == "max_output_tokens"
    assert roomy.client.post("/v1/responses/input_tokens", json={}).json()["error"]["param"] == "input"


def test_input_items_are_listed_page_by_page(client, roomy):
    items = [{"role": "user", "content": f"part {i}"} for i in range(5)]
    id = client.responses.create(model="fake", input=items).id
    listed = [i.content[0].text for i in client.responses.input_items.list(id, order="asc", limit=2)]
    assert listed == [f"part {i}" for i in range(5)]
    page = client.responses.input_items.list(id, limit=2)
    assert [i.content[0].text for i in page.data] == ["part 4", "part 3"] and page.has_more
    text = client.responses.create(model="fake", input="hi").id
    (item,) = client.responses.input_items.list(text)
    assert (item.type, item.role, item.content[0].type, item.content[0].text) == ("message", "user", "input_text", "hi")
    for query in ("limit=0", "limit=x", "order=up", "after=item_0"):
        r = roomy.client.get(f"/v1/responses/{id}/input_items?{query}")
        assert r.status_code == 400 and r.json()["error"]["param"] == query.partition("=")[0]


def test_a_refusal_in_the_history_is_what_the_assistant_said(roomy):
    refusal = {"role": "assistant", "content": [{"type": "refusal", "refusal": "I will not"}]}
    user = {"role": "user", "content": "hi"}
    assert roomy.client.post("/v1/responses", json={"input": [user, refusal, user]}).status_code == 200
    expected = "|user\nhi||assistant\nI will not||user\nhi||assistant\n"
    assert prompt_of(roomy) == expected
    assert roomy.client.post("/v1/chat/completions", json={"messages": [user, refusal, user]}).status_code == 200
    assert prompt_of(roomy) == expected
    for part in ({"type": "refusal", "text": "x"}, {"type": "input_text", "refusal": "x"}):
        r = roomy.client.post("/v1/responses", json={"input": [{"role": "assistant", "content": [part]}, user]})
        assert r.status_code == 400 and r.json()["error"]["param"].startswith("input[0].content[0]"), r.text


def test_others_responses_push_a_background_response_out_and_do_not_end_it(roomy):
    roomy.script = Script([*b"abc"])  # goes on for ever
    id = roomy.client.post("/v1/responses", json={"input": "x", "background": True}).json()["id"]
    url, aborts = f"/v1/responses/{id}", len(roomy.leader.aborts)

    def push_out():
        for i in range(17):
            assert roomy.front.response_store.put(f"{i:024x}", bytes(RECORD_BYTES))

    roomy.call(push_out)
    wait_for(lambda: roomy.client.get(url).status_code == 200)
    assert roomy.client.get(url).json()["status"] == "in_progress" and len(roomy.leader.aborts) == aborts
    assert roomy.client.post(url + "/cancel").json()["status"] == "cancelled"
    wait_for(lambda: len(roomy.leader.aborts) > aborts)


def test_a_deleted_background_response_ends_and_stays_away(roomy):
    roomy.script = Script([*b"abc"])  # goes on for ever
    url = "/v1/responses/" + roomy.client.post("/v1/responses", json={"input": "x", "background": True}).json()["id"]
    aborts = len(roomy.leader.aborts)
    assert roomy.client.delete(url).status_code == 200
    wait_for(lambda: len(roomy.leader.aborts) > aborts and not roomy.front.open)
    assert roomy.client.get(url).status_code == 404


def test_a_response_that_is_too_large_to_be_stored_says_so(roomy, monkeypatch):
    for module in ("response_store", "responses", "background"):
        monkeypatch.setattr(f"slipstream.serve.openai.{module}.RECORD_BYTES", 3000)
    body = {"input": "x" * 2500}
    r = roomy.client.post("/v1/responses", json=body).json()
    assert r["status"] == "completed" and r["store"] is False
    assert roomy.client.get(f"/v1/responses/{r['id']}").status_code == 404
    r = roomy.client.post("/v1/responses", json={**body, "background": True}).json()
    url = f"/v1/responses/{r['id']}"
    wait_for(lambda: roomy.client.get(url).json()["status"] == "failed")
    assert "3000 bytes" in roomy.client.get(url).json()["error"]["message"]
    r = roomy.client.post("/v1/responses", json={"input": "x", "instructions": "y" * 3000, "background": True})
    assert r.status_code == 400 and r.json()["error"]["param"] == "background"
    assert roomy.client.post("/v1/responses", json={"input": "x"}).json()["store"] is True


@pytest.mark.parametrize(
    "metadata",
    [{str(i): "x" for i in range(17)}, {"k" * 65: "x"}, {"k": "v" * 513}, {"k": 1}],
    ids=["keys", "key", "value", "type"],
)
def test_metadata_has_openai_s_bounds(roomy, metadata):
    r = roomy.client.post("/v1/responses", json={"input": "x", "metadata": metadata})
    assert r.status_code == 400 and r.json()["error"]["param"].startswith("metadata"), r.text
    most = {f"{i:064d}": "v" * 512 for i in range(16)}
    assert roomy.client.post("/v1/responses", json={"input": "x", "metadata": most}).json()["metadata"] == most


@pytest.mark.parametrize("key", ["%00" * 24, "0" * 23 + "%00", "0" * 24, "z" * 24, "%C3%A9" * 12, "", "0" * 25])
def test_an_id_that_no_response_has_is_not_found(roomy, key):
    for method, path in (("GET", ""), ("DELETE", ""), ("POST", "/cancel")):
        r = roomy.client.request(method, f"/v1/responses/resp_{key}{path}")
        assert r.status_code == 404, r.text
    r = roomy.client.post("/v1/responses", json={"input": "x", "previous_response_id": "resp_" + unquote(key)})
    assert r.status_code == 404 and r.json()["error"]["param"] == "previous_response_id"


def test_a_store_is_bounded_expires_and_is_shared():
    a = ResponseStore()
    b = ResponseStore(a._fd)
    keys = [f"{i:024d}" for i in range(18)]
    assert a.put(keys[0], b"x" * 10) and b.get(keys[0]) == b"x" * 10
    assert not a.put(keys[1], bytes(RECORD_BYTES + 1))
    for i in range(1, 18):
        assert b.put(keys[i], bytes([i]) * (RECORD_BYTES - 5))
    assert a.get(keys[0]) is None and a.get(keys[1]) is None  # overwritten by what is newer
    assert a.state(keys[0]) == "lost" and a.state(keys[17]) == "kept"
    assert a.get(keys[17]) == bytes([17]) * (RECORD_BYTES - 5)  # across the ring's end
    b.mark(keys[17])
    a.put(keys[17], b"new")
    assert a.state(keys[17]) == "marked" and b.get(keys[17]) == b"new"
    assert a.remove(keys[17]) and b.get(keys[17]) is None and not b.remove(keys[17]) and b.state(keys[17]) == "removed"
    assert ResponseStore(a._fd, seconds=0.0).get(keys[16]) is None
