"""A hybrid's prompts that are longer than the step of its snapshots: one prefix is computed once, and no answer changes."""

import threading

import numpy as np
import pytest

from tests.helpers.checkpoints import tiny_qwen3_5
from tests.helpers.server import Server
from tests.matrix.requests import VOCABULARY, answer_of, at_once, differences, plain

STEP = 256  # tokens between two snapshots
REQUESTS = 32
FLAGS = ("--device", "cpu", "--dtype", "float32")
PREFIX = np.random.default_rng(17).integers(3, 250, 2 * STEP + 40).tolist()
SCARCE = 1_000_000  # bytes: the state of eight slots, some snapshots, and too few pages for eight requests to grow


def model() -> str:
    return str(tiny_qwen3_5(vocab_size=VOCABULARY, max_position_embeddings=1024))


def bodies() -> dict[str, dict]:
    """Eight that share a prefix, two of them but one snapshot of it, and some of which say the same."""
    ends = ([7], [8], [9, 10], [7], [*range(20, 90)], [*range(20, 90), 5])
    found = [PREFIX + end for end in ends] + [PREFIX[: STEP + 9] + [30], PREFIX[: STEP + 30]]
    return {f"{i}": plain(prompt, max_tokens=40) for i, prompt in enumerate(found)}


@pytest.fixture(scope="module")
def alone():
    """A server without a cache, and its answers to requests that run alone."""
    with Server(*FLAGS, "--no-enable-prefix-caching", "--scheduling", "serial", model=model()) as server:

        def ask(body: dict) -> dict:
            answer = server.post("/v1/completions", body)
            assert answer.status == 200, answer
            return answer.body

        yield ask, {name: answer_of(ask(body)) for name, body in bodies().items()}


def judge(server: Server, alone) -> None:
    """The same requests at once."""
    ask, expected = alone
    wrong, flips = differences(expected, at_once(server, bodies()), bodies(), ask)
    assert not wrong and flips <= 1, wrong


def test_many_requests_on_one_prefix_compute_it_once(alone):
    with Server(*FLAGS, "--max-num-seqs", str(REQUESTS), "--max-num-batched-tokens", "64", model=model()) as server:
        cached: list[int] = []

        def ask(body: dict) -> None:
            cached.append(server.post("/v1/completions", body).body["usage"]["prompt_tokens_details"]["cached_tokens"])

        threads = [threading.Thread(target=ask, args=(plain([*PREFIX, 100 + i], max_tokens=4),)) for i in range(REQUESTS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(cached) == [0] + [2 * STEP] * (REQUESTS - 1)
        assert server.metric("slipstream:prefix_cache_hits_total") == 2 * STEP * (REQUESTS - 1)
        judge(server, alone)


def test_a_hybrid_goes_on_from_snapshots_after_preemptions(alone):
    flags = ("--max-num-seqs", "8", "--kv-cache-memory-bytes", str(SCARCE // 2), "-tp", "2", "--max-num-batched-tokens", "96")
    with Server(*FLAGS, *flags, model=model()) as server:
        judge(server, alone)
        assert server.metric("slipstream:num_preemptions_total") > 0, "pages were not scarce"
        assert server.metric("slipstream:prefix_cache_hits_total") > 0
        server.until(lambda: server.metric("slipstream:kv_cache_usage_perc") == 0, "the pages of all requests")
