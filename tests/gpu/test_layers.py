"""The kernels of recurrent layers, mixtures of experts and latent attention against plain loops in float64."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from slipstream.ops.layers import Experts, GatedDelta, LatentAttention, Mamba2, Routing
from slipstream.shard import Heads
from tests.gpu.test_ops import DEVICE, bound, error, make_ops, rotary

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
ROWS = {
    "decode": ([1, 1, 1], 3),
    "chunks": ([1, 130, 2, 64, 65], 1),
    "prompts alone": ([64, 3, 200], 0),
}


def put(values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def randn(*shape, scale=1.0, dtype=torch.float32) -> torch.Tensor:
    return (torch.randn(*shape, device=DEVICE) * scale).to(dtype)


def recurrent_step(counts: list[int], decodes: int, padding: int, caches) -> tuple[SimpleNamespace, list[int]]:
    """A step of rows of `counts` tokens, one a slot, and the slot of each token; padding rows name the slot behind them."""
    from slipstream.ops.cuda.prompt_blocks import cut_chunks

    ends = np.cumsum(counts)
    of_token = np.repeat(np.arange(len(counts)), counts)
    prompts = np.array([(r, 0, ends[r] - counts[r], counts[r]) for r in range(decodes, len(counts))], int).reshape(-1, 4)
    rows, chunks = np.zeros((8, 4), np.int32), np.zeros((32, 2), np.int32)
    numbers = cut_chunks(prompts, rows, chunks)
    step = SimpleNamespace(
        slots=put([*of_token, *[len(counts)] * padding]), decodes=put([decodes]), decode_rows=decodes + 2, caches=caches,
        prompts=len(prompts) > 0, rows=put(rows), chunks=put(chunks), row_counts=put(numbers),
    )  # fmt: skip
    return step, of_token.tolist()


def convolved(x, columns, weight, bias, dtype):
    """One token through the convolution of its slot in float64; columns [3, channels] are moved on."""
    whole = torch.cat([columns, x[None]])
    columns.copy_(whole[1:])
    y = (whole * weight.double()).sum(0) + (0 if bias is None else bias.double())
    return F.silu(y).to(dtype).double()


@DTYPES
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("values, keys, k, v", [(4, 2, 128, 128), (3, 3, 64, 32)])
def test_a_gated_delta_net_equals_its_recurrence(dtype, rows, values, keys, k, v):
    torch.manual_seed(0)
    (counts, decodes), ops = ROWS[rows], make_ops(dtype)
    channels, slots = 2 * keys * k + values * v, len(counts)
    columns, state = randn(slots + 1, 3, channels, dtype=dtype), randn(slots + 1, values, k, v, scale=0.1)
    spec = GatedDelta(
        0, Heads(0, values, 0, keys), k, v, randn(4, channels, scale=0.5), randn(values).abs(), randn(values, scale=0.3),
        ops.norm_weight(randn(v).abs().to(dtype), 1e-6),
    )  # fmt: skip
    old_columns, old_state = columns.double(), state.double()
    step, of_token = recurrent_step(counts, decodes, 5, [(columns, state)])
    x = randn(len(of_token) + 5, channels + values * v + 2 * values, dtype=dtype)
    got = ops.gated_delta(x, spec, step)[: len(of_token)]
    wanted = torch.zeros_like(got, dtype=torch.float64)
    for t, slot in enumerate(of_token):
        q, key, value = convolved(x[t, :channels].double(), old_columns[slot], spec.conv, None, dtype).split(
            [keys * k, keys * k, values * v]
        )
        q, key = (F.normalize(a.view(keys, k), dim=-1).repeat_interleave(values // keys, 0) for a in (q, key))
        gate, b, a = x[t, channels:].double().split([values * v, values, values])
        decay = (-spec.rate.double() * F.softplus(a + spec.dt_bias.double())).exp()
        s = old_state[slot] * decay[:, None, None]
        change = (value.view(values, v) - torch.einsum("hkv,hk->hv", s, key)) * b.sigmoid()[:, None]
        old_state[slot] = s + key[:, :, None] * change[:, None]
        out = torch.einsum("hkv,hk->hv", old_state[slot], q) * k**-0.5
        out = F.rms_norm(out, (v,), spec.norm.weight.double(), 1e-6) * F.silu(gate.view(values, v))
        wanted[t] = out.reshape(-1)
    assert error(got, wanted) < bound(dtype)
    assert error(columns[:slots], old_columns[:slots]) < bound(dtype)
    assert error(state[:slots], old_state[:slots]) < bound(dtype)


@DTYPES
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("heads, dim, groups, n, before", [(8, 64, 2, 128, False), (4, 32, 1, 16, True)])
def test_mamba2_equals_its_recurrence(dtype, rows, heads, dim, groups, n, before):
    torch.manual_seed(0)
    (counts, decodes), ops = ROWS[rows], make_ops(dtype)
    channels, slots = heads * dim + 2 * groups * n, len(counts)
    columns, state = randn(slots + 1, 3, channels, dtype=dtype), randn(slots + 1, heads, dim, n, scale=0.2)
    spec = Mamba2(
        0, heads, dim, groups, n, randn(4, channels, scale=0.5), randn(channels), randn(heads).abs(), randn(heads, scale=0.3),
        randn(heads), (0.01, 1.5), ops.norm_weight(randn(heads * dim).abs().to(dtype), 1e-5), before,
    )  # fmt: skip
    old_columns, old_state = columns.double(), state.double()
    step, of_token = recurrent_step(counts, decodes, 5, [(columns, state)])
    x = randn(len(of_token) + 5, heads * dim + channels + heads, dtype=dtype)
    got = ops.mamba2(x, spec, step)[: len(of_token)]
    wanted = torch.zeros_like(got, dtype=torch.float64)
    for t, slot in enumerate(of_token):
        gate, inner, dt = x[t].double().split([heads * dim, channels, heads])
        value, b, c = convolved(inner, old_columns[slot], spec.conv, spec.conv_bias, dtype).split(
            [heads * dim, groups * n, groups * n]
        )
        value = value.view(heads, dim)
        b, c = (a.view(groups, n).repeat_interleave(heads // groups, 0) for a in (b, c))
        dt = F.softplus(dt + spec.dt_bias.double()).clamp(*spec.dt_limits)
        decay = (-spec.rate.double() * dt).exp()[:, None, None]
        old_state[slot] = old_state[slot] * decay + (dt[:, None] * value)[:, :, None] * b[:, None]
        out = torch.einsum("hpn,hn->hp", old_state[slot], c) + spec.skip.double()[:, None] * value
        out, gate = out.reshape(groups, -1), F.silu(gate.view(groups, -1))
        out = out if before else out * gate
        out = F.rms_norm(out, (out.shape[1],), None, 1e-5) * spec.norm.weight.double().view(groups, -1)
        wanted[t] = (out * gate if before else out).reshape(-1)
    assert error(got, wanted) < bound(dtype)
    assert error(state[:slots], old_state[:slots]) < bound(dtype)


def chosen_experts(logits, routing: Routing) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and weights of each token's experts, in float64."""
    logits = logits.double() + (0 if routing.bias is None else routing.bias.double())
    scores = {"softmax": logits.softmax(-1), "sigmoid": logits.sigmoid(), "softmax_of_chosen": logits}[routing.score]
    choice = scores + (0 if routing.choice_bias is None else routing.choice_bias.double())
    if routing.groups > 1:
        by_group = choice.view(len(choice), routing.groups, -1)
        worth = by_group.topk(2, -1)[0].sum(-1)
        kept = torch.zeros_like(worth).scatter(1, worth.topk(routing.top_groups, -1)[1], 1)
        choice = by_group.masked_fill(kept[..., None] == 0, -1e9).view(len(choice), -1)
    ids = choice.topk(routing.top_k, -1)[1]
    weights = scores.gather(1, ids)
    if routing.score == "softmax_of_chosen":
        weights = weights.softmax(-1)
    if routing.normed:
        weights = weights / weights.sum(-1, keepdim=True)
    return ids, weights * routing.scale


