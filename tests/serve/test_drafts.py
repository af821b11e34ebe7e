"""Drafts as clients see them: predicted outputs, counts in usage and metrics, requests with fewer, and what is refused."""

import pytest

from tests.helpers.checkpoints import tiny_llama
from tests.helpers.server import Server

FLAGS = ("--device", "cpu", "--dtype", "float32", "--max-num-seqs", "4", "--max-model-len", "256")
VOCABULARY = 267  # the tokens that have a text


@pytest.fixture(scope="module")
def server():
    with Server(*FLAGS, "--speculative-tokens", "4", model=str(tiny_llama(vocab_size=VOCABULARY))) as server:
        yield server


def ask(server: Server, **more) -> dict:
    body = {"messages": [{"role": "user", "content": "copy"}], "temperature": 0, "max_tokens": 48, "logit_bias": BIAS, **more}
    answer = server.post("/v1/chat/completions", {"ignore_eos": True, "seed": 1, "return_token_ids": True, **body})
    assert answer.status == 200, answer
    return answer.body


BIAS = {str(i): -100 for i in [*range(3), *range(130, VOCABULARY)]}  # leaves ASCII, so that a text has the same tokens again


def test_a_prediction_gives_the_same_answer_in_fewer_steps_and_is_counted(server):
    plain = ask(server, speculative_tokens=0)
    assert "completion_tokens_details" not in plain["usage"]
    text = plain["choices"][0]["message"]["content"]
    before = server.metric("slipstream:spec_decode_num_accepted_tokens_total")
    predicted = ask(server, prediction={"type": "content", "content": text})
    assert predicted["choices"][0]["message"] == plain["choices"][0]["message"]
    details = predicted["usage"]["completion_tokens_details"]
    assert details["accepted_prediction_tokens"] >= 20, details
    assert predicted["usage"]["completion_tokens"] == plain["usage"]["completion_tokens"]
    accepted = server.until(
        lambda: server.metric("slipstream:spec_decode_num_accepted_tokens_total") - before, "the count of drafts"
    )
    assert accepted == details["accepted_prediction_tokens"]
    drafts = server.metric("slipstream:spec_decode_num_draft_tokens_total")
    assert drafts >= accepted and server.metric("slipstream:spec_decode_num_drafts_total") <= drafts
    assert "spec_decode_num_accepted_tokens_per_pos_total" in server.get("/metrics").body


def test_a_wrong_prediction_changes_nothing_and_is_counted_as_rejected(server):
    parts = [{"type": "text", "text": "zzzz"}, {"type": "text", "text": "yyyyyyyy"}]
    usage = ask(server, prediction={"type": "content", "content": parts})["usage"]
    assert usage["completion_tokens_details"]["rejected_prediction_tokens"] >= 4


@pytest.mark.parametrize(
    "more, field",
    [({"speculative_tokens": 9}, "speculative_tokens"), ({"prediction": {"type": "text", "content": "a"}}, "prediction")],
)
def test_a_wrong_field_is_refused_by_its_name(server, more, field):
    answer = server.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], **more})
    assert answer.status == 400 and field in answer.body["error"]["message"]


@pytest.mark.parametrize(
    "flags, words",
    [
        (("--device", "sim", "--speculative-tokens", "2"), "--sim-drafts"),
        (("--device", "cpu", "--speculative-tokens", "9"), "'9' is not one of auto, 0, 1"),
        (("--device", "cpu", "--speculative-tokens", "2", "--speculative-method", "mtp"), "'mtp' is not one of ngram"),
    ],
)
def test_what_cannot_be_speculated_is_refused_at_start_by_name(flags, words):
    server = Server(*flags, model=str(tiny_llama(vocab_size=VOCABULARY)), wait=False)
    assert server.process.wait(100) == 2
    assert words in server.log


def test_a_prediction_without_drafts_is_accepted_and_counts_nothing():
    with Server(*FLAGS, model=str(tiny_llama(vocab_size=VOCABULARY))) as server:
        usage = ask(server, prediction={"type": "content", "content": "abc"})["usage"]
    assert usage["completion_tokens_details"] == {"accepted_prediction_tokens": 0, "rejected_prediction_tokens": 0}
