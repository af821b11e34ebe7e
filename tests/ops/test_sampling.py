"""What each sampling parameter does to a row, and the draws."""

import math

import numpy as np
import pytest
import torch

from slipstream.log.request import SamplingParams
from slipstream.ops.sampling import (
    adjust,
    best_of,
    choose,
    draw_key,
    gumbel,
    mix,
    noise_bits,
    spread,
    survivors,
    token_logprobs,
    unpack_mask,
)

PROMPT = [1, 2, 3, 3]
OUTPUT = [4, 5, 4]
TOKENS = np.array(PROMPT + OUTPUT, np.int32)
V = 10
INF = math.inf


def adjusted(logits=None, tokens=TOKENS, **fields) -> list[float]:
    row = torch.tensor(logits if logits is not None else [1.0] * V)
    adjust(row, SamplingParams(**fields), tokens, len(PROMPT))
    return row.tolist()


def restricted(probabilities: list[float], **fields) -> list[int]:
    """Ids that stay."""
    ids = survivors(np.log(np.array(probabilities, np.float32)), SamplingParams(**fields))
    assert ids is not None
    return ids.tolist()


def test_presence_and_frequency_penalties_count_generated_tokens_only():
    assert adjusted(presence_penalty=0.5) == [1, 1, 1, 1, 0.5, 0.5, 1, 1, 1, 1]
    assert adjusted(frequency_penalty=0.25) == [1, 1, 1, 1, 0.5, 0.75, 1, 1, 1, 1]
    assert adjusted(presence_penalty=0.5, tokens=TOKENS[:4]) == [1] * V


def test_the_repetition_penalty_counts_the_prompt_too_and_goes_by_sign():
    assert adjusted([2.0, 2.0, -2.0, 2.0, -2.0, 2.0, -2.0, 2.0, 2.0, 2.0], repetition_penalty=2.0) == [
        2, 1, -4, 1, -4, 1, -2, 2, 2, 2,
    ]  # fmt: skip


def test_a_bias_is_added_and_may_forbid():
    assert adjusted(logit_bias=((0, 2.5), (9, -100.0))) == [3.5, *[1] * 8, -99]


def test_bad_words_forbid_their_last_token_where_the_answer_ends_with_the_others():
    assert adjusted(bad_words=((7,),))[7] == -INF
    assert adjusted(bad_words=((5, 4, 8),))[8] == -INF
    assert adjusted(bad_words=((4, 5, 8),)) == [1] * V
    assert adjusted(bad_words=((3, 8),), tokens=TOKENS[:4]) == [1] * V  # matches the prompt's end only


def test_stop_ids_are_masked_below_min_tokens():
    assert adjusted(min_tokens=4, stop_ids=(2, 6)) == [1, 1, -INF, 1, 1, 1, -INF, 1, 1, 1]
    assert adjusted(min_tokens=3, stop_ids=(2, 6)) == [1] * V


def test_top_k_keeps_the_best_and_what_ties_with_the_last():
    assert restricted([0.1, 0.4, 0.2, 0.3], top_k=2) == [1, 3]
    assert restricted([0.2, 0.4, 0.2, 0.2], top_k=2) == [0, 1, 2, 3]
    assert survivors(np.zeros(3, np.float32), SamplingParams(top_k=50)) is None


def test_top_p_keeps_the_fewest_that_reach_it():
    assert restricted([0.1, 0.4, 0.2, 0.3], top_p=0.39) == [1]
    assert restricted([0.1, 0.4, 0.2, 0.3], top_p=0.41) == [1, 3]
    assert restricted([0.1, 0.4, 0.2, 0.3], top_p=0.91) == [0, 1, 2, 3]
    assert restricted([0.1, 0.4, 0.2, 0.3], top_p=1e-9) == [1]


def test_a_few_best_are_enough_or_all_are_looked_at():
    """Against sorting the whole row, for peaked and flat rows."""
    rng = np.random.default_rng(1)
    for scale in (0.0, 0.1, 1.0, 5.0, 30.0):
        row = (rng.standard_normal(3000) * scale).astype(np.float32)
        row[::7] = row[0]
        for top_k in (0, 1, 40, 2999):
            for top_p in (1.0, 0.999, 0.5, 1e-6):
                if top_k == 0 and top_p == 1.0:
                    continue
                order = np.sort(row)[::-1]
                floor = order[top_k - 1] if top_k else -INF
                left = order[order >= floor].astype(np.float64)
                mass = np.exp(left - left[0]).cumsum()
                if top_p < 1.0:
                    floor = left[min(np.searchsorted(mass, top_p * mass[-1]), len(left) - 1)]
                got = survivors(row, SamplingParams(top_k=top_k, top_p=top_p))
                assert got is not None and abs(len(got) - int((row >= floor).sum())) <= 1


