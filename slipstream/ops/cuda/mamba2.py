# pyright: basic, reportMissingImports=false, reportInvalidTypeForm=false, reportAttributeAccessIssue=false, reportArgumentType=false, reportIndexIssue=false, reportCallIssue=false, reportOperatorIssue=false
"""Mamba-2: one kernel a step for decode rows, chunks of CHUNK tokens for prompts (arXiv:2405.21060, section 6)."""

from typing import Any

from torch import Tensor

from slipstream.ops.cuda.conv import causal_conv
from slipstream.ops.cuda.gated_delta import softplus
from slipstream.ops.cuda.launch import jit, power, tl
from slipstream.ops.cuda.prompt_blocks import CHUNK
from slipstream.ops.layers import Mamba2


@jit
def _limited(dt, low, high):
    return tl.minimum(tl.maximum(softplus(dt), low), high)


@jit(do_not_specialize=["low", "high"])
def mamba2_decode_kernel(
    mixed, x, slots, decodes, rate, dt_bias, skip, state, out, stride, state_stride, low, high,
    HEADS: tl.constexpr, P: tl.constexpr, GROUPS: tl.constexpr, N: tl.constexpr, PP: tl.constexpr, NP: tl.constexpr,
):  # fmt: skip
    """One (decode row, head): one token through its state [P, N], and the output before its norm.

    mixed [T, HEADS * P + 2 * GROUPS * N] comes from the convolution; x rows are `stride` apart: gate, channels, dt.
    """
    row, head = tl.program_id(0), tl.program_id(1)
    if row >= tl.load(decodes):
        return
    CHANNELS: tl.constexpr = HEADS * P + 2 * GROUPS * N
    p, n = tl.arange(0, PP), tl.arange(0, NP)
    in_p, in_n = p < P, n < N
    own = mixed + row.to(tl.int64) * CHANNELS
    group = head // (HEADS // GROUPS)
    value = tl.load(own + head * P + p, mask=in_p, other=0.0).to(tl.float32)
    b = tl.load(own + HEADS * P + group * N + n, mask=in_n, other=0.0).to(tl.float32)
    c = tl.load(own + HEADS * P + (GROUPS + group) * N + n, mask=in_n, other=0.0).to(tl.float32)
    dt = tl.load(x + row.to(tl.int64) * stride + HEADS * P + CHANNELS + head).to(tl.float32)
    dt = _limited(dt + tl.load(dt_bias + head), low, high)
    slot = tl.load(slots + row).to(tl.int64)
    at = state + slot * state_stride + (head * P + p[:, None]) * N + n[None, :]
    both = in_p[:, None] & in_n[None, :]
    kept = tl.load(at, mask=both, other=0.0) * tl.exp(-tl.load(rate + head) * dt)
    kept += (value * dt)[:, None] * b[None, :]
    tl.store(at, kept, mask=both)
    result = tl.sum(kept * c[None, :], 1) + tl.load(skip + head) * value
    tl.store(out + (row.to(tl.int64) * HEADS + head) * P + p, result.to(out.dtype.element_ty), mask=in_p)


