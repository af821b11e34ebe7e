"""Bound answers of real servers: two ranks with a model of random weights, both kinds of scheduling."""

import concurrent.futures
import json

import pytest

from tests.helpers.server import Server

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "minimum": 0, "maximum": 150}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
ASYNC = "async"


def bound(schema: object) -> dict:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}


BODIES: list[dict] = [
    {"response_format": bound(SCHEMA), "temperature": 1.2, "seed": 1, "max_tokens": 60},
    {"response_format": bound(SCHEMA), "temperature": 1.0, "seed": 2, "max_tokens": 60, "top_p": 0.9, "logprobs": 2, "n": 2},
    {"structured_outputs": {"regex": "[a-f]{4,12}"}, "seed": 3, "frequency_penalty": 1.0, "logit_bias": {"97": 5}},
    {"structured_outputs": {"choice": ["yes", "no", "perhaps"]}, "seed": 4, "min_tokens": 20, "max_tokens": 30},
    {"structured_outputs": {"regex": "[0-9]+"}, "seed": 5, "stop": ["7"], "max_tokens": 40},
    {"structured_outputs": {"regex": "[xyz]{3,6}"}, "seed": 6, "ignore_eos": True, "max_tokens": 40},
    {"temperature": 0, "max_tokens": 24, "ignore_eos": True},
]


def ask(server: Server, body: dict) -> dict:
    answer = server.post("/v1/completions", {"prompt": "Describe a person:", **body})
    assert answer.status == 200, answer.body
    return answer.body


def steps(server: Server) -> dict[str, float]:
    lines = server.get("/metrics").body.splitlines()
    found = [line.rsplit(" ", 1) for line in lines if line.startswith("slipstream:steps_total{")]
    return {line.split('order="')[1].split('"')[0]: float(value) for line, value in found}


@pytest.fixture(scope="module")
def answers():
    """Answers by scheduling, all asked at once; and what each server counted and said to bad requests meanwhile."""
    out = {}
    for scheduling in ("serial", ASYNC):
        flags = ("--load-format", "dummy", "--dtype", "float32", "-tp", "2", "--scheduling", scheduling, "--max-num-seqs", "8")
        flags += ("--device", "cpu")
        with Server(*flags) as server, concurrent.futures.ThreadPoolExecutor(len(BODIES) + 1) as pool:
            bad = pool.submit(server.post, "/v1/completions", {"prompt": "x", "response_format": bound({"type": "nonsense"})})
            found = list(pool.map(lambda body: ask(server, body), BODIES))
            out[scheduling] = (found, steps(server), bad.result())
    return out


def choices(body: dict) -> list[tuple]:
    return [(c["text"], c["finish_reason"], (c["logprobs"] or {}).get("tokens")) for c in body["choices"]]


def logprobs(body: dict) -> list[float]:
    return [x for c in body["choices"] if c["logprobs"] for x in c["logprobs"]["token_logprobs"]]


def test_both_kinds_of_scheduling_give_the_same_answers(answers):
    for serial, asynchronous in zip(answers["serial"][0], answers[ASYNC][0], strict=True):
        assert choices(serial) == choices(asynchronous)
        # which rows share a step differs, and with it the order in which a product is summed
        assert logprobs(serial) == pytest.approx(logprobs(asynchronous), abs=1e-4)


def test_late_sampling_is_counted_when_asynchronous(answers):
    assert answers[ASYNC][1]["late_sample"] > 0
    assert answers["serial"][1].get("late_sample", 0) == 0


def test_answers_follow_their_grammars(answers):
    found = answers[ASYNC][0]
    for text, reason, _ in [*choices(found[0]), *choices(found[1])]:
        assert reason in ("stop", "length")
        if reason == "stop":
            assert set(json.loads(text)) == {"name", "age"}
    ((letters, reason, _),) = choices(found[2])
    assert set(letters) <= set("abcdef") and (reason == "length" or 4 <= len(letters) <= 12)
    assert choices(found[3])[0][:2] in [(c, "stop") for c in ("yes", "no", "perhaps")]
    assert set(choices(found[4])[0][0]) <= set("0123456789")
    held, reason, _ = choices(found[5])[0]
    assert (len(held), reason) == (6, "stop") and set(held) <= set("xyz")


def test_a_bad_schema_is_refused_beside_them(answers):
    for scheduling in ("serial", ASYNC):
        refused = answers[scheduling][2]
        assert refused.status == 400 and refused.body["error"]["param"] == "response_format.json_schema.schema"
