"""The recurrent operations against loops over tokens in float64: rows of one token and prompts of several slots in a step."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from slipstream.ops.cpu.ops import PlainOps
from slipstream.ops.cpu.paged import build_step
from slipstream.ops.layers import GatedDelta, Mamba2
from slipstream.shard import Heads

OPS = PlainOps(torch.float32)
COUNTS = {"decode rows": [1, 1, 1], "decode rows and prompts": [1, 130, 2, 64, 1, 65], "one prompt": [200]}


def step_of(counts: list[int], arrays: tuple[torch.Tensor, ...]):
    """A step whose row i is of slot i + 1, and the slot of each token."""
    slots = np.arange(1, len(counts) + 1)
    ids, starts, tables = np.zeros(sum(counts), np.int32), np.full(len(counts), 5), np.zeros((0, 8, 1), np.int32)
    step = build_step(ids, slots, starts, np.array(counts), tables, (), [arrays], torch.float32, 16)
    return step, np.repeat(slots, counts).tolist()


def convolved(x, columns, weight, bias):
    whole = torch.cat([columns, x[None]])
    columns.copy_(whole[1:])
    return F.silu((whole * weight.double()).sum(0) + bias)


def strided(*shape) -> torch.Tensor:
    """Arrays of slots lie beside others of their slot."""
    return torch.randn(shape[0], int(np.prod(shape[1:])) + 7)[:, 3:-4].unflatten(1, shape[1:])


@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
@pytest.mark.parametrize("values, keys, k, v", [(4, 2, 16, 24), (3, 3, 8, 8)])
def test_a_gated_delta_net_equals_its_recurrence(counts, values, keys, k, v):
    torch.manual_seed(0)
    channels = 2 * keys * k + values * v
    columns, state = strided(len(counts) + 2, 3, channels), strided(len(counts) + 2, values, k, v)
    norm = torch.rand(v) + 0.5
    spec = GatedDelta(
        0, Heads(0, values, 0, keys), k, v, torch.randn(4, channels) / 2, torch.rand(values), torch.randn(values),
        OPS.norm_weight(norm, 1e-6),
    )  # fmt: skip
    old_columns, old_state = columns.double(), state.double()
    step, of_token = step_of(counts, (columns, state))
    x = torch.randn(len(of_token), channels + values * v + 2 * values)
    wanted = torch.empty(len(x), values * v, dtype=torch.float64)
    for t, slot in enumerate(of_token):
        mixed = convolved(x[t, :channels].double(), old_columns[slot], spec.conv, 0)
        q, key, value = mixed.split([keys * k, keys * k, values * v])
        q, key = (F.normalize(a.view(keys, k), dim=-1).repeat_interleave(values // keys, 0) for a in (q, key))
        gate, b, a = x[t, channels:].double().split([values * v, values, values])
        s = old_state[slot] * (-spec.rate * F.softplus(a + spec.dt_bias)).exp()[:, None, None]
        change = (value.view(values, v) - torch.einsum("hkv,hk->hv", s, key)) * b.sigmoid()[:, None]
        old_state[slot] = s + key[:, :, None] * change[:, None]
        out = torch.einsum("hkv,hk->hv", old_state[slot], q) * k**-0.5
        wanted[t] = (F.rms_norm(out, (v,), norm.double(), 1e-6) * F.silu(gate.view(values, v))).flatten()
    assert torch.allclose(OPS.gated_delta(x, spec, step).double(), wanted, atol=2e-4)
    assert torch.allclose(state.double(), old_state, atol=2e-4)
    assert torch.equal(columns.double(), old_columns)


@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
@pytest.mark.parametrize("normed", ["after the gate", "before the gate", "not"])
def test_mamba2_equals_its_recurrence(counts, normed):
    torch.manual_seed(0)
    heads, dim, groups, n = 4, 8, 2, 16
    channels = heads * dim + 2 * groups * n
    columns, state = strided(len(counts) + 2, 3, channels), strided(len(counts) + 2, heads, dim, n)
    norm, before = torch.rand(heads * dim) + 0.5, normed == "before the gate"
    spec = Mamba2(
        0, heads, dim, groups, n, torch.randn(4, channels) / 2, torch.randn(channels), torch.rand(heads), torch.randn(heads),
        torch.randn(heads), (0.01, 1.5), None if normed == "not" else OPS.norm_weight(norm, 1e-5), before,
    )  # fmt: skip
    old_columns, old_state = columns.double(), state.double()
    step, of_token = step_of(counts, (columns, state))
    x = torch.randn(len(of_token), heads * dim + channels + heads)
    wanted = torch.empty(len(x), heads * dim, dtype=torch.float64)
    for t, slot in enumerate(of_token):
        gate, inner, dt = x[t].double().split([heads * dim, channels, heads])
        mixed = convolved(inner, old_columns[slot], spec.conv, spec.conv_bias)
        value, b, c = mixed.split([heads * dim, groups * n, groups * n])
        value, b, c = value.view(heads, dim), *(a.view(groups, n).repeat_interleave(heads // groups, 0) for a in (b, c))
        dt = F.softplus(dt + spec.dt_bias).clamp(*spec.dt_limits)
        s = old_state[slot] * (-spec.rate * dt).exp()[:, None, None] + (dt[:, None] * value)[:, :, None] * b[:, None]
        old_state[slot] = s
        out = torch.einsum("hpn,hn->hp", s, c) + spec.skip[:, None] * value
        out, gate = out.reshape(groups, -1), F.silu(gate.view(groups, -1))
        out = out if before else out * gate
        if normed != "not":
            out = F.rms_norm(out, (out.shape[1],), None, 1e-5) * norm.double().view(groups, -1)
        wanted[t] = (out * gate if before else out).flatten()
    assert torch.allclose(OPS.mamba2(x, spec, step).double(), wanted, atol=2e-4)
    assert torch.allclose(state.double(), old_state, atol=2e-4)
    assert torch.equal(columns.double(), old_columns)
