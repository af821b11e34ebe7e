"""Latent attention against its definition: the keys and values of every head, token by token."""

import numpy as np
import pytest
import torch

from slipstream.ops.cpu import latent
from slipstream.ops.cpu.latent import latent_attention
from slipstream.ops.cpu.paged import build_step
from slipstream.ops.layers import LatentAttention

BLOCK, HEADS, LATENT, NOPE, ROPE = 4, 3, 24, 16, 8
ROWS = ([(9, 1), (3, 1), (0, 1)], [(0, 13)], [(7, 6), (64, 40)], [(5, 1), (8, 5), (0, 9), (90, 50)])


@pytest.mark.parametrize("value_dim", [12, 32])  # narrower and wider than keys
@pytest.mark.parametrize("rows", ROWS, ids=str)
def test_latent_attention_equals_its_definition(rows, value_dim, monkeypatch):
    monkeypatch.setattr(latent, "_BLOCK_TOKENS", 64)
    rng = np.random.default_rng(0)

    def normal(*shape):
        return torch.from_numpy(rng.standard_normal(shape))

    columns = max(-(-(s + n) // BLOCK) for s, n in rows)
    table = (1 + rng.permutation(columns * len(rows))).astype(np.int32).reshape(len(rows), columns)
    cache = torch.full((1 + table.size, BLOCK, LATENT + ROPE), 1e4, dtype=torch.float64)  # stale values must not be seen
    cache[0] = 0
    known = [normal(s + n, LATENT + ROPE) for s, n in rows]
    for slot, (start, _) in enumerate(rows):
        for p in range(start):
            cache[table[slot, p // BLOCK], p % BLOCK] = known[slot][p]
    key_up, value_up = normal(HEADS, NOPE, LATENT), normal(HEADS, value_dim, LATENT)
    spec = LatentAttention(
        0, 0, HEADS, LATENT, NOPE, ROPE, value_dim, 0.1, torch.zeros(0), None, key_up, value_up
    )  # fmt: skip
    starts, counts = (np.array(c) for c in zip(*rows, strict=True))
    total = int(counts.sum())
    ids, caches = np.zeros(total, np.int32), [(cache,)]
    step = build_step(ids, np.arange(len(rows)), starts, counts, table[None], (0,), caches, torch.float64, BLOCK)
    q = normal(total, HEADS, NOPE + ROPE)
    got = latent_attention(q, torch.cat([known[i][s:] for i, (s, _) in enumerate(rows)]), spec, step)
    out, at = [], 0
    for slot, (start, count) in enumerate(rows):
        for i in range(count):
            seen = known[slot][: start + i + 1]
            for h in range(HEADS):
                keys = torch.cat([seen[:, :LATENT] @ key_up[h].T, seen[:, LATENT:]], 1)
                out.append((keys @ q[at + i, h] * 0.1).softmax(0) @ (seen[:, :LATENT] @ value_up[h].T))
        at += count
    error = (got - torch.stack(out).view(total, -1)).abs().max().item()
    assert error < 1e-5
