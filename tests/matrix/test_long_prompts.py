"""Prompts of thousands of tokens, whole and in chunks, give transformers' log probabilities."""

import numpy as np
import pytest
import torch
import transformers

from tests.helpers.checkpoints import tiny_llama
from tests.helpers.server import Server

VOCABULARY = 267
LENGTHS = (4097, 8000)
CHUNKS = {"whole": "8192", "chunks of 512": "512", "chunks of 96": "96"}
NEAR_TIE = 1e-3  # nats between the best two tokens below which either may be called the best


def folder():
    return tiny_llama(vocab_size=VOCABULARY, max_position_embeddings=8200, seed=2)


def prompt(length: int) -> list[int]:
    return np.random.default_rng(length).integers(3, VOCABULARY, length).tolist()


@pytest.fixture(scope="module")
def expected() -> dict[int, np.ndarray]:
    """Length -> [length - 1, vocabulary]: log probabilities of the token after each position."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder(), dtype=torch.float32)
    with torch.no_grad():
        return {n: model(torch.tensor([prompt(n)])).logits[0, :-1].log_softmax(-1).numpy() for n in LENGTHS}


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("chunk", CHUNKS)
def test_long_prompts_give_the_log_probabilities_of_transformers(expected, chunk, ranks):
    flags = ["--device", "cpu", "--dtype", "float32", "-tp", str(ranks), "--max-num-batched-tokens", CHUNKS[chunk]]
    with Server(*flags, "--target-itl-ms", "100000", model=str(folder())) as server:
        for length in LENGTHS:
            ids = prompt(length)
            body = {"prompt": ids, "max_tokens": 1, "temperature": 0, "echo": True, "logprobs": 2, "return_token_ids": True}
            answer = server.post("/v1/completions", body, timeout=280)
            assert answer.status == 200, answer
            found = answer.body["choices"][0]["logprobs"]
            own = np.array(found["token_logprobs"][1:length])
            after = np.array(ids[1:])
            wanted = expected[length][np.arange(length - 1), after]
            assert np.abs(own - wanted).mean() < 1e-3 and np.abs(own - wanted).max() < 0.01
            two = -np.sort(-expected[length], axis=1)[:, :2]
            best = np.array([max(top.values()) for top in found["top_logprobs"][1:length]])
            sure = two[:, 0] - two[:, 1] > NEAR_TIE
            assert sure.mean() > 0.99
            assert np.abs(best - two[:, 0]).max() < 0.01
            # the prompt's own token is the best one here exactly where it is there, unless two stand too near
            assert np.array_equal((own >= best - 1e-6)[sure], (wanted >= two[:, 0] - 1e-6)[sure])
