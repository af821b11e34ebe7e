"""What bad input gets: a status, the parameter's name, and nothing reaches the engine."""

import gzip
import json

import openai
import pytest
from msgspec import inspect

from slipstream.process.protocol import Refused
from slipstream.serve import openapi
from slipstream.serve.audio import routes as audio_routes
from slipstream.serve.embed import routes as embed_routes
from slipstream.serve.request_body import MAX_ITEMS, MAX_LISTS
from tests.serve.fake import EOS, Script

CHAT = {"messages": [{"role": "user", "content": "x"}]}
TEXT = {"prompt": "x"}

BAD = [
    (CHAT, {"temperature": -1}, "temperature"),
    (CHAT, {"temperature": 2.1}, "temperature"),
    (CHAT, {"temperature": "hot"}, "temperature"),
    (CHAT, {"temperature": True}, "temperature"),
    (CHAT, {"max_tokens": 0}, "max_tokens"),
    (CHAT, {"max_tokens": 1000}, "max_tokens"),
    (CHAT, {"max_completion_tokens": 1000}, "max_completion_tokens"),
    (CHAT, {"max_tokens": 2.5}, "max_tokens"),
    (CHAT, {"messages": []}, "messages"),
    (CHAT, {"messages": None}, "messages"),
    (CHAT, {"messages": "x"}, "messages"),
    (CHAT, {"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role"),
    (CHAT, {"messages": [{"content": "x"}]}, "messages[0].role"),
    (CHAT, {"messages": [{"role": "user"}]}, "messages[0].content"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url", "text": "x"}]}]}, "messages[0].content[0].type"),
    (CHAT, {"messages": [{"role": "user", "content": "x", "nope": 1}]}, "messages[0].nope"),
    (CHAT, {"messages": [{"role": "user", "content": "x" * 600}]}, "messages"),
    (CHAT, {"top_p": 0}, "top_p"),
    (CHAT, {"top_p": 1.1}, "top_p"),
    (CHAT, {"top_k": -2}, "top_k"),
    (CHAT, {"min_p": 2}, "min_p"),
    (CHAT, {"n": 0}, "n"),
    (CHAT, {"n": 1000}, "n"),
    (TEXT, {"best_of": 2}, "best_of"),
    (CHAT, {"logprobs": True, "top_logprobs": 99}, "top_logprobs"),
    (CHAT, {"top_logprobs": 3}, "top_logprobs"),
    (CHAT, {"logprobs": 3}, "logprobs"),
    (CHAT, {"stop": [""]}, "stop"),
    (CHAT, {"stop": ""}, "stop"),
    (CHAT, {"stop": ["x"] * 17}, "stop"),
    (CHAT, {"stop_token_ids": [10**6]}, "stop_token_ids"),
    (CHAT, {"presence_penalty": 3}, "presence_penalty"),
    (CHAT, {"frequency_penalty": -3}, "frequency_penalty"),
    (CHAT, {"repetition_penalty": 0}, "repetition_penalty"),
    (CHAT, {"logit_bias": {"x": 1}}, "logit_bias"),
    (CHAT, {"logit_bias": {"1": 101}}, "logit_bias"),
    (CHAT, {"logit_bias": {"99999": 1}}, "logit_bias"),
    (CHAT, {"bad_words": [""]}, "bad_words"),
    (CHAT, {"min_tokens": -1}, "min_tokens"),
    (CHAT, {"min_tokens": 5, "max_tokens": 4}, "min_tokens"),
    (CHAT, {"min_tokens": 600}, "min_tokens"),
    (CHAT, {"seed": 2**64}, "seed"),
    (CHAT, {"stream_options": {"include_usage": True}}, "stream_options"),
    (CHAT, {"stream": True, "stream_options": {"nope": 1}}, "stream_options.nope"),
    (CHAT, {"stream": True, "prompt_logprobs": 1}, "prompt_logprobs"),
    (CHAT, {"no_such_parameter": 1}, "no_such_parameter"),
    (CHAT, {"prompt": "x"}, "prompt"),
    (CHAT, {"continue_final_message": True}, "continue_final_message"),
    (CHAT, {"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
    (CHAT, {"response_format": {"type": "nonsense"}}, "response_format"),
    (CHAT, {"tools": [{"type": "function"}]}, "tools"),
    (CHAT, {"tool_choice": "required"}, "tool_choice"),
    (CHAT, {"modalities": ["audio"]}, "modalities"),
    (CHAT, {"functions": [{"name": "f"}]}, "functions"),
    (CHAT, {"web_search_options": {}}, "web_search_options"),
    (CHAT, {"verbosity": "loud"}, "verbosity"),
    (CHAT, {"messages": [{"role": "user", "content": [{"text": "x"}]}]}, "messages[0].content[0].type"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "refusal", "text": "x"}]}]}, "messages[0].content[0]"),
    (CHAT, {"tools": [{"function": {"name": "f"}}]}, "tools[0].type"),
    (TEXT, {"prompt": ""}, "prompt"),
    (TEXT, {"prompt": []}, "prompt"),
    (TEXT, {"prompt": [[]]}, "prompt"),
    (TEXT, {"prompt": ["x", ""]}, "prompt"),
    (TEXT, {"prompt": ["x", 1]}, "prompt"),
    (TEXT, {"prompt": [10**7]}, "prompt"),
    (TEXT, {"prompt": [-1]}, "prompt"),
    (TEXT, {"prompt": [100] * 100_000}, "prompt"),
    (TEXT, {"prompt": "x" * 1_000_000}, "prompt"),
    (TEXT, {"prompt": None}, "prompt"),
    (TEXT, {"prompt": {"a": 1}}, "prompt"),
    (TEXT, {"max_tokens": 0}, "max_tokens"),
    (TEXT, {"logprobs": 21}, "logprobs"),
    (TEXT, {"prompt": ["x"] * 1000, "n": 100}, "n"),
    (TEXT, {"cache_salt": ""}, "cache_salt"),
]


