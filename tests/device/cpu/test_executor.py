"""The CPU executor on tiny models: chunks, batches, ranks, modes; what a seed's answer may not depend on; failures."""

import select

import numpy as np
import pytest

from slipstream.config import EngineConfig
from slipstream.device.cpu.executor import CpuExecutor
from slipstream.device.executor import StepFailed
from slipstream.errors import ConfigError
from slipstream.log.request import SamplingParams
from slipstream.ops.collective import Solo
from slipstream.shard import Shard
from slipstream.weights.checkpoint import open_checkpoint
from tests.device.groups import Group, request, rows, wait_one
from tests.helpers.checkpoints import tiny_llama, tiny_qwen3

RNG = np.random.default_rng(5)
PROMPTS = [RNG.integers(3, 300, n).tolist() for n in (5, 1, 37, 16, 64, 90)]
SEEDED = SamplingParams(temperature=0.9, seed=1234567)


@pytest.fixture(scope="module")
def group():
    with Group(tiny_llama()) as g:
        yield g


@pytest.fixture(scope="module")
def reference(group):
    return [group.generate([p], 12)[0][0] for p in PROMPTS]


def test_a_batch_gives_what_each_prompt_gives_alone(group, reference):
    assert group.generate(PROMPTS, 12)[0] == reference


@pytest.mark.parametrize("chunk", [1, 7, 16, 33])
def test_chunks_of_a_prompt_change_nothing(group, reference, chunk):
    assert group.generate(PROMPTS, 12, chunk=chunk)[0] == reference


def test_requests_that_join_and_leave_change_nothing(group, reference):
    assert group.generate(PROMPTS, 12, chunk=20, joins=[0, 3, 1, 9, 2, 5], slots=[4, 0, 7, 2, 6, 1])[0] == reference


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("make", [tiny_llama, tiny_qwen3])
def test_ranks_give_what_one_rank_gives(make, size):
    """tiny_llama has 6 query and 2 key heads, tiny_qwen3 4 and 2: on 3 and 4 ranks a key head is held by several."""
    sampling = [SamplingParams(temperature=0.0, logprobs=2), SEEDED, SamplingParams(temperature=0.0, prompt_logprobs=1)]
    sampling += [SamplingParams(temperature=0.8, top_k=20, seed=5), SamplingParams(temperature=0.0, repetition_penalty=1.3)]
    prompts = PROMPTS[:5]
    with Group(make()) as one, Group(make(), size) as many:
        alone, together = (g.generate(prompts, 8, sampling, chunk=24) for g in (one, many))
    assert alone[0] == together[0]
    for a, b in zip(alone[1] + alone[2], together[1] + together[2], strict=True):
        assert [x.rank for x in a] == [x.rank for x in b]
        assert np.allclose([x.logprob for x in a], [x.logprob for x in b], atol=1e-4)


def test_a_rank_may_hold_no_heads():
    with Group(tiny_llama(num_attention_heads=2, num_key_value_heads=1)) as one:
        expected = one.generate(PROMPTS[:2], 5)[0]
    with Group(tiny_llama(num_attention_heads=2, num_key_value_heads=1), 3) as many:
        assert [r.model.caches[0].heads for r in many.ranks] == [1, 1, 0]
        assert many.generate(PROMPTS[:2], 5)[0] == expected


def test_a_seeded_draw_depends_on_no_batch_and_no_slot(group):
    alone = group.generate([PROMPTS[0]], 16, SEEDED)[0][0]
    others = [SEEDED, *[SamplingParams(temperature=1.0, seed=i) for i in range(5)]]
    assert group.generate(PROMPTS, 16, others, joins=[2, 0, 1, 0, 3, 0], slots=[5, 4, 3, 2, 1, 0])[0][0] == alone
    assert group.generate([PROMPTS[0]], 16, SamplingParams(temperature=0.9, seed=1234568))[0][0] != alone
    assert group.generate([PROMPTS[0]], 16, SamplingParams(temperature=0.9, seed=1234567, choice=1))[0][0] != alone


@pytest.mark.parametrize(
    "sampling",
    [
        SEEDED,
        SamplingParams(temperature=1.0, seed=3, top_p=0.8, repetition_penalty=1.4, presence_penalty=0.5, frequency_penalty=0.5),
    ],
)
def test_ff29_chunks_do_not_move_the_draws_or_the_counts(group, sampling):
    whole = group.generate([PROMPTS[4]], 16, sampling)[0][0]
    for chunk in (5, 16, 63):
        assert group.generate([PROMPTS[4]], 16, sampling, chunk=chunk)[0][0] == whole


def test_ff30_penalties_see_the_last_token_though_steps_overlap(group):
    """With two steps in flight the host does not know the last token; a heavy penalty must still forbid its repetition."""
    once = SamplingParams(temperature=0.0, presence_penalty=1e4)
    tokens = group.generate([PROMPTS[2]], 40, once)[0][0]
    assert len(set(tokens)) == len(tokens)