KINDS = {
    "qwen3": (128, 8, {"score": "softmax", "normed": True}, "silu", False, False),
    "mixtral": (8, 2, {"score": "softmax", "normed": True}, "silu", False, False),
    "gpt-oss": (32, 4, {"score": "softmax_of_chosen"}, "swigluoai", True, False),
    "deepseek": (64, 6, {"score": "sigmoid", "normed": True, "groups": 8, "top_groups": 4, "scale": 2.5}, "silu", False, True),
    "no gate": (12, 3, {"score": "sigmoid", "normed": True}, "relu2", False, False),
}


@DTYPES
@pytest.mark.parametrize("tokens", [1, 5, 40, 300])
@pytest.mark.parametrize("kind", KINDS)
def test_experts_equal_a_loop_over_tokens(dtype, tokens, kind):
    torch.manual_seed(tokens)
    count, top, options, gate, bias, choice_bias = KINDS[kind]
    hidden, inner, gated, ops = 256, 96, gate != "relu2", make_ops(dtype)
    x = randn(tokens, hidden, dtype=dtype)
    up, down = (randn(count, a, b, scale=b**-0.5, dtype=dtype) for a, b in (((1 + gated) * inner, hidden), (hidden, inner)))
    up_bias, down_bias = (randn(count, n, dtype=dtype) if bias else None for n in (up.shape[1], hidden))
    routing = Routing(
        randn(count, hidden, scale=hidden**-0.5, dtype=dtype), top, bias=randn(count) if bias else None,
        choice_bias=randn(count).abs() if choice_bias else None, **options,
    )  # fmt: skip
    from slipstream.ops.cuda.experts import ExpertWeight

    spec = Experts(routing, ExpertWeight(up, up_bias), ExpertWeight(down, down_bias), gate)
    padding = 2 if tokens > 4 else 0
    step = SimpleNamespace(slots=put([*range(tokens - padding), *[tokens] * padding]), nobody=tokens)
    got = ops.experts(x, spec, step)[: tokens - padding]
    ids, weights = chosen_experts(torch.mm(x.float(), routing.router.float().t()), routing)
    wanted = torch.zeros_like(got, dtype=torch.float64)
    for t in range(tokens - padding):
        for e, weight in zip(ids[t].tolist(), weights[t], strict=True):
            a = up[e].double() @ x[t].double() + (up_bias[e].double() if bias else 0)
            if gate == "relu2":
                a = F.relu(a) ** 2
            else:
                g, u = a.chunk(2)
                g, u = (g.clamp(max=7), u.clamp(-7, 7) + 1) if gate == "swigluoai" else (g, u)
                a = (g * torch.sigmoid(1.702 * g) if gate == "swigluoai" else F.silu(g)) * u
            wanted[t] += weight * (down[e].double() @ a + (down_bias[e].double() if bias else 0))
    assert error(got, wanted) < bound(dtype)