@pytest.mark.parametrize("base,change,param", BAD, ids=[f"{i}-{p}" for i, (_, _, p) in enumerate(BAD)])
def test_ff80_a_bad_parameter_is_named_and_changes_nothing(front, base, change, param):
    path = "/v1/chat/completions" if base is CHAT else "/v1/completions"
    r = front.client.post(path, json={**base, **change})
    error = r.json()["error"]
    assert r.status_code == 400 and error["type"] == "invalid_request_error" and error["message"]
    assert error["param"].startswith(param), error
    assert not front.leader.requests and front.front.engine.live == 0


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"temperature": 5}, "temperature: must be at most 2.0, not 5"),
        ({"n": 0}, "n: must be at least 1, not 0"),
        ({"top_k": 1.5}, "top_k: must be an integer or null, not a number"),
        ({"stop": ["a", 3]}, "stop[1]: must be a string, not an integer"),
        ({"stop": ""}, "stop: must have at least 1 character"),
        ({"logit_bias": {"5": 200}}, "logit_bias: must be at most 100.0"),
        ({"prompt": [1, -2]}, "prompt[1]: must be at least 0, not -2"),
        ({"logit_bias": {"9999999": 1}}, "logit_bias: keys must be token ids from 0 to "),
        ({"max_tokens": 3, "min_tokens": 4}, "min_tokens: must be at most max_tokens, 3, not 4"),
        ({"best_of": 3, "n": 2}, "best_of: must equal n, which is 2, not 3"),
    ],
)
def test_a_refusal_says_which_value_was_wrong_and_what_would_be_right(front, fields, message):
    r = front.client.post("/v1/completions", json={"prompt": "x", **fields})
    assert r.status_code == 400 and r.json()["error"]["message"].startswith(message)


