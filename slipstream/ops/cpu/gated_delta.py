"""The gated delta net in plain PyTorch: one update for all rows of one token, blocks of tokens for longer rows.

Blocks follow the WY form of "Parallelizing Linear Transformers with the Delta Rule" (arXiv:2406.06484) with the decay of
arXiv:2412.06464. Everything that does not need the state is computed for all blocks at once.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from slipstream.ops.cpu.causal_conv import causal_conv
from slipstream.ops.cpu.paged import PagedStep
from slipstream.ops.cpu.state_blocks import cut, decays
from slipstream.ops.layers import GatedDelta

_EPS = 1e-6  # under the root of a query's or key's length


def gated_delta(x: Tensor, spec: GatedDelta, step: PagedStep) -> tuple[Tensor, Tensor]:
    """The output before its norm, float32 [T, value heads, value_dim], and the gate of the same shape as it came."""
    values, keys = spec.heads.num_q_heads, spec.heads.num_kv_heads
    columns, state = step.caches[spec.cache]
    inner, gate, b, a = x.split([spec.channels, values * spec.value_dim, values, values], 1)
    mixed = causal_conv(inner, columns, spec.conv, None, step).float()
    qk, v = mixed.split([2 * keys * spec.key_dim, values * spec.value_dim], 1)
    qk = qk.view(len(x), 2, keys, spec.key_dim)
    qk = qk * torch.rsqrt(qk.square().sum(-1, keepdim=True) + _EPS)
    q, k = qk.repeat_interleave(values // keys, 2).unbind(1)
    q = q * spec.key_dim**-0.5
    v = v.view(len(x), values, spec.value_dim)
    beta = b.float().sigmoid()[..., None]
    log_decay = F.softplus(a.float() + spec.dt_bias) * -spec.rate
    out = torch.empty(v.shape)
    at, slots = step.singles
    if len(at):
        q1, k1, v1, beta1, decay1 = (t.index_select(0, at) for t in (q, k, v, beta, log_decay))
        found, moved = _one_token(q1, k1, v1, beta1, decay1, state.index_select(0, slots))
        out.index_copy_(0, at, found)
        state.index_copy_(0, slots, moved)
    for slot, first, last in step.chunks:
        row = slice(first, last)
        _blocks(q[row], k[row], v[row], beta[row], log_decay[row], state[slot], out[row])
    return out, gate.view(v.shape)


def _one_token(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, log_decay: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """q, k [n, heads, key_dim], v [n, heads, value_dim], state [n, heads, key_dim, value_dim]: the output and the new state."""
    state = state * log_decay.exp()[..., None, None]
    change = (v - (k[:, :, None] @ state).squeeze(2)) * beta
    state.addcmul_(k[..., None], change[:, :, None])
    return (q[:, :, None] @ state).squeeze(2), state


def _blocks(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, log_decay: Tensor, state: Tensor, out: Tensor) -> None:
    """One request's tokens [n, heads, ...]: writes `out` [n, heads, value_dim] and moves its state [heads, key_dim, value_dim].

    What token i changes is v_i - k_i^T state, and the state has the changes of the tokens before it: a triangular system of
    a block's changes, solved here up to the state before the block.
    """
    q, k, v, beta, log_decay = cut((q, k, v, beta, log_decay))
    since, between, until, whole = decays(log_decay)
    scaled = k * beta
    system = (scaled @ k.transpose(-1, -2)).mul_(between)
    right = torch.cat([v * beta, scaled * since], -1)
    changes, seen = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True).split(
        [v.shape[-1], k.shape[-1]], -1
    )
    scores = (q @ k.transpose(-1, -2)).mul_(between)
    q, k = q * since, (k * until).transpose(-1, -2)
    found = torch.empty(v.shape)
    now = state.clone()
    for i in range(q.shape[1]):
        change = torch.baddbmm(changes[:, i], seen[:, i], now, alpha=-1)
        torch.baddbmm(scores[:, i] @ change, q[:, i], now, out=found[:, i])
        now = torch.baddbmm(now * whole[:, i], k[:, i], change)
    state.copy_(now)
    out.copy_(found.flatten(1, 2).transpose(0, 1)[: len(out)])
