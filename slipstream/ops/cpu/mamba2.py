"""The Mamba-2 mixer in plain PyTorch: one update for all rows of one token, blocks of tokens for longer rows.

Blocks are those of the state space duality (arXiv:2405.21060, section 6): products of matrices within a block, and the state
between blocks.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from slipstream.ops.cpu.causal_conv import causal_conv
from slipstream.ops.cpu.paged import PagedStep
from slipstream.ops.cpu.state_blocks import cut, decays
from slipstream.ops.layers import Mamba2


def mamba2(x: Tensor, spec: Mamba2, step: PagedStep) -> tuple[Tensor, Tensor]:
    """The output before gate and norm, float32 [T, heads * head_dim], and the gate of the same shape as it came."""
    heads, groups = spec.num_heads, spec.groups
    columns, state = step.caches[spec.cache]
    gate, inner, dt = x.split([heads * spec.head_dim, spec.channels, heads], 1)
    mixed = causal_conv(inner, columns, spec.conv, spec.conv_bias, step).float()
    value, bc = mixed.split([heads * spec.head_dim, 2 * groups * spec.state_dim], 1)
    value = value.view(len(x), heads, spec.head_dim)
    b, c = bc.view(len(x), 2, groups, spec.state_dim).repeat_interleave(heads // groups, 2).unbind(1)
    dt = F.softplus(dt.float() + spec.dt_bias).clamp(*spec.dt_limits)
    log_decay, added = dt * -spec.rate, value * dt[..., None]
    out = torch.empty(value.shape)
    at, slots = step.singles
    if len(at):
        added1, b1, c1, decay1 = (t.index_select(0, at) for t in (added, b, c, log_decay))
        found, moved = _one_token(added1, b1, c1, decay1, state.index_select(0, slots))
        out.index_copy_(0, at, found)
        state.index_copy_(0, slots, moved)
    for slot, first, last in step.chunks:
        row = slice(first, last)
        _blocks(added[row], b[row], c[row], log_decay[row], state[slot], out[row])
    return out.addcmul_(value, spec.skip[:, None]).flatten(1), gate


def _one_token(added: Tensor, b: Tensor, c: Tensor, log_decay: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """added [n, heads, head_dim], b and c [n, heads, state_dim]: the output and the new state."""
    state = torch.addcmul(state * log_decay.exp()[..., None, None], added[..., None], b[:, :, None])
    return (state @ c[..., None]).squeeze(3), state


def _blocks(added: Tensor, b: Tensor, c: Tensor, log_decay: Tensor, state: Tensor, out: Tensor) -> None:
    """One request's tokens [n, heads, ...]: writes `out` [n, heads, head_dim] and moves state [heads, head_dim, state_dim]."""
    added, b, c, log_decay = cut((added, b, c, log_decay))
    since, between, until, whole = decays(log_decay)
    found = (c @ b.transpose(-1, -2)).mul_(between) @ added
    c, b = c * since, b * until
    now = state.clone()
    for i in range(c.shape[1]):
        found[:, i].baddbmm_(c[:, i], now.transpose(1, 2))
        now = torch.baddbmm(now * whole[:, i], added[:, i].transpose(1, 2), b[:, i])
    state.copy_(now)
    out.copy_(found.flatten(1, 2).transpose(0, 1)[: len(out)])