@pytest.mark.parametrize("text,param", [("NaN", "temperature"), ("Infinity", "temperature"), ("1e999", "temperature")])
def test_a_temperature_that_is_no_number_is_named(front, text, param):
    raw = b'{"prompt": "x", "temperature": %s}' % text.encode()
    r = front.client.post("/v1/completions", content=raw, headers={"content-type": "application/json"})
    assert r.status_code == 400 and r.json()["error"]["param"] == param


@pytest.mark.parametrize(
    "raw", [b'{"model": ', b"", b"[]", b"null", b"\xff\xfe", b'{"prompt": "\\ud800"}', b"[" * 100_000, b'{"prompt": "a"} x']
)
def test_malformed_json_is_refused(front, raw):
    r = front.client.post("/v1/completions", content=raw, headers={"content-type": "application/json"})
    assert r.status_code == 400 and r.json()["error"]["message"] and not front.leader.requests


def test_unknown_models_paths_methods_and_types(front):
    assert front.complete(model="nope").status_code == 404
    assert front.complete(model="nope").json()["error"]["param"] == "model"
    assert front.complete(model="fake").status_code == 200
    for method, path, status in (("GET", "/nope", 404), ("GET", "/v1/completions", 405), ("DELETE", "/v1/models", 405)):
        r = front.client.request(method, path)
        assert r.status_code == status and r.json()["error"]["message"]
    r = front.client.post("/v1/completions", content=b'{"prompt": "x"}', headers={"content-type": "text/plain"})
    assert r.status_code == 415
    assert front.client.post("/v1/completions", content=b"prompt=x").status_code == 415


