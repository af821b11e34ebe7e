"""Structured output at the front end: which fields make which grammar, what is refused, and that a bad one hurts nobody."""

import asyncio
import concurrent.futures
import json
import os
import signal
import threading

import pytest

from slipstream.errors import BadRequest, EngineDown
from slipstream.grammar.matcher import Bound, Maker, Vocabulary
from slipstream.serve.text import grammar_check
from slipstream.serve.text.structured import Structure, of_choice
from slipstream.system.limited_process import LimitedProcess
from tests.serve.fake import EOS, FakeTokenizer, Script

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
OPEN = {k: v for k, v in SCHEMA.items() if k != "additionalProperties"}
TOKENIZER = FakeTokenizer()
MAKE = Maker(Vocabulary.of(TOKENIZER))


def response_format(schema: object, **more) -> dict:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, **more}}}


def outputs(**fields) -> dict:
    return {"structured_outputs": fields}


def accepts(grammar: bytes, answer: str) -> bool:
    """Whether the answer, byte by byte, is one that the request's grammar describes."""
    matcher = MAKE(grammar)
    bit = lambda id: bool(int(matcher.mask()[id // 32]) >> id % 32 & 1)
    for byte in answer.encode():
        if not bit(byte):
            return False
        matcher.accept(byte)
    return bit(EOS)


@pytest.mark.parametrize(
    "body, good, bad",
    [
        ({"response_format": {"type": "json_object"}}, '{"b": [1, null]}', "[1]"),
        (response_format(SCHEMA), '{"a": 1}', '{"a": "x"}'),
        (response_format(SCHEMA, strict=True), '{"a":1}', "{}"),
        (response_format({**SCHEMA, "propertyNames": {"pattern": "^a"}}, strict=False), '{"a": 1}', "{}"),
        (outputs(json=SCHEMA), '{"a": 1}', '{"a": "x"}'),
        (outputs(json=json.dumps(SCHEMA)), '{"a": 1}', "{}"),
        (outputs(json=SCHEMA, disable_any_whitespace=True), '{"a":1}', '{"a": 1}'),
        (outputs(json=SCHEMA, whitespace_pattern="\\t"), '{"a":\t1}', '{"a": 1}'),
        (outputs(json_object=True), "{}", "1"),
        (outputs(json=OPEN), '{"a": 1}', '{"a": 1, "b": 1}'),
        (outputs(json=OPEN, disable_additional_properties=False), '{"a": 1, "b": 1}', "{}"),
        (response_format({**SCHEMA, "additionalProperties": True}), '{"a": 1, "b": 1}', "{}"),
        (outputs(regex="[0-9]{3}"), "123", "12"),
        ({"regex": "[0-9]{3}"}, "123", "12"),
        (outputs(choice=["yes", "no"]), "no", "maybe"),
        (outputs(grammar='start: "a" | "b"'), "b", "c"),
        (outputs(grammar='root ::= "a" | "b"'), "b", "c"),
        (outputs(grammar='start[capture]: "a ::= b"'), "a ::= b", "c"),
    ],
)
@pytest.mark.parametrize("route", ["chat", "complete"])
def test_fields_become_the_grammar_of_the_request(front, route, body, good, bad):
    answer = getattr(front, route)(**body)
    assert answer.status_code == 200, answer.text
    grammar = front.leader.requests[-1].grammar
    assert accepts(grammar, good) and not accepts(grammar, bad)


def test_a_refused_one_of_says_what_a_client_can_do(front):
    overlapping = {"oneOf": [{"type": "integer"}, {"type": "integer", "minimum": 3}]}
    said = front.chat(**response_format(overlapping)).json()["error"]["message"]
    assert "anyOf" in said and "strict: false" in said and "coerce" not in said
    assert front.chat(**response_format(overlapping, strict=False)).status_code == 200


def test_text_and_no_format_bind_nothing(front):
    assert front.chat(response_format={"type": "text"}).status_code == 200
    assert front.chat().status_code == 200
    assert all(r.grammar == b"" for r in front.leader.requests)


@pytest.mark.parametrize(
    "body, param",
    [
        (response_format({"type": "nonsense"}), "response_format.json_schema.schema"),
        (response_format({"type": "array", "uniqueItems": True}), "response_format.json_schema.schema"),
        (response_format([1]), "response_format.json_schema.schema"),
        (response_format(SCHEMA, surprise=1), "response_format.json_schema.surprise"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, "response_format.json_schema.schema"),
        ({"response_format": {"type": "json_object", "json_schema": {"schema": SCHEMA}}}, "response_format.json_schema"),
        ({"response_format": {"type": "structural_tag"}}, "response_format.type"),
        ({"response_format": {}}, "response_format.type"),
        (outputs(), "structured_outputs"),
        (outputs(regex="a", choice=["b"]), "structured_outputs"),
        (outputs(regex="("), "structured_outputs.regex"),
        (outputs(regex="a(?=b)"), "structured_outputs.regex"),
        (outputs(choice=[]), "structured_outputs.choice"),
        (outputs(choice=[1]), "structured_outputs.choice[0]"),
        (outputs(grammar="start: missing"), "structured_outputs.grammar"),
        (outputs(grammar="root ::= ("), "structured_outputs.grammar"),
        (outputs(json="{"), "structured_outputs.json"),
        (outputs(json="[]"), "structured_outputs.json"),
        (outputs(json={"enum": ["x" * 200_000]}), "structured_outputs.json"),
        (outputs(structural_tag="x"), "structured_outputs.structural_tag"),
        (outputs(json_object=False), "structured_outputs"),
        ({"guided_json": SCHEMA}, "guided_json"),
        ({**outputs(regex="a"), **response_format(SCHEMA)}, "structured_outputs"),
        ({**outputs(regex="a"), "regex": "a"}, "regex"),
        ({"regex": "a", **response_format(SCHEMA)}, "regex"),
        ({"regex": "("}, "regex"),
        (outputs(json='{"const": NaN}'), "structured_outputs.json"),
    ],
)
def test_what_cannot_be_used_is_a_400_that_names_the_field(front, body, param):
    answer = front.chat(**body)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param), error
    assert not front.leader.requests


def test_deep_nesting_is_refused(front):
    for depth in (400, 700, 950):
        schema = '{"type": "array", "items": ' * depth + "{}" + "}" * depth
        body = f'{{"messages": [{{"role": "user", "content": "x"}}], "structured_outputs": {{"json": {schema}}}}}'
        answer = front.client.post("/v1/chat/completions", content=body, headers={"content-type": "application/json"})
        assert answer.status_code == 400 and "deep" in answer.json()["error"]["message"].lower(), answer.text


def test_the_grammar_decides_where_an_answer_may_end(front):
    """min_tokens and ignore_eos hold ends back inside the grammar; the sampler must not forbid the only token that is left."""
    assert front.complete(**outputs(choice=["ab"]), min_tokens=5, ignore_eos=True, stop_token_ids=[65]).status_code == 200
    request = front.leader.requests[-1]
    assert request.sampling.min_tokens == 0 and set(request.sampling.stop_ids) == {EOS, 65}
    bound = Bound.decode(request.grammar)
    assert (bound.min_tokens, bound.ignore_end, bound.stop_ids) == (5, True, (65,))


def test_choices_of_one_request_share_a_grammar(front):
    assert front.complete(n=3, **outputs(choice=["yes", "no"])).status_code == 200
    assert len(front.leader.requests) == 3 and len({r.grammar for r in front.leader.requests}) == 1


def test_a_dead_end_is_the_answers_error(front):
    front.script = Script([*b"ab"], reason="error", error="the grammar allows no token here")
    answer = front.chat(**outputs(regex="abc"))
    assert answer.status_code == 500 and "grammar" in answer.json()["error"]["message"]


# --- an expensive grammar


@pytest.fixture
def check():
    made = grammar_check.GrammarCheck(TOKENIZER)
    yield made
    made.close()


def run(coroutine):
    return asyncio.run(coroutine)


def test_a_grammar_that_takes_too_long_is_refused_and_the_next_one_is_not(check, monkeypatch):
    """The limit is the kernel's: it ends the process wherever it is, and another takes its place."""
    big = Structure(of_choice([f"value {i} {i * 7919}" for i in range(6000)], "x"), "structured_outputs.choice")
    monkeypatch.setattr(grammar_check, "SECONDS", 0.002)
    with pytest.raises(BadRequest, match="did not compile within") as refused:
        run(check.check(big))
    assert refused.value.param == "structured_outputs.choice"
    monkeypatch.setattr(grammar_check, "SECONDS", 20.0)
    check._setup = b""
    run(check.check(big._replace(text=of_choice(["yes"], "x"))))


@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL])
def test_a_grammar_is_not_blamed_for_a_worker_that_was_stopped(check, monkeypatch, number):
    """Nobody knows whether the grammar is good: 503, and the next who asks hears the truth."""
    from slipstream.serve.text.structured import Structure, of_choice

    run(check.check(Structure(of_choice(["warm"], "x"), "x")))
    ask = LimitedProcess.ask

    def struck(self, *request):
        monkeypatch.setattr(LimitedProcess, "ask", ask)
        self._patience = 1.0
        os.kill(self.pid, number)
        return ask(self, *request)

    monkeypatch.setattr(LimitedProcess, "ask", struck)
    good = Structure(of_choice(["yes", "no"], "x"), "x")
    with pytest.raises(EngineDown, match="was lost: it (did not answer|was ended)"):
        run(check.check(good))
    run(check.check(good))