@jit(do_not_specialize=["low", "high"])
def mamba2_chunks_kernel(
    mixed, x, rows, counts, rate, dt_bias, skip, state, out, stride, state_stride, low, high,
    HEADS: tl.constexpr, P: tl.constexpr, GROUPS: tl.constexpr, N: tl.constexpr, PP: tl.constexpr, NP: tl.constexpr,
    CHUNK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A (prompt row, head) through the row's chunks, in turns; rows as in `delta_chunks_kernel`."""
    CHANNELS: tl.constexpr = HEADS * P + 2 * GROUPS * N
    DTYPE: tl.constexpr = mixed.dtype.element_ty
    i, p, n = tl.arange(0, CHUNK), tl.arange(0, PP), tl.arange(0, NP)
    in_p, in_n = p < P, n < N
    items = tl.load(counts) * HEADS
    for turn in range(tl.cdiv(items - tl.program_id(0), tl.num_programs(0))):
        item = tl.program_id(0) + turn * tl.num_programs(0)
        row, head = item // HEADS, item % HEADS
        group = head // (HEADS // GROUPS)
        slot, first = tl.load(rows + 4 * row).to(tl.int64), tl.load(rows + 4 * row + 1)
        tokens = tl.load(rows + 4 * row + 2)
        at = state + slot * state_stride + (head * P + p[:, None]) * N + n[None, :]
        both = in_p[:, None] & in_n[None, :]
        kept = tl.load(at, mask=both, other=0.0)
        for begin in range(0, tokens, CHUNK):
            real = i < tokens - begin
            token = (first + begin + tl.where(real, i, 0)).to(tl.int64)
            own = mixed + token[:, None] * CHANNELS
            dt = tl.load(x + token * stride + HEADS * P + CHANNELS + head).to(tl.float32)
            dt = tl.where(real, _limited(dt + tl.load(dt_bias + head), low, high), 0.0)
            decay = tl.cumsum(-tl.load(rate + head) * dt, 0)
            last = tl.sum(-tl.load(rate + head) * dt, 0)
            keep_n = real[:, None] & in_n[None, :]
            value = tl.load(own + head * P + p[None, :], mask=real[:, None] & in_p[None, :], other=0.0)
            b = tl.load(own + HEADS * P + group * N + n[None, :], mask=keep_n, other=0.0)
            c = tl.load(own + HEADS * P + (GROUPS + group) * N + n[None, :], mask=keep_n, other=0.0)
            between = tl.exp(tl.where(i[:, None] >= i[None, :], decay[:, None] - decay[None, :], -1e30)) * dt[None, :]
            score = (tl.dot(c, tl.trans(b), input_precision=PRECISION) * between).to(DTYPE)
            result = tl.dot(score, value, input_precision=PRECISION)
            read = (c.to(tl.float32) * tl.exp(decay)[:, None]).to(DTYPE)
            result = tl.dot(read, tl.trans(kept.to(DTYPE)), result, input_precision=PRECISION)
            result += tl.load(skip + head) * value.to(tl.float32)
            into = out + (token[:, None] * HEADS + head) * P + p[None, :]
            tl.store(into, result.to(DTYPE), mask=real[:, None] & in_p[None, :])
            added = (value.to(tl.float32) * (dt * tl.exp(last - decay))[:, None]).to(DTYPE)
            kept = tl.dot(tl.trans(added), b, kept * tl.exp(last), input_precision=PRECISION)
        tl.store(at, kept, mask=both)


@jit
def mamba2_norm_kernel(
    x, norm, out, stride, eps, WIDTH: tl.constexpr, WP: tl.constexpr, NORM: tl.constexpr, BEFORE: tl.constexpr
):  # fmt: skip
    """One (token, group) of WIDTH values: out times silu of its gate, with an RMSNorm before or behind, in place."""
    token, group, w = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.arange(0, WP)
    inside = w < WIDTH
    at = out + (token * tl.num_programs(1) + group) * WIDTH + w
    value = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    z = tl.load(x + token * stride + group * WIDTH + w, mask=inside, other=0.0).to(tl.float32)
    gate = z / (1.0 + tl.exp(-z))
    if not BEFORE:
        value *= gate
    if NORM:
        value *= tl.rsqrt(tl.sum(value * value, 0) / WIDTH + eps)
        value *= tl.load(norm + group * WIDTH + w, mask=inside, other=0.0).to(tl.float32)
    if BEFORE:
        value *= gate
    tl.store(at, value.to(out.dtype.element_ty), mask=inside)


def mamba2(x: Tensor, spec: Mamba2, step: Any, programs: int, precision: str) -> Tensor:
    """See `Ops.mamba2`. `programs` is how many programs share the work of prompts."""
    heads, p, n, groups = spec.num_heads, spec.head_dim, spec.state_dim, spec.groups
    out = x.new_empty((x.shape[0], heads * p))
    if not heads:
        return out
    columns, state = step.caches[spec.cache]
    mixed = causal_conv(x[:, heads * p :], spec.conv, spec.conv_bias, columns, step)
    sizes = {"HEADS": heads, "P": p, "GROUPS": groups, "N": n, "PP": max(16, power(p)), "NP": max(16, power(n))}
    values = spec.rate, spec.dt_bias, spec.skip, state, out, x.stride(0), state.stride(0), *spec.dt_limits
    mamba2_decode_kernel[(step.decode_rows, heads)](mixed, x, step.slots, step.decodes, *values, num_warps=4, **sizes)
    if step.prompts:
        mamba2_chunks_kernel[(2 * programs,)](
            mixed, x, step.rows, step.row_counts, *values, CHUNK=CHUNK, PRECISION=precision, num_warps=4, num_stages=2, **sizes
        )  # fmt: skip
    width = heads * p // groups
    norm = spec.norm
    mamba2_norm_kernel[(x.shape[0], groups)](
        x, out if norm is None else norm.weight, out, x.stride(0), 0.0 if norm is None else norm.eps, WIDTH=width,
        WP=power(width), NORM=norm is not None, BEFORE=spec.norm_before_gate, num_warps=4,
    )  # fmt: skip
    return out
