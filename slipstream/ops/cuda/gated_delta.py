# pyright: basic, reportMissingImports=false, reportInvalidTypeForm=false, reportAttributeAccessIssue=false, reportArgumentType=false, reportIndexIssue=false, reportCallIssue=false, reportOperatorIssue=false
"""The gated delta net on Hopper and older: one kernel a step for decode rows, chunks of CHUNK tokens for prompts.

Chunks follow the WY form of "Parallelizing Linear Transformers with the Delta Rule" (arXiv:2406.06484) with the decay of
arXiv:2412.06464: with A the strictly lower part of beta_i k_i.k_j decay(j..i), the corrected values of a chunk are
(1 + A)^-1 (beta v - beta k decay S), where S is the state before it. Everything but S is computed for all chunks at once.
"""

from typing import Any

import torch
from torch import Tensor

from slipstream.ops.cuda.conv import causal_conv
from slipstream.ops.cuda.launch import cdiv, jit, power, tl
from slipstream.ops.cuda.prompt_blocks import CHUNK
from slipstream.ops.layers import GatedDelta

TILE = 16  # tokens of the blocks whose inverses are computed row by row
DECODE_VALUES, CHUNK_VALUES = 64, 32  # columns of the state that one program has (measured: docs/gpu_log.md)
EPS = 1e-6  # under the root of a query's or key's length


@jit
def softplus(x):
    return tl.where(x > 20.0, x, tl.log(1.0 + tl.exp(tl.minimum(x, 20.0))))