@pytest.mark.parametrize("item", ["[]", "{}", "1"])
def test_a_body_of_very_many_pieces_is_refused_before_it_is_taken_apart(front, item):
    """Taking apart 10 million lists held the loop, and with it every stream, for five seconds."""
    many = MAX_ITEMS if item == "1" else MAX_LISTS
    body = '{"prompt": [' + ",".join([item] * (many + 2)) + "]}"
    r = front.client.post("/v1/completions", content=body, headers={"content-type": "application/json"})
    assert r.status_code == 413 and "send fewer" in r.json()["error"]["message"]
    text = "[1, 2], " * (MAX_LISTS // 4)
    assert front.complete(prompt=text).json()["error"]["param"] == "prompt", "a long text goes the usual way"


def test_an_encoded_body_is_refused_as_such(front):
    head = {"content-type": "application/json", "content-encoding": "gzip"}
    r = front.client.post("/v1/completions", content=gzip.compress(b'{"prompt": "x"}'), headers=head)
    assert r.status_code == 415 and "gzip" in r.json()["error"]["message"] and r.headers["accept-encoding"] == "identity"
    head["content-encoding"] = "identity"
    assert front.client.post("/v1/completions", content=b'{"prompt": "x"}', headers=head).status_code == 200


def test_nowhere_in_a_body_may_the_type_of_a_struct_be_left_out():
    """msgspec takes a struct without its tag where no other could stand; there the type must be a required field."""
    seen, alone = set(), []

    def walk(info, where, in_union=False):
        if isinstance(info, inspect.StructType):
            if info.tag is not None and not in_union:
                alone.append(where)
            if info.cls not in seen:
                seen.add(info.cls)
                for field in info.fields:
                    walk(field.type, f"{where}.{field.name}")
        elif isinstance(info, inspect.UnionType):
            several = sum(isinstance(t, inspect.StructType) for t in info.types) > 1
            for t in info.types:
                walk(t, where, several)
        elif isinstance(info, inspect.Metadata):
            walk(info.type, where, in_union)
        elif isinstance(info, inspect.CollectionType):
            walk(info.item_type, where + "[]")

    more = (*audio_routes.documented().values(), *embed_routes.documented().values())
    for operation in (*openapi.OPERATIONS.values(), *more):
        if operation.body is not None:
            walk(inspect.type_info(operation.body), operation.body.__name__)
    assert len(seen) > 30 and not alone


def test_what_is_not_built_is_refused_once(front):
    """OpenAI's client tries a 501 three times unless it is told not to."""
    r = front.client.post("/v1/files", json={})
    assert r.status_code == 501 and r.headers["x-should-retry"] == "false"
    before = front.front.engine.live
    with openai.OpenAI(base_url=front.url + "/v1", api_key="none", max_retries=2) as client:
        tries, send = [], client._client.send
        client._client.send = lambda *a, **k: tries.append(a) or send(*a, **k)  # type: ignore[method-assign]
        with pytest.raises(openai.InternalServerError):
            client.moderations.create(model="fake", input="x")
    assert len(tries) == 1 and front.front.engine.live == before


def test_compacting_a_conversation_is_a_client_s_error_that_is_not_tried_again(front):
    with openai.OpenAI(base_url=front.url + "/v1", api_key="none", max_retries=2) as client:
        tries, send = [], client._client.send
        client._client.send = lambda *a, **k: tries.append(a) or send(*a, **k)  # type: ignore[method-assign]
        with pytest.raises(openai.BadRequestError, match="send only the items to keep"):
            client.post("/responses/compact", body={"model": "fake", "input": "x"}, cast_to=object)
    assert len(tries) == 1


def test_a_body_over_the_limit_is_refused_with_and_without_a_length(front):
    head = {"content-type": "application/json"}
    big = b" " * (33 << 20)
    try:
        assert front.client.post("/v1/completions", content=big, headers=head).status_code == 413
    except Exception as e:  # the answer may be cut when the client is still sending
        assert "Write" in type(e).__name__ or "Read" in type(e).__name__ or "Remote" in type(e).__name__

    def parts():
        for _ in range(33):
            yield b" " * (1 << 20)

    try:
        assert front.client.post("/v1/completions", content=parts(), headers=head).status_code == 413
    except Exception as e:
        assert "Write" in type(e).__name__ or "Read" in type(e).__name__ or "Remote" in type(e).__name__
    assert front.complete().status_code == 200


def test_an_engine_s_refusal_becomes_its_status_and_ends_the_other_choices(front):
    front.script = Script([], refuse=Refused(0, 429, "the queue is full"), start=False)
    for stream in (False, True):
        r = front.complete(stream=stream)
        assert r.status_code == 429 and r.json()["error"]["type"] == "rate_limit_error" and r.headers["retry-after"]
    front.script = lambda r: Script([*b"x"], refuse=Refused(0, 400, "never fits", "prompt") if r.sampling.choice else None)
    r = front.complete(n=2)
    assert r.status_code == 400 and r.json()["error"]["param"] == "prompt" and front.front.engine.live == 0


def test_more_choices_than_may_wait_are_the_caller_s_mistake(front, monkeypatch):
    monkeypatch.setattr(front.front.engine_config, "max_queue", 4)
    for stream in (False, True):
        error = (r := front.complete(n=5, stream=stream)).json()["error"]
        assert r.status_code == 400 and error["param"] == "n" and "4 (--max-queue) can wait" in error["message"]
    r = front.client.post("/v1/completions", json={"prompt": ["x"] * 5, "max_tokens": 1})
    assert r.status_code == 400 and r.json()["error"]["param"] == "prompt" and front.front.engine.live == 0
    front.script = Script([*b"hello", EOS])
    assert front.complete(n=4).status_code == 200


def test_an_engine_s_error_is_a_500_with_its_reason(front):
    front.script = Script([*b"x"], reason="error", error="component `codec` refused the row")
    r = front.complete()
    assert r.status_code == 500 and "codec" in r.json()["error"]["message"]
    front.script = Script([*b"hello", EOS])
    assert front.complete().status_code == 200


def test_errors_do_not_repeat_the_prompt(front):
    secret = "correct horse battery staple"
    for r in (front.complete(prompt=secret, temperature=9), front.chat(secret, role=secret[:0], top_k="x")):
        assert r.status_code == 400 and "horse" not in r.text
    r = front.client.post(
        "/v1/completions", content=json.dumps({"prompt": secret}).encode()[:-1], headers={"content-type": "application/json"}
    )
    assert r.status_code == 400 and "horse" not in r.text