@DTYPES
@pytest.mark.parametrize("heads", [4, 16, 20])
def test_latent_attention_equals_float64(dtype, heads):
    from slipstream.ops.cuda.prompt_blocks import COLUMNS

    torch.manual_seed(heads)
    ops, latent, nope, rope, value, page_size = make_ops(dtype), 512, 128, 64, 128, 64
    starts, counts, decodes = [40, 700, 0, 129], [1, 1, 150, 3], 2
    total, padding, columns = sum(counts), 3, 16
    spec = LatentAttention(
        0, 0, heads, latent, nope, rope, value, (nope + rope) ** -0.5, rotary(1024, rope),
        ops.norm_weight(randn(latent).abs().to(dtype), 1e-6), randn(heads, nope, latent, scale=nope**-0.5, dtype=dtype),
        randn(heads, value, latent, scale=latent**-0.5, dtype=dtype),
    )  # fmt: skip
    cache = torch.full((1 + columns * 4, page_size, latent + rope), float("nan"), device=DEVICE, dtype=dtype)
    cache[0] = 0
    table = torch.zeros((5, columns), dtype=torch.int32, device=DEVICE)
    table[:4] = 1 + torch.randperm(4 * columns, device=DEVICE).view(4, columns).int()
    past = [randn(n, latent + rope, dtype=dtype) for n in starts]
    for row, old in enumerate(past):
        for p in range(0, len(old), page_size):
            part = old[p : p + page_size]
            cache[table[row, p // page_size], : len(part)] = part
    of_token = np.repeat(np.arange(4), counts)
    positions = np.concatenate([np.arange(s, s + n) for s, n in zip(starts, counts, strict=True)])
    q = randn(total + padding, heads * (nope + rope), dtype=dtype)
    kv = randn(total + padding, latent + rope, dtype=dtype)
    firsts = np.cumsum(counts) - counts
    parts = np.zeros((128, COLUMNS), np.int32)
    numbers = ops.cutter(heads).cut([(r, starts[r], firsts[r], counts[r]) for r in (2, 3)], parts)
    from slipstream.ops.cuda.ops import scratch_heads

    units, dim = scratch_heads(spec)
    step = SimpleNamespace(
        slots=put([*of_token, *[4] * padding]), positions=put([*positions, *[0] * padding]), caches=[(cache,)], tables=[table],
        windows=(0,), scratch={(units, 0): ops.scratch(8, units, dim)}, prompt_scratch=ops.prompt_scratch(dim),
        page_size=page_size, decode_rows=6, decodes=put([decodes]), prompts=True, parts=put(parts), part_counts=put(numbers),
    )  # fmt: skip
    ops.begin(step)
    wanted = torch.zeros((total, heads * value), dtype=torch.float64, device=DEVICE)
    cos, sin = spec.rotary.double()[torch.from_numpy(positions).to(DEVICE)].chunk(2, -1)

    def turn(x, t):
        a, b = x.chunk(2, -1)
        return torch.cat([a * cos[t] - b * sin[t], b * cos[t] + a * sin[t]], -1)

    normed = F.rms_norm(kv[:total, :latent].double(), (latent,), spec.norm.weight.double(), 1e-6)
    own = torch.stack([torch.cat([normed[t], turn(kv[t, latent:].double(), t)]) for t in range(total)])
    for t, row in enumerate(of_token):
        seen = torch.cat([past[row].double(), own[firsts[row] : t + 1]])
        query = q[t].double().view(heads, -1)
        keys = torch.einsum("hnl,kl->hkn", spec.key_up.double(), seen[:, :latent])
        scores = torch.einsum("hn,hkn->hk", query[:, :nope], keys) + turn(query[:, nope:], t) @ seen[:, latent:].t()
        values = torch.einsum("hvl,kl->hkv", spec.value_up.double(), seen[:, :latent])
        wanted[t] = torch.einsum("hk,hkv->hv", (scores * spec.scale).softmax(-1), values).reshape(-1)
    for _ in range(2):  # the splits' counters are zero again after each kernel
        got = ops.latent_attention(q.clone(), kv.clone(), spec, step)[:total]
        assert error(got, wanted) < bound(dtype)