@jit
def delta_decode_kernel(
    mixed, x, slots, decodes, rate, dt_bias, state, out, stride, state_stride,
    HEADS: tl.constexpr, GROUP: tl.constexpr, K: tl.constexpr, V: tl.constexpr, KP: tl.constexpr, B: tl.constexpr,
    EPS: tl.constexpr,
):  # fmt: skip
    """One (decode row, value head, B values): one token through its part of the state [K, V], and the output before its norm.

    mixed [T, 2 * keys * K + HEADS * V] comes from the convolution; x rows are `stride` apart and hold gate, b and a behind
    as many channels.
    """
    row, head = tl.program_id(0), tl.program_id(1)
    if row >= tl.load(decodes):
        return
    CHANNELS: tl.constexpr = 2 * (HEADS // GROUP) * K + HEADS * V
    k, v = tl.arange(0, KP), tl.program_id(2) * B + tl.arange(0, B)
    in_k, in_v = k < K, v < V
    own = mixed + row.to(tl.int64) * CHANNELS
    slot = tl.load(slots + row).to(tl.int64)
    at = state + slot * state_stride + (head * K + k[:, None]) * V + v[None, :]
    both = in_k[:, None] & in_v[None, :]
    kept = tl.load(at, mask=both, other=0.0)
    query = tl.load(own + head // GROUP * K + k, mask=in_k, other=0.0).to(tl.float32)
    key = tl.load(own + (HEADS // GROUP + head // GROUP) * K + k, mask=in_k, other=0.0).to(tl.float32)
    value = tl.load(own + 2 * (HEADS // GROUP) * K + head * V + v, mask=in_v, other=0.0).to(tl.float32)
    query *= tl.rsqrt(tl.sum(query * query, 0) + EPS) * (K**-0.5)
    key *= tl.rsqrt(tl.sum(key * key, 0) + EPS)
    rest = x + row.to(tl.int64) * stride + CHANNELS + HEADS * V
    beta = tl.load(rest + head).to(tl.float32)
    beta = 1.0 / (1.0 + tl.exp(-beta))
    a = tl.load(rest + HEADS + head).to(tl.float32) + tl.load(dt_bias + head)
    kept *= tl.exp(-tl.load(rate + head) * softplus(a))
    change = (value - tl.sum(kept * key[:, None], 0)) * beta
    kept += key[:, None] * change[None, :]
    tl.store(at, kept, mask=both)
    result = tl.sum(kept * query[:, None], 0)
    tl.store(out + (row.to(tl.int64) * HEADS + head) * V + v, result.to(out.dtype.element_ty), mask=in_v)


@jit
def gated_norm_kernel(
    x, decodes, norm, out, stride, eps, CHANNELS: tl.constexpr, V: tl.constexpr, VP: tl.constexpr
):  # fmt: skip
    """One (decode row, value head): the gated norm of out [T, heads, V], in place."""
    token, head, v = tl.program_id(0), tl.program_id(1), tl.arange(0, VP)
    if token >= tl.load(decodes):
        return
    in_v = v < V
    at = out + (token.to(tl.int64) * tl.num_programs(1) + head) * V + v
    z = tl.load(x + token.to(tl.int64) * stride + CHANNELS + head * V + v, mask=in_v, other=0.0).to(tl.float32)
    w = tl.load(norm + v, mask=in_v, other=0.0).to(tl.float32)
    value = tl.load(at, mask=in_v, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value, 0) / V + eps)
    tl.store(at, gated(value * scale, w, z, out.dtype.element_ty), mask=in_v)


@jit
def gated(normed, weight, z, DTYPE: tl.constexpr):
    """Values of unit mean square times weight and silu(z), rounded where the reference rounds."""
    return ((normed.to(DTYPE).to(tl.float32) * weight).to(DTYPE).to(tl.float32) * (z / (1.0 + tl.exp(-z)))).to(DTYPE)


@jit
def _inverse(a, TILE: tl.constexpr):
    """(1 + a)^-1 of a strictly lower triangular float32 [TILE, TILE], row by row."""
    r = tl.arange(0, TILE)
    result = tl.where(r[:, None] == r[None, :], 1.0, 0.0)
    for i in tl.static_range(1, TILE):
        row = tl.sum(tl.where(r[:, None] == i, a, 0.0), 0)
        row = tl.sum(row[:, None] * tl.where(r[:, None] < i, result, 0.0), 0)
        result = tl.where(r[:, None] == i, result - row[None, :], result)
    return result


@jit
def _block(at, i: tl.constexpr, j: tl.constexpr, TILE: tl.constexpr, CHUNK: tl.constexpr):
    r = tl.arange(0, TILE)
    return at + (i * TILE + r[:, None]) * CHUNK + j * TILE + r[None, :]


@jit
def _join(left, middle, right, PRECISION: tl.constexpr):
    """-left @ middle @ right."""
    return -tl.dot(tl.dot(left, middle, input_precision=PRECISION), right, input_precision=PRECISION)


@jit
def _invert_chunk(system, TILE: tl.constexpr, CHUNK: tl.constexpr, PRECISION: tl.constexpr):
    """Replaces the strictly lower triangular matrix a float32 [CHUNK, CHUNK] at `system` by (1 + a)^-1: four blocks a side.

    Block (i, j) of the inverse is -inverse(i, i) @ the sum over j <= m < i of a(i, m) inverse(m, j).
    """
    a10 = tl.load(_block(system, 1, 0, TILE, CHUNK))
    a20 = tl.load(_block(system, 2, 0, TILE, CHUNK))
    a21 = tl.load(_block(system, 2, 1, TILE, CHUNK))
    a30 = tl.load(_block(system, 3, 0, TILE, CHUNK))
    a31 = tl.load(_block(system, 3, 1, TILE, CHUNK))
    a32 = tl.load(_block(system, 3, 2, TILE, CHUNK))
    t0 = _inverse(tl.load(_block(system, 0, 0, TILE, CHUNK)), TILE)
    t1 = _inverse(tl.load(_block(system, 1, 1, TILE, CHUNK)), TILE)
    t2 = _inverse(tl.load(_block(system, 2, 2, TILE, CHUNK)), TILE)
    t3 = _inverse(tl.load(_block(system, 3, 3, TILE, CHUNK)), TILE)
    t10 = _join(t1, a10, t0, PRECISION)
    t21 = _join(t2, a21, t1, PRECISION)
    t32 = _join(t3, a32, t2, PRECISION)
    s20 = tl.dot(a20, t0, input_precision=PRECISION) + tl.dot(a21, t10, input_precision=PRECISION)
    t20 = -tl.dot(t2, s20, input_precision=PRECISION)
    s31 = tl.dot(a31, t1, input_precision=PRECISION) + tl.dot(a32, t21, input_precision=PRECISION)
    t31 = -tl.dot(t3, s31, input_precision=PRECISION)
    s30 = tl.dot(a30, t0, input_precision=PRECISION) + tl.dot(a31, t10, input_precision=PRECISION)
    s30 += tl.dot(a32, t20, input_precision=PRECISION)
    t30 = -tl.dot(t3, s30, input_precision=PRECISION)
    tl.store(_block(system, 0, 0, TILE, CHUNK), t0)
    tl.store(_block(system, 1, 1, TILE, CHUNK), t1)
    tl.store(_block(system, 2, 2, TILE, CHUNK), t2)
    tl.store(_block(system, 3, 3, TILE, CHUNK), t3)
    tl.store(_block(system, 1, 0, TILE, CHUNK), t10)
    tl.store(_block(system, 2, 0, TILE, CHUNK), t20)
    tl.store(_block(system, 2, 1, TILE, CHUNK), t21)
    tl.store(_block(system, 3, 0, TILE, CHUNK), t30)
    tl.store(_block(system, 3, 1, TILE, CHUNK), t31)
    tl.store(_block(system, 3, 2, TILE, CHUNK), t32)


@jit
def _rates(at, rate, dt_bias, head, real, HEADS: tl.constexpr):
    """beta and the logarithm of the decay of tokens whose b, then a, stand at `at`; 0 for both where not real."""
    beta = tl.load(at + head).to(tl.float32)
    a = tl.load(at + HEADS + head).to(tl.float32) + tl.load(dt_bias + head)
    beta = tl.where(real, 1.0 / (1.0 + tl.exp(-beta)), 0.0)
    return beta, tl.where(real, -tl.load(rate + head) * softplus(a), 0.0)


@jit
def delta_prepare_kernel(
    mixed, x, chunks, counts, rate, dt_bias, factors, systems, scores, stride,
    HEADS: tl.constexpr, GROUP: tl.constexpr, K: tl.constexpr, V: tl.constexpr, KP: tl.constexpr, CHUNK: tl.constexpr,
    EPS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """What of a (chunk, value head) needs no state, in turns. Queries and keys count with length 1.

    chunks int32 [*, 2] of (first token, tokens); counts int32 [2] of (rows, chunks). By chunk and head: factors float32
    [2, CHUNK], what queries that read the state before the chunk and keys that go into the state behind it are multiplied by;
    systems float32 [CHUNK, CHUNK], A, whose place (1 + A)^-1 takes; scores [CHUNK, CHUNK], q.k with their decays; then keys
    [CHUNK, K] and values [CHUNK, V]: that inverse times beta k decay and beta v.
    """
    CHANNELS: tl.constexpr = 2 * (HEADS // GROUP) * K + HEADS * V
    DTYPE: tl.constexpr = mixed.dtype.element_ty
    i, k = tl.arange(0, CHUNK), tl.arange(0, KP)
    items = tl.load(counts + 1) * HEADS
    for turn in range(tl.cdiv(items - tl.program_id(0), tl.num_programs(0))):
        item = tl.program_id(0) + turn * tl.num_programs(0)
        chunk, head = item // HEADS, item % HEADS
        first, tokens = tl.load(chunks + 2 * chunk), tl.load(chunks + 2 * chunk + 1)
        real = i < tokens
        token = (first + tl.where(real, i, 0)).to(tl.int64)
        beta, log_decay = _rates(x + token * stride + CHANNELS + HEADS * V, rate, dt_bias, head, real, HEADS)
        decay = tl.cumsum(log_decay, 0)
        base = item.to(tl.int64)
        own = mixed + token[:, None] * CHANNELS
        keep = real[:, None] & (k < K)[None, :]
        query = tl.load(own + head // GROUP * K + k[None, :], mask=keep, other=0.0).to(tl.float32)
        key = tl.load(own + (HEADS // GROUP + head // GROUP) * K + k[None, :], mask=keep, other=0.0).to(tl.float32)
        unit_q = tl.rsqrt(tl.sum(query * query, 1) + EPS) * (K**-0.5)
        unit_k = tl.rsqrt(tl.sum(key * key, 1) + EPS)
        tl.store(factors + base * 2 * CHUNK + i, unit_q * tl.exp(decay))
        tl.store(factors + base * 2 * CHUNK + CHUNK + i, unit_k * tl.exp(tl.sum(log_decay, 0) - decay))
        between = tl.exp(tl.where(i[:, None] >= i[None, :], decay[:, None] - decay[None, :], -1e30))
        plain = (key * unit_k[:, None]).to(DTYPE)
        score = tl.dot((query * unit_q[:, None]).to(DTYPE), tl.trans(plain), input_precision=PRECISION) * between
        square = base * CHUNK * CHUNK + i[:, None] * CHUNK + i[None, :]
        tl.store(scores + square, score.to(DTYPE))
        scaled = (key * (unit_k * beta)[:, None]).to(DTYPE)
        same = tl.dot(scaled, tl.trans(plain), input_precision=PRECISION) * between
        tl.store(systems + square, tl.where(i[:, None] > i[None, :], same, 0.0))


@jit
def delta_invert_kernel(systems, counts, HEADS: tl.constexpr, CHUNK: tl.constexpr, TILE: tl.constexpr, PRECISION: tl.constexpr):
    """The inverses of the systems of `delta_prepare_kernel`, each by one warp: rows follow one another without a barrier."""
    item = tl.program_id(0)
    if item < tl.load(counts + 1) * HEADS:
        _invert_chunk(systems + item.to(tl.int64) * CHUNK * CHUNK, TILE, CHUNK, PRECISION)


@jit
def delta_correct_kernel(
    mixed, x, chunks, counts, rate, dt_bias, systems, keys, values, stride,
    HEADS: tl.constexpr, GROUP: tl.constexpr, K: tl.constexpr, V: tl.constexpr, KP: tl.constexpr, VP: tl.constexpr,
    CHUNK: tl.constexpr, EPS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The inverse of a (chunk, value head) times its keys and values; see `delta_prepare_kernel`."""
    CHANNELS: tl.constexpr = 2 * (HEADS // GROUP) * K + HEADS * V
    DTYPE: tl.constexpr = mixed.dtype.element_ty
    i, k, v = tl.arange(0, CHUNK), tl.arange(0, KP), tl.arange(0, VP)
    items = tl.load(counts + 1) * HEADS
    for turn in range(tl.cdiv(items - tl.program_id(0), tl.num_programs(0))):
        item = tl.program_id(0) + turn * tl.num_programs(0)
        head, base = item % HEADS, item.to(tl.int64)
        first, tokens = tl.load(chunks + 2 * (item // HEADS)), tl.load(chunks + 2 * (item // HEADS) + 1)
        real = i < tokens
        token = (first + tl.where(real, i, 0)).to(tl.int64)
        beta, log_decay = _rates(x + token * stride + CHANNELS + HEADS * V, rate, dt_bias, head, real, HEADS)
        own = mixed + token[:, None] * CHANNELS
        in_k, in_v = (k < K)[None, :], (v < V)[None, :]
        key = tl.load(own + (HEADS // GROUP + head // GROUP) * K + k[None, :], mask=real[:, None] & in_k, other=0.0)
        key = key.to(tl.float32)
        unit = tl.rsqrt(tl.sum(key * key, 1) + EPS)
        key = (key * (unit * beta * tl.exp(tl.cumsum(log_decay, 0)))[:, None]).to(DTYPE)
        inverse = tl.load(systems + base * CHUNK * CHUNK + i[:, None] * CHUNK + i[None, :]).to(DTYPE)
        at = base * CHUNK * K + i[:, None] * K + k[None, :]
        tl.store(keys + at, tl.dot(inverse, key, input_precision=PRECISION).to(DTYPE), mask=in_k)
        value = tl.load(own + 2 * (HEADS // GROUP) * K + head * V + v[None, :], mask=real[:, None] & in_v, other=0.0)
        value = (value.to(tl.float32) * beta[:, None]).to(DTYPE)
        at = base * CHUNK * V + i[:, None] * V + v[None, :]
        tl.store(values + at, tl.dot(inverse, value, input_precision=PRECISION).to(DTYPE), mask=in_v)


@jit
def delta_states_kernel(
    mixed, x, rows, counts, rate, dt_bias, factors, keys, values, before, state, stride, state_stride,
    HEADS: tl.constexpr, GROUP: tl.constexpr, K: tl.constexpr, V: tl.constexpr, KP: tl.constexpr, B: tl.constexpr,
    CHUNK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """B columns of the state of a (prompt row, value head) through the row's chunks, which programs take in turns.

    rows int32 [*, 4] of (slot, first token, tokens, first chunk). By chunk and head: before [K, V] gets the state that the
    chunk finds, and values [CHUNK, V] become the corrected ones.
    """
    CHANNELS: tl.constexpr = 2 * (HEADS // GROUP) * K + HEADS * V
    DTYPE: tl.constexpr = mixed.dtype.element_ty
    PARTS: tl.constexpr = (V + B - 1) // B
    i, k = tl.arange(0, CHUNK), tl.arange(0, KP)
    in_k = k < K
    items = tl.load(counts) * HEADS * PARTS
    for turn in range(tl.cdiv(items - tl.program_id(0), tl.num_programs(0))):
        item = tl.program_id(0) + turn * tl.num_programs(0)
        row, head = item // (HEADS * PARTS), item // PARTS % HEADS
        v = item % PARTS * B + tl.arange(0, B)
        in_v = v < V
        slot, first = tl.load(rows + 4 * row).to(tl.int64), tl.load(rows + 4 * row + 1)
        tokens, chunk = tl.load(rows + 4 * row + 2), tl.load(rows + 4 * row + 3)
        at = state + slot * state_stride + (head * K + k[:, None]) * V + v[None, :]
        both = in_k[:, None] & in_v[None, :]
        kept = tl.load(at, mask=both, other=0.0)
        for begin in range(0, tokens, CHUNK):
            base = ((chunk + begin // CHUNK) * HEADS + head).to(tl.int64)
            real = i < tokens - begin
            token = (first + begin + tl.where(real, i, 0)).to(tl.int64)
            weight = tl.load(keys + base * CHUNK * K + i[:, None] * K + k[None, :], mask=in_k[None, :], other=0.0)
            value_at = values + base * CHUNK * V + i[:, None] * V + v[None, :]
            value = tl.load(value_at, mask=in_v[None, :], other=0.0)
            key = tl.load(
                mixed + token[:, None] * CHANNELS + (HEADS // GROUP + head // GROUP) * K + k[None, :],
                mask=real[:, None] & in_k[None, :], other=0.0,
            )  # fmt: skip
            factor = tl.load(factors + base * 2 * CHUNK + CHUNK + i)
            _, log_decay = _rates(x + token * stride + CHANNELS + HEADS * V, rate, dt_bias, head, real, HEADS)
            decay = tl.exp(tl.sum(log_decay, 0))
            here = kept.to(DTYPE)
            tl.store(before + (base * K + k[:, None]) * V + v[None, :], here, mask=both)
            value = (value.to(tl.float32) - tl.dot(weight, here, input_precision=PRECISION)).to(DTYPE)
            tl.store(value_at, value, mask=in_v[None, :])
            key = (key.to(tl.float32) * factor[:, None]).to(DTYPE)
            kept = tl.dot(tl.trans(key), value, kept * decay, input_precision=PRECISION)
        tl.store(at, kept, mask=both)


@jit
def delta_outputs_kernel(
    mixed, x, chunks, counts, norm, factors, scores, values, before, out, stride, eps,
    HEADS: tl.constexpr, GROUP: tl.constexpr, K: tl.constexpr, V: tl.constexpr, KP: tl.constexpr, VP: tl.constexpr,
    CHUNK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The outputs of a (chunk, value head), with their gated norm, which programs take in turns."""
    CHANNELS: tl.constexpr = 2 * (HEADS // GROUP) * K + HEADS * V
    DTYPE: tl.constexpr = mixed.dtype.element_ty
    i, k, v = tl.arange(0, CHUNK), tl.arange(0, KP), tl.arange(0, VP)
    in_k, in_v = k < K, v < V
    items = tl.load(counts + 1) * HEADS
    for turn in range(tl.cdiv(items - tl.program_id(0), tl.num_programs(0))):
        item = tl.program_id(0) + turn * tl.num_programs(0)
        chunk, head = item // HEADS, item % HEADS
        first, tokens = tl.load(chunks + 2 * chunk), tl.load(chunks + 2 * chunk + 1)
        real = i < tokens
        token = (first + tl.where(real, i, 0)).to(tl.int64)
        base = item.to(tl.int64)
        query = tl.load(
            mixed + token[:, None] * CHANNELS + head // GROUP * K + k[None, :], mask=real[:, None] & in_k[None, :], other=0.0
        )  # fmt: skip
        query = (query.to(tl.float32) * tl.load(factors + base * 2 * CHUNK + i)[:, None]).to(DTYPE)
        state = tl.load(before + (base * K + k[:, None]) * V + v[None, :], mask=in_k[:, None] & in_v[None, :], other=0.0)
        score = tl.load(scores + base * CHUNK * CHUNK + i[:, None] * CHUNK + i[None, :])
        value = tl.load(values + base * CHUNK * V + i[:, None] * V + v[None, :], mask=in_v[None, :], other=0.0)
        result = tl.dot(query, state, input_precision=PRECISION)
        result = tl.dot(score, value, result, input_precision=PRECISION).to(DTYPE).to(tl.float32)
        result *= tl.rsqrt(tl.sum(result * result, 1) / V + eps)[:, None]
        keep = real[:, None] & in_v[None, :]
        z = tl.load(x + token[:, None] * stride + CHANNELS + head * V + v[None, :], mask=keep, other=0.0).to(tl.float32)
        w = tl.load(norm + v, mask=in_v, other=0.0).to(tl.float32)
        tl.store(out + (token[:, None] * HEADS + head) * V + v[None, :], gated(result, w[None, :], z, DTYPE), mask=keep)


def gated_delta(x: Tensor, spec: GatedDelta, step: Any, programs: int, side: torch.cuda.Stream, precision: str) -> Tensor:
    """See `Ops.gated_delta`. `programs` is how many programs share the work of prompts; decode rows run beside it."""
    heads, k, v = spec.heads.num_q_heads, spec.key_dim, spec.value_dim
    out = x.new_empty((x.shape[0], heads * v))
    if not heads:
        return out
    columns, state = step.caches[spec.cache]
    mixed = causal_conv(x, spec.conv, None, columns, step)
    sizes = {"HEADS": heads, "GROUP": heads // spec.heads.num_kv_heads, "K": k, "V": v, "KP": max(16, power(k))}
    if not step.prompts:
        _decodes(x, mixed, state, out, spec, step, sizes)
        return out
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # decode rows wait for memory, prompts for their steps one after another
        _decodes(x, mixed, state, out, spec, step, sizes)
    _prompts(x, mixed, state, out, spec, step, programs, sizes | {"CHUNK": CHUNK, "PRECISION": precision})
    torch.cuda.current_stream().wait_stream(side)
    return out


def _decodes(x: Tensor, mixed: Tensor, state: Tensor, out: Tensor, spec: GatedDelta, step: Any, sizes: dict[str, Any]) -> None:
    heads, v, norm = sizes["HEADS"], sizes["V"], spec.norm
    delta_decode_kernel[(step.decode_rows, heads, cdiv(v, DECODE_VALUES))](
        mixed, x, step.slots, step.decodes, spec.rate, spec.dt_bias, state, out, x.stride(0), state.stride(0),
        B=DECODE_VALUES, EPS=EPS, num_warps=4, **sizes,
    )  # fmt: skip
    gated_norm_kernel[(step.decode_rows, heads)](
        x, step.decodes, norm.weight, out, x.stride(0), norm.eps, CHANNELS=spec.channels, V=v, VP=max(16, power(v)), num_warps=1
    )  # fmt: skip


def _prompts(
    x: Tensor, mixed: Tensor, state: Tensor, out: Tensor, spec: GatedDelta, step: Any, programs: int, sizes: dict[str, Any]
) -> None:
    k, v, norm = sizes["K"], sizes["V"], spec.norm
    vp, items = max(16, power(v)), step.chunks.shape[0] * sizes["HEADS"]
    factors = torch.empty((items, 2, CHUNK), dtype=torch.float32, device=x.device)
    systems = torch.empty((items, CHUNK, CHUNK), dtype=torch.float32, device=x.device)
    scores, keys, values = (x.new_empty((items, CHUNK, n)) for n in (CHUNK, k, v))
    before = x.new_empty((items, k, v))
    given = mixed, x, step.chunks, step.row_counts, spec.rate, spec.dt_bias
    delta_prepare_kernel[(4 * programs,)](
        *given, factors, systems, scores, x.stride(0), EPS=EPS, num_warps=4, num_stages=1, **sizes
    )  # fmt: skip
    delta_invert_kernel[(items,)](
        systems, step.row_counts, HEADS=sizes["HEADS"], CHUNK=CHUNK, TILE=TILE, PRECISION=sizes["PRECISION"], num_warps=1
    )  # fmt: skip
    delta_correct_kernel[(4 * programs,)](
        *given, systems, keys, values, x.stride(0), VP=vp, EPS=EPS, num_warps=4, num_stages=1, **sizes
    )  # fmt: skip
    delta_states_kernel[(2 * programs,)](
        mixed, x, step.rows, step.row_counts, spec.rate, spec.dt_bias, factors, keys, values, before, state, x.stride(0),
        state.stride(0), B=CHUNK_VALUES, num_warps=4, num_stages=2, **sizes,
    )  # fmt: skip
    delta_outputs_kernel[(4 * programs,)](
        mixed, x, step.chunks, step.row_counts, norm.weight, factors, scores, values, before, out, x.stride(0), norm.eps,
        VP=vp, num_warps=4, num_stages=1, **sizes,
    )  # fmt: skip
