# pyright: basic, reportMissingImports=false, reportInvalidTypeForm=false, reportAttributeAccessIssue=false, reportArgumentType=false, reportIndexIssue=false, reportCallIssue=false, reportOperatorIssue=false
"""Multi-head latent attention: every head's query is brought into the space of the cached vector, which all heads then read.

As in DeepSeek-V2's paper (arXiv:2405.04434, section 2.1.2) the up-projections of keys and values are taken into the query and
the output, so a token's cache is one vector of latent and rotated values, whatever the number of heads.
"""

from typing import Any

import torch
from torch import Tensor

from slipstream.ops.cuda.attention import COLUMNS, LOG2E, PAIR, finish_split
from slipstream.ops.cuda.launch import cdiv, jit, power, tl
from slipstream.ops.cuda.rows import norm_row
from slipstream.ops.layers import LatentAttention

HEADS = 16  # of one program of decode rows: as many rows as the matrix units take at least
TOKENS = 64  # of one program of prompts
TILE = 32  # cached tokens at a time


@jit(do_not_specialize=["q_stride", "kv_stride"])
def latent_write_kernel(
    q, kv, norm, rotary, cache, tables, slots, positions, queries, q_stride, kv_stride, table_stride, eps,
    H: tl.constexpr, NOPE: tl.constexpr, L: tl.constexpr, LP: tl.constexpr, R: tl.constexpr, HALF: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
):  # fmt: skip
    """One (token, head): its rotated values to queries [T, H, L + R]; program H writes the token's vector into the cache."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    position = tl.load(positions + token)
    r = tl.arange(0, HALF)
    inside = r < R // 2
    turn = rotary + position.to(tl.int64) * R + r
    cos, sin = tl.load(turn, mask=inside, other=0.0), tl.load(turn + R // 2, mask=inside, other=0.0)
    DTYPE: tl.constexpr = queries.dtype.element_ty
    if head == H:
        own = kv + token * kv_stride
        slot = tl.load(slots + token).to(tl.int64)
        page = tl.load(tables + slot * table_stride + position // PAGE_SIZE).to(tl.int64)
        place = cache + (page * PAGE_SIZE + position % PAGE_SIZE) * (L + R)
        v = tl.arange(0, LP)
        latent = tl.load(own + v, mask=v < L, other=0.0).to(tl.float32)
        w = tl.load(norm + v, mask=v < L, other=0.0).to(tl.float32)
        tl.store(place + v, norm_row(latent, w, eps, L, DTYPE).to(cache.dtype.element_ty), mask=v < L)
        k_low = tl.load(own + L + r, mask=inside, other=0.0).to(tl.float32)
        k_high = tl.load(own + L + R // 2 + r, mask=inside, other=0.0).to(tl.float32)
        tl.store(place + L + r, (k_low * cos - k_high * sin).to(DTYPE).to(cache.dtype.element_ty), mask=inside)
        tl.store(place + L + R // 2 + r, (k_high * cos + k_low * sin).to(DTYPE).to(cache.dtype.element_ty), mask=inside)
    else:
        at = q + token * q_stride + head * (NOPE + R) + NOPE + r
        low = tl.load(at, mask=inside, other=0.0).to(tl.float32)
        high = tl.load(at + R // 2, mask=inside, other=0.0).to(tl.float32)
        into = queries + (token * H + head) * (L + R) + L + r
        tl.store(into, (low * cos - high * sin).to(DTYPE), mask=inside)
        tl.store(into + R // 2, (high * cos + low * sin).to(DTYPE), mask=inside)


@jit
def _attend(
    acc, total, best, latent_q, turned_q, cache, table, first, last, limit, scale,
    L: tl.constexpr, LP: tl.constexpr, R: tl.constexpr, RP: tl.constexpr, PAGE_SIZE: tl.constexpr, N: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Folds cached tokens [first, last) into the running softmax; `limit` [M] is the last position that each query sees."""
    v, r = tl.arange(0, LP), tl.arange(0, RP)
    for n in range(first, last, N):
        offs = n + tl.arange(0, N)
        live = offs < last
        page = tl.load(table + offs // PAGE_SIZE, mask=live, other=0).to(tl.int64)
        at = cache + (page * PAGE_SIZE + offs % PAGE_SIZE)[:, None] * (L + R)
        values = tl.load(at + v[None, :], mask=live[:, None] & (v < L)[None, :], other=0.0).to(latent_q.dtype)
        turned = tl.load(at + L + r[None, :], mask=live[:, None] & (r < R)[None, :], other=0.0).to(latent_q.dtype)
        s = tl.dot(latent_q, tl.trans(values), input_precision=PRECISION)
        s = tl.dot(turned_q, tl.trans(turned), s, input_precision=PRECISION) * scale
        s = tl.where(offs[None, :] <= limit[:, None], s, -float("inf"))
        top = tl.maximum(best, tl.max(s, 1))
        p = tl.exp2(s - top[:, None])
        shrink = tl.exp2(best - top)
        total = total * shrink + tl.sum(p, 1)
        acc = tl.dot(p.to(values.dtype), values, acc * shrink[:, None], input_precision=PRECISION)
        best = top
    return acc, total, best


@jit
def _queries(at, keep, L: tl.constexpr, LP: tl.constexpr, R: tl.constexpr, RP: tl.constexpr):
    v, r = tl.arange(0, LP), tl.arange(0, RP)
    latent = tl.load(at[:, None] + v[None, :], mask=keep[:, None] & (v < L)[None, :], other=0.0)
    return latent, tl.load(at[:, None] + L + r[None, :], mask=keep[:, None] & (r < R)[None, :], other=0.0)


@jit
def latent_decode_kernel(
    queries, cache, tables, slots, parts, count, partial, stats, arrived, out, scale, table_stride,
    H: tl.constexpr, BLOCKS: tl.constexpr, L: tl.constexpr, LP: tl.constexpr, R: tl.constexpr, RP: tl.constexpr,
    PAGE_SIZE: tl.constexpr, M: tl.constexpr, N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One (part, block of M heads) of a decode row; parts as in `decode_kernel`, out [T, H, L]."""
    part, block = tl.program_id(0), tl.program_id(1)
    if part >= tl.load(count):
        return
    row, begin, end = tl.load(parts + part * 5), tl.load(parts + part * 5 + 1), tl.load(parts + part * 5 + 2)
    table = tables + tl.load(slots + row).to(tl.int64) * table_stride
    head = block * M + tl.arange(0, M)
    keep = head < H
    at = (row.to(tl.int64) * H + head) * (L + R)
    latent, turned = _queries(queries + at, keep, L, LP, R, RP)
    best = tl.full([M], -1e30, tl.float32)
    total = tl.zeros([M], tl.float32)
    acc = tl.zeros([M, LP], tl.float32)
    limit = tl.zeros([M], tl.int32) + end - 1
    acc, total, best = _attend(
        acc, total, best, latent, turned, cache, table, begin, end, limit, scale, L, LP, R, RP, PAGE_SIZE, N, PRECISION
    )  # fmt: skip
    v = tl.arange(0, LP)
    out_at = out + (row.to(tl.int64) * H + head[:, None]) * L + v[None, :]
    many, first = tl.load(parts + part * 5 + 3), tl.load(parts + part * 5 + 4)
    sink = tl.full([M], -float("inf"), tl.float32)
    finish_split(
        acc, total, best, sink, partial, stats, arrived + row * BLOCKS + block, out_at, keep[:, None] & (v < L)[None, :], many,
        part * BLOCKS + block, first * BLOCKS + block, BLOCKS, M, LP,
    )  # fmt: skip


@jit
def latent_prefill_kernel(
    queries, cache, tables, parts, counts, partial, stats, arrived, out, scale, table_stride,
    H: tl.constexpr, L: tl.constexpr, LP: tl.constexpr, R: tl.constexpr, RP: tl.constexpr, PAGE_SIZE: tl.constexpr,
    M: tl.constexpr, HALVES: tl.constexpr, N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """M tokens of a part and one head, in turns; a part of `prefill_kernel` has HALVES times M tokens at most."""
    items = tl.load(counts) * H * HALVES
    m, v = tl.arange(0, M), tl.arange(0, LP)
    for turn in range(tl.cdiv(items - tl.program_id(0), tl.num_programs(0))):
        item = tl.program_id(0) + turn * tl.num_programs(0)
        half, head = item % HALVES, item // HALVES % H
        part = parts + item // (HALVES * H) * COLUMNS
        position = tl.load(part + 1) + half * M
        token = tl.load(part + 2) + half * M
        rows = tl.load(part + 3) - half * M
        if rows > 0:
            table = tables + tl.load(part).to(tl.int64) * table_stride
            keep = m < rows
            at = ((token + m).to(tl.int64) * H + head) * (L + R)
            latent, turned = _queries(queries + at, keep, L, LP, R, RP)
            best = tl.full([M], -1e30, tl.float32)
            total = tl.zeros([M], tl.float32)
            acc = tl.zeros([M, LP], tl.float32)
            first = tl.load(part + 4) * PAIR
            last = tl.minimum(tl.load(part + 5) * PAIR, position + tl.minimum(rows, M))
            acc, total, best = _attend(
                acc, total, best, latent, turned, cache, table, first, last, position + m, scale, L, LP, R, RP, PAGE_SIZE, N,
                PRECISION,
            )  # fmt: skip
            out_at = out + ((token + m[:, None]).to(tl.int64) * H + head) * L + v[None, :]
            mine = (tl.load(part + 7) * H + head) * HALVES + half
            start = (tl.load(part + 8) * H + head) * HALVES + half
            sink = tl.full([M], -float("inf"), tl.float32)
            finish_split(
                acc, total, best, sink, partial, stats, arrived + start, out_at, keep[:, None] & (v < L)[None, :],
                tl.load(part + 6), mine, start, H * HALVES, M, LP,
            )  # fmt: skip


def latent_attention(q: Tensor, kv: Tensor, spec: LatentAttention, step: Any, programs: int, precision: str) -> Tensor:
    """See `Ops.latent_attention`."""
    rows, heads, latent, rope = q.shape[0], spec.num_heads, spec.latent_dim, spec.rope_dim
    if not heads:
        return q.new_empty((rows, 0))
    (cache,), table = step.caches[spec.cache], step.tables[spec.table]
    queries = q.new_empty((rows, heads, latent + rope))
    nope = q.view(rows, heads, -1)[:, :, : spec.nope_dim].transpose(0, 1)
    queries[:, :, :latent].copy_(torch.bmm(nope, spec.key_up).transpose(0, 1))
    latent_write_kernel[(rows, heads + 1)](
        q, kv, spec.norm.weight, spec.rotary, cache, table, step.slots, step.positions, queries, q.stride(0), kv.stride(0),
        table.stride(0), spec.norm.eps, H=heads, NOPE=spec.nope_dim, L=latent, LP=power(latent), R=rope, HALF=power(rope // 2),
        PAGE_SIZE=step.page_size, num_warps=2,
    )  # fmt: skip
    out = q.new_empty((rows, heads, latent))
    sizes = {"H": heads, "L": latent, "LP": max(16, power(latent)), "R": rope, "RP": max(16, power(rope))}
    sizes |= {"PAGE_SIZE": step.page_size, "N": TILE, "PRECISION": precision}
    scale, blocks = spec.scale * LOG2E.value, cdiv(heads, HEADS)
    s = step.scratch[blocks, step.windows[spec.table]]
    latent_decode_kernel[(s.most_parts(step.decode_rows), blocks)](
        queries, cache, table, step.slots, s.parts, s.count, s.partial, s.stats, s.arrived, out, scale, table.stride(0),
        BLOCKS=blocks, M=HEADS, num_warps=4, num_stages=2, **sizes,
    )  # fmt: skip
    if step.prompts:
        p = step.prompt_scratch
        latent_prefill_kernel[(2 * programs,)](
            queries, cache, table, step.parts, step.part_counts, p.partial, p.stats, p.arrived, out, scale, table.stride(0),
            M=TOKENS, HALVES=2, num_warps=8, num_stages=1, **sizes,
        )  # fmt: skip
    return torch.bmm(out.transpose(0, 1), spec.value_up.transpose(1, 2)).transpose(0, 1).reshape(rows, -1)
