"""Paged attention against a plain loop over tokens."""

import numpy as np
import pytest
import torch

from slipstream.ops.cpu import paged
from slipstream.ops.cpu.paged import build_step, padded_rows, paged_attention
from slipstream.ops.layers import Attention
from slipstream.schedule.budget import sizes
from slipstream.shard import Heads

BLOCK, KEYS, SHARE, DIM = 4, 2, 3, 8


def attend(rows: list[tuple[int, int]], dtype=torch.float64, window: int = 0, stored=None, stale=1e4, softcap=0.0, sinks=None):
    """Rows of (start, count), one a slot, over a random past: what paged attention gives, and what a loop gives."""
    rng = np.random.default_rng(0)
    columns = max(-(-(s + n) // BLOCK) for s, n in rows)
    table = (1 + rng.permutation(columns * len(rows))).astype(np.int32).reshape(len(rows), columns)
    cache = torch.full((1 + table.size, BLOCK, 2 * KEYS, DIM), stale, dtype=stored or dtype)  # stale values must not be seen
    cache[0] = 0
    known = [torch.from_numpy(rng.standard_normal((s + n, 2 * KEYS, DIM))).to(dtype) for s, n in rows]
    for slot, (start, _) in enumerate(rows):
        for p in range(max(0, start - window + 1) if window else 0, start):
            cache[table[slot, p // BLOCK], p % BLOCK] = known[slot][p]
    starts, counts = (np.array(c) for c in zip(*rows, strict=True))
    q = torch.from_numpy(rng.standard_normal((int(counts.sum()), KEYS * SHARE, DIM))).to(dtype)
    fresh = torch.cat([known[i][s : s + n] for i, (s, n) in enumerate(rows)])
    ids = np.zeros(int(counts.sum()), np.int32)
    step = build_step(ids, np.arange(len(rows)), starts, counts, table[None], (window,), [(cache,)], dtype, BLOCK)
    spec = Attention(0, 0, Heads(0, KEYS * SHARE, 0, KEYS), DIM, DIM**-0.5, None, sinks=sinks, softcap=softcap)
    got = paged_attention(torch.cat([q, fresh], 1), spec, step)
    out, at = [], 0
    for slot, (start, count) in enumerate(rows):
        for i in range(count):
            kv = known[slot][max(0, start + i + 1 - window) if window else 0 : start + i + 1]
            for h in range(KEYS * SHARE):
                k, v = kv[:, h // SHARE], kv[:, KEYS + h // SHARE]
                scores = k @ q[at + i, h] * DIM**-0.5
                if softcap:
                    scores = softcap * (scores / softcap).tanh()
                sink = scores[:0] if sinks is None else sinks[h : h + 1].to(scores)
                out.append(torch.cat([scores, sink]).softmax(0)[: len(k)] @ v)
        at += count
    return got, torch.stack(out).view(len(ids), -1)


ROWS = [
    [(0, 1)],
    [(9, 1), (3, 1), (0, 1)],
    [(0, 13)],
    [(7, 6)],
    [(5, 1), (90, 1), (8, 1)],
    [(5, 1), (8, 5), (0, 9), (0, 1), (16, 4)],
    [(200, 1), (3, 1), (20, 2), (61, 1)],
    [(0, 37), (64, 19), (65, 33)],
]


@pytest.mark.parametrize("rows", ROWS)
def test_rows_see_exactly_their_own_past(rows):
    got, expected = attend(rows)
    assert torch.allclose(got, expected, atol=1e-6)
    got, expected = attend(rows, torch.float32)
    assert torch.allclose(got, expected, atol=1e-4)


@pytest.mark.parametrize("window", [1, 3, 4, 9, 70])
@pytest.mark.parametrize("rows", ROWS)
def test_rows_of_a_window_see_its_latest_tokens_and_no_more(rows, window: int):
    """What lies before the window is never written here, as where its pages were given back."""
    got, expected = attend(rows, window=window)
    assert torch.allclose(got, expected, atol=1e-6)


@pytest.mark.parametrize("window", [0, 9])
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("sinks, softcap", [(True, 0.0), (False, 1.5), (True, 1.5)])
def test_sinks_take_their_share_and_scores_are_capped(rows, window: int, sinks: bool, softcap: float):
    logits = torch.linspace(-2, 2, KEYS * SHARE) if sinks else None
    got, expected = attend(rows, window=window, sinks=logits, softcap=softcap)
    assert torch.allclose(got, expected, atol=1e-5)
    alone = rows == [(0, 1)] and not sinks  # one score has the whole softmax, whatever it is
    assert alone or not torch.allclose(got, attend(rows, window=window)[0], atol=1e-3)


@pytest.mark.parametrize("window", [0, 9])
@pytest.mark.parametrize("rows", ROWS)
def test_keys_and_values_may_be_kept_in_fewer_bits_than_the_activations(rows, window: int):
    got, expected = attend(rows, torch.float32, window, stored=torch.bfloat16)
    assert torch.allclose(got, expected, atol=5e-2)
    assert not torch.equal(got, attend(rows, torch.float32, window)[0])


def test_a_chunk_does_not_see_what_another_left_in_its_last_page():
    for value in (torch.nan, torch.inf):
        for window in (0, 4):
            got, expected = attend([(7, 2)], window=window, stale=value)
            assert torch.allclose(got, expected, atol=1e-6)


def test_attention_meets_few_sizes_whatever_the_lengths(monkeypatch):
    """oneDNN keeps kernels for each size for ever."""
    real, met = paged.flash, set()

    def watch(q, k, v, *args, **kw):
        met.add((q.shape[2], k.shape[2]))
        return real(q, k, v, *args, **kw)

    monkeypatch.setattr(paged, "flash", watch)
    for n in range(2, 200, 3):
        attend([(n, n)], torch.float32)
    few = {padded_rows(n) for n in range(200)}
    assert all(q in few or q / SHARE in few for q, _ in met)
    assert all(k in few or k % 64 == 0 for _, k in met)


def test_sizes_grow_by_an_eighth_at_most_and_the_planner_s_are_among_them():
    rows = range(4097)
    assert all(n <= padded_rows(n) <= max(16, n * 9 / 8) for n in rows)
    assert len({padded_rows(n) for n in rows}) < 90
    assert all(padded_rows(n) == n for n in sizes(4096))
