"""The real SmolLM2-135M in float32 against the tokens that transformers gave (tests/data/smollm2_greedy.json)."""

import json
import pathlib

import pytest

from slipstream.log.request import SamplingParams
from tests.device.groups import Group
from tests.helpers.checkpoints import smollm2

CASES = json.loads((pathlib.Path(__file__).parents[1] / "data" / "smollm2_greedy.json").read_text())["cases"]
WITH_LOGPROBS = SamplingParams(temperature=0.0, logprobs=0)


def compare(cases, tokens, logprobs) -> None:
    """Equal up to the first step whose top-2 margin is under 1e-3, which may differ."""
    for case, got, found in zip(cases, tokens, logprobs, strict=True):
        for k, expected in enumerate(case["token_ids"]):
            if got[k] != expected:
                assert case["margin"][k] < 1e-3, (case["name"], k)
                break
            assert abs(found[k].logprob - case["logprob"][k]) < 5e-3


def longest(cases) -> int:
    return max(len(c["token_ids"]) for c in cases)


def test_greedy_tokens_equal_transformers_all_at_once_and_alone():
    with Group(smollm2(), slots=len(CASES), max_len=4096) as group:
        prompts = [c["prompt_token_ids"] for c in CASES]
        compare(CASES, *group.generate(prompts, longest(CASES), WITH_LOGPROBS, chunk=512)[:2])
        short = [c for c in CASES if len(c["prompt_token_ids"]) < 100][:3]
        for case in short:
            compare([case], *group.generate([case["prompt_token_ids"]], longest([case]), WITH_LOGPROBS)[:2])


@pytest.mark.parametrize("size", [2, 4])
def test_greedy_tokens_equal_transformers_on_several_ranks(size):
    cases = [c for c in CASES if len(c["prompt_token_ids"]) < 100][:3]
    with Group(smollm2(), size, slots=len(cases), max_len=512) as group:
        prompts = [c["prompt_token_ids"] for c in cases]
        compare(cases, *group.generate(prompts, longest(cases), WITH_LOGPROBS)[:2])