def test_ff35_top_k_together_with_top_p_works(group):
    both = SamplingParams(temperature=1.0, seed=9, top_k=5, top_p=0.9, min_p=0.01)
    assert len(group.generate([PROMPTS[0]], 10, both)[0][0]) == 10
    narrow = SamplingParams(temperature=2.0, seed=9, top_k=1, top_p=0.5)
    assert group.generate([PROMPTS[0]], 10, narrow)[0] == group.generate([PROMPTS[0]], 10)[0]


def test_prompt_logprobs_are_the_same_in_chunks_and_of_the_raw_logits(group):
    params = SamplingParams(temperature=1.0, seed=1, prompt_logprobs=3, logit_bias=((7, 50.0),))
    whole, cut = (group.generate([PROMPTS[5]], 2, params, chunk=c)[2][0] for c in (1000, 11))
    assert len(whole) == len(cut) == len(PROMPTS[5]) - 1
    assert np.allclose([x.logprob for x in whole], [x.logprob for x in cut], atol=1e-4)
    assert all(len(x.top_ids) == 3 and x.top_logprobs == sorted(x.top_logprobs, reverse=True) for x in whole)


def test_a_finished_rows_late_steps_are_harmless(group, reference):
    """Rows that run beyond an end, and pages handed to a next owner in a later step, leave that owner's answer alone."""
    group.init_slot(0, request(0, PROMPTS[0], 8))
    group.launch([(0, 0, 5, True)], group.pages([0]))
    group.launch([(0, 5, 1, True)])
    group.init_slot(0, request(1, PROMPTS[2], 8))
    group.launch([(0, 0, 37, True)], group.pages([0]))
    tokens = [group.outcome().tokens.tolist() for _ in range(3)]
    assert tokens == [[[reference[0][0]]], [[reference[0][1]]], [[reference[2][0]]]]


def test_masks_bind_discarded_rows_sample_nothing_and_dead_ends_are_values_of_their_rows(group):
    executor = group.ranks[0]
    for slot in (0, 1, 2):
        group.init_slot(slot, request(slot, PROMPTS[slot], 4))
    group.seq += 1
    entries = [(s, 0, len(PROMPTS[s]), True) for s in (0, 1, 2)]
    executor.launch_forward(rows(group.seq, entries, group.pages([0, 1, 2])))
    only = np.zeros((1, 10), np.uint32)
    only[0, 3] = 1 << 5
    executor.launch_sample(group.seq, {0: only, 1: np.zeros((1, 10), np.uint32)}, frozenset([2]))
    outcome = group.outcome()
    assert outcome.tokens.tolist() == [[101], [-1], [-1]]
    assert list(outcome.errors) == [1]


def test_a_raise_in_a_step_is_reported_with_its_trace_after_the_outcomes_before_it():
    with Group(tiny_llama()) as g:
        executor = g.ranks[0]
        g.init_slot(0, request(0, PROMPTS[0], 4))
        g.launch([(0, 0, 5, True)], g.pages([0]))
        g.launch([(0, 10**6, 1, True)])
        assert wait_one(executor).seq == 1
        assert select.select([executor.fileno()], [], [], 30)[0]
        with pytest.raises(StepFailed, match=r"(?s)Traceback.*IndexError"):
            for _ in range(1000):
                select.select([executor.fileno()], [], [], 30)
                executor.outcomes()


def test_capacity_is_what_was_asked_for_and_a_length_beyond_the_model_is_refused():
    checkpoint = open_checkpoint(tiny_llama())
    made = []
    for fields in ({"kv_cache_memory_bytes": 1 << 20}, {}):
        made.append(CpuExecutor(checkpoint, EngineConfig(dtype="float32", max_num_seqs=3, **fields), Shard(), Solo()))
    page = 2 * 16 * 2 * 2 * 16 * 4  # layers, block, keys and values, heads, head_dim, bytes
    assert made[0].capacity().limits.tables[0].pages == (1 << 20) // page
    limits = made[1].capacity().limits
    assert limits.tables[0].pages == 3 * 512 // 16 and limits.max_len == 512 and limits.width == 1
    with pytest.raises(ConfigError, match="--max-model-len 513"):
        CpuExecutor(checkpoint, EngineConfig(dtype="float32", max_model_len=513), Shard(), Solo())
    for given, why in ((10, f"needs {page} bytes; 10 were given"), (1 << 50, "are more than the [0-9]+ that are free")):
        config = EngineConfig(dtype="float32", kv_cache_memory_bytes=given)
        with pytest.raises(ConfigError, match=f"--kv-cache-memory-bytes: .*{why}"):
            CpuExecutor(checkpoint, config, Shard(), Solo()).capacity()
