"""The greedy examples that a user meets first have one clear answer, whatever the machine's number type and load."""

import pathlib
import re

import pytest

from slipstream.log.request import SamplingParams
from slipstream.process.server import EXAMPLE
from slipstream.tokenize.tokenizer import load_tokenizer
from tests.device.groups import Group
from tests.helpers.checkpoints import smollm2

ROOT = pathlib.Path(__file__).parents[2]
SHOWN = ("README.md", "docs/clients.md", "slipstream/serve/static/index.html")
FIRST = {"role": "user", "content": EXAMPLE}
ANSWERED = {"role": "assistant", "content": "The capital of France is Paris."}
CHATS = {
    "The capital of France is Paris.": [FIRST],
    "The capital of Italy is Rome.": [FIRST, ANSWERED, {"role": "user", "content": "And of Italy?"}],
}
PLAIN = "1, 2, 3,"
MARGIN = 0.5  # nats between the best two tokens, at every token: bfloat16 moves their difference by some 0.05


@pytest.mark.parametrize("file", SHOWN)
def test_what_is_shown_asks_what_is_measured(file):
    spoken = r'(?<!voice="alloy", )'  # what is to be spoken asks nothing
    pattern = r"""(?:"role": "user", "content": |""" + spoken + r"""input=|such as )["“]([^"”]+)["”]"""
    asked = re.findall(pattern, (ROOT / file).read_text())
    assert asked and set(asked) <= {m["content"] for chat in CHATS.values() for m in chat}
    assert file != "README.md" or f'["{PLAIN}"]' in (ROOT / file).read_text()


def test_the_examples_answers_have_a_margin_at_every_token():
    tokenizer = load_tokenizer(smollm2())
    prompts = [tokenizer.apply_chat(chat) for chat in CHATS.values()] + [tokenizer.encode(PLAIN)]
    with Group(smollm2(), slots=len(prompts), max_len=256) as group:
        tokens, found, _ = group.generate(prompts, 10, SamplingParams(temperature=0.0, logprobs=2))
    for answer, ids, logprobs in zip([*CHATS, " 4, 5, 6"], tokens, found, strict=True):
        length = ids.index(2) + 1 if 2 in ids else 8
        assert tokenizer.decode(ids[:length]).startswith(answer)
        margins = [x.top_logprobs[0] - x.top_logprobs[1] for x in logprobs[:length]]
        assert min(margins) >= MARGIN, (answer, margins)