def test_others_are_served_while_a_grammar_is_tried(own_front, monkeypatch):
    front = own_front()
    entered, go_on = threading.Event(), threading.Event()
    ask = grammar_check.GrammarCheck._ask

    async def held(self, text):
        entered.set()
        assert await asyncio.to_thread(go_on.wait, 20)
        return await ask(self, text)

    monkeypatch.setattr(grammar_check.GrammarCheck, "_ask", held)
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        slow = [pool.submit(front.chat, **outputs(choice=["yes"])) for _ in range(3)]
        assert entered.wait(20)
        assert front.chat().status_code == 200
        assert not any(s.done() for s in slow)
        go_on.set()
        assert [s.result().status_code for s in slow] == [200] * 3


def test_a_grammar_is_tried_once(front, monkeypatch):
    asked = []
    ask = grammar_check.GrammarCheck._ask
    monkeypatch.setattr(grammar_check.GrammarCheck, "_ask", lambda self, text: asked.append(text) or ask(self, text))
    for _ in range(3):
        assert front.chat(**outputs(regex="only here [0-9]")).status_code == 200
        assert front.chat(**outputs(regex="only here (")).status_code == 400
    assert len(asked) == 2


def test_a_model_without_an_end_token_says_so(own_front):
    front = own_front()
    front.tokenizer.eos_ids = ()
    answer = front.chat(**outputs(choice=["yes"]))
    assert answer.status_code == 400 and "no end token" in answer.json()["error"]["message"]