def test_min_p_keeps_what_is_likely_enough_beside_the_best():
    assert restricted([0.1, 0.4, 0.19, 0.21, 0.1], min_p=0.5) == [1, 3]


def test_top_p_counts_what_top_k_left():
    assert restricted([0.1, 0.4, 0.2, 0.3], top_k=2, top_p=0.55) == [1]
    assert restricted([0.1, 0.4, 0.2, 0.3], top_k=2, top_p=0.58) == [1, 3]


def test_greedy_takes_the_lowest_of_equals_and_reports_where_nothing_is_allowed():
    assert choose(torch.tensor([0.0, 3.0, 3.0, 1.0]), SamplingParams(temperature=0.0), 5) == 1
    assert choose(torch.full((4,), -INF), SamplingParams(temperature=0.0), 5) == -1
    assert choose(torch.full((4,), -INF), SamplingParams(temperature=1.0), 5) == -1


def test_logprobs_are_those_of_the_softmax_with_rank_and_best():
    logits = torch.tensor([[1.0, 3.0, 2.0, 0.0], [0.0, 0.0, 1.0, 0.0]])
    expected = logits.log_softmax(-1)
    first, second = token_logprobs(logits, [2, 2], [2, 0])
    assert first.rank == 2 and first.top_ids == [1, 2] and math.isclose(first.logprob, float(expected[0, 2]), abs_tol=1e-6)
    assert np.allclose(first.top_logprobs, [float(expected[0, 1]), float(expected[0, 2])])
    assert second.rank == 1 and second.top_ids == [] and second.top_logprobs == []


def test_a_bit_mask_is_read_from_the_low_bit():
    mask = np.array([0b101, 1 << 31], np.uint32)
    assert torch.nonzero(unpack_mask(mask, 0, 64)).flatten().tolist() == [0, 2, 63]
    assert torch.nonzero(unpack_mask(mask, 2, 62)).flatten().tolist() == [0, 61]


def scalar_bits(key: tuple[int, int], id: int) -> int:
    """The documented arithmetic, one id at a time."""
    m = 0xFFFFFFFF
    h = (id * 0x9E3779B1 + key[0]) & m
    h = ((h ^ h >> 16) * 0x7FEB352D) & m
    h = ((h ^ h >> 15) + key[1]) & m
    h = (h * 0x846CA68B) & m
    h = ((h ^ h >> 16) * 0x7FEB352D) & m
    h = ((h ^ h >> 15) * 0x846CA68B) & m
    return h ^ h >> 16


def test_the_noise_is_the_documented_arithmetic_and_the_same_for_any_part_of_the_vocabulary():
    keys = [draw_key(2**62 + 12345, 3, 17), draw_key(0, 0, 1)]
    whole = [noise_bits(key, spread(np.arange(150000))) for key in keys]
    assert whole[1][:50].tolist() == [scalar_bits(keys[1], i) for i in range(50)]
    assert whole[0][-9:].tolist() == [scalar_bits(keys[0], i) for i in range(149991, 150000)]
    assert noise_bits(keys[0], spread(np.array([7, 1234]))).tolist() == [whole[0][7], whole[0][1234]]
    assert mix(0) == 0xE220A8397B1DCDAF  # SplitMix64's first output for seed 0


def test_draws_differ_by_seed_choice_and_position():
    ids = spread(np.arange(1000))
    base = noise_bits(draw_key(7, 0, 5), ids)
    for key in (draw_key(8, 0, 5), draw_key(7, 1, 5), draw_key(7, 0, 6)):
        other = noise_bits(key, ids)
        assert (base != other).mean() > 0.99
        assert abs(np.corrcoef(base.astype(float), other.astype(float))[0, 1]) < 0.15


def test_the_noise_is_gumbel_distributed():
    ids = spread(np.arange(1000))
    g = gumbel(np.stack([noise_bits(draw_key(s, 0, 0), ids) for s in range(200)])).double()
    assert bool(g.isfinite().all())
    assert abs(float(g.mean()) - 0.5772) < 0.01 and abs(float(g.var()) - math.pi**2 / 6) < 0.02
    edge = gumbel(np.array([0, 0xFFFFFFFF], np.uint32))
    assert bool(edge.isfinite().all()) and edge[0] > 20 and edge[1] < -2


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_drawn_tokens_follow_the_softmax(temperature):
    logits = torch.tensor([0.0, 1.0, 2.0, -1.0, 0.5])
    n = 6000
    counts = np.bincount(
        [choose(logits.clone(), SamplingParams(temperature=temperature, seed=i), 9) for i in range(n)], minlength=5
    )
    expected = (logits / temperature).softmax(-1).numpy()
    assert (np.abs(counts / n - expected) < 4 * np.sqrt(expected * (1 - expected) / n)).all()


def test_a_nan_is_noticed():
    best, _ = best_of(torch.tensor([[0.0, math.nan, 3.0]]))
    assert math.isnan(best[0])
