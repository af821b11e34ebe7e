"""A hybrid's prompts that are longer than the step of its snapshots: one prefix is computed once, and no answer changes."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from tests.device.groups import Group
from tests.helpers.checkpoints import tiny_qwen3_5
from tests.helpers.server import Server
from tests.matrix.requests import VOCABULARY, plain

STEP = 256  # tokens between two snapshots
REQUESTS, TOKENS = 32, 40
FLAGS = ("--device", "cpu", "--dtype", "float32")
PREFIX = np.random.default_rng(17).integers(3, 250, 2 * STEP + 40).tolist()
SCARCE = 1_000_000  # bytes: the state of eight slots, some snapshots, and too few pages for eight requests to grow


def model() -> str:
    return str(tiny_qwen3_5(vocab_size=VOCABULARY, max_position_embeddings=1024))


def prompts() -> list[list[int]]:
    """Eight that share a prefix, two of them but one snapshot of it, and some of which say the same."""
    ends = ([7], [8], [9, 10], [7], [*range(20, 90)], [*range(20, 90), 5])
    return [PREFIX + end for end in ends] + [PREFIX[: STEP + 9] + [30], PREFIX[: STEP + 30]]


@pytest.fixture(scope="module")
def alone() -> list[list[int]]:
    """The answers of an executor without a cache to prompts in one chunk each."""
    with Group(model(), slots=8, max_len=1024) as group:
        return group.generate(prompts(), TOKENS, chunk=1024)[0]


def ask(server: Server, bodies: list[dict]) -> list[dict]:
    """The answers to requests that come at once."""
    with ThreadPoolExecutor(len(bodies)) as pool:
        return [answer.body for answer in pool.map(lambda body: server.post("/v1/completions", body, timeout=200), bodies)]


def assert_same(server: Server, alone: list[list[int]]) -> None:
    answers = ask(server, [plain(prompt, max_tokens=TOKENS) for prompt in prompts()])
    wrong = [i for i, answer in enumerate(answers) if answer["choices"][0]["token_ids"] != alone[i]]
    assert len(wrong) <= 1, f"{wrong} differ; one may, where two tokens were nearly as good"


def test_many_requests_on_one_prefix_compute_it_once():
    with Server(*FLAGS, "--max-num-seqs", str(REQUESTS), "--max-num-batched-tokens", "64", model=model()) as server:
        answers = ask(server, [plain([*PREFIX, 100 + i], max_tokens=4) for i in range(REQUESTS)])
        cached = [answer["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in answers]
        assert sorted(cached) == [0] + [2 * STEP] * (REQUESTS - 1)
        assert server.metric("slipstream:prefix_cache_hits_total") == 2 * STEP * (REQUESTS - 1)


def test_a_hybrid_goes_on_from_snapshots_after_preemptions(alone):
    flags = ("--max-num-seqs", "8", "--kv-cache-memory-bytes", str(SCARCE), "--max-num-batched-tokens", "96")
    with Server(*FLAGS, *flags, model=model()) as server:
        assert_same(server, alone)
        assert server.metric("slipstream:num_preemptions_total") > 0, "pages were not scarce"
        assert server.metric("slipstream:prefix_cache_hits_total") > 0
        server.until(lambda: server.metric("slipstream:kv_cache_usage_perc") == 0, "the pages of all requests")
