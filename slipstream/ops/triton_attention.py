# pyright: basic, reportMissingImports=false, reportInvalidTypeForm=false, reportAttributeAccessIssue=false, reportArgumentType=false, reportIndexIssue=false, reportCallIssue=false, reportOperatorIssue=false
# ruff: noqa: E501
"""Paged attention in Triton: decode rows split over the cache, prompt rows in blocks; both read tables and lengths on the device.

The cache of one layer is [pages + 1, key heads, block, head_dim] for keys and for values: the tokens of one head in one page lie
together, so that a program reads whole pages in a row. Page 0 is nobody's. Grids follow from captured sizes, and programs without
work leave at once; how prompts are cut comes with a step's inputs (`ops.prompt_blocks`).
"""

from triton.tools.tensor_descriptor import TensorDescriptor

from slipstream.ops import prompt_blocks
from slipstream.ops.triton_kernel import jit, tl

TILE = 64  # tokens of the cache that a kernel takes at a time
COLUMNS = tl.constexpr(prompt_blocks.COLUMNS)
PAIR = tl.constexpr(prompt_blocks.PAIR)


def decode_tile(cache):
    """A cache [pages + 1, heads, block, head_dim] as the descriptor of tiles that `decode_tiles_kernel` reads."""
    d = cache.shape[-1]
    return TensorDescriptor.from_tensor(cache.view(-1, d), [TILE, d])


@jit
def _finish_split(
    acc, total, best, partial, stats, arrived, out_at, keep, parts, mine, first, stride, M: tl.constexpr, DP: tl.constexpr
):  # fmt: skip
    """Writes the output of M queries where their cache has one part; else the last part to arrive joins them all.

    partial float32 [places, M, DP], stats float32 [places, 2, M], arrived int32, zero before and after; the parts' places are
    `first`, `first` + `stride` and so on, this one's is `mine`.
    """
    m = tl.arange(0, M)
    d = tl.arange(0, DP)
    if parts == 1:
        tl.store(out_at, (acc / total[:, None]).to(out_at.dtype.element_ty), mask=keep)
    else:
        tl.store(partial + mine * M * DP + m[:, None] * DP + d[None, :], acc, mask=keep)
        tl.store(stats + mine * 2 * M + m, best)
        tl.store(stats + mine * 2 * M + M + m, total)
        tl.debug_barrier()  # every thread's stores come before the one atomic of this program
        if tl.atomic_add(arrived, 1, sem="acq_rel") == parts - 1:
            tl.store(arrived, 0)
            top = tl.full([M], -float("inf"), tl.float32)
            for i in range(parts):
                top = tl.maximum(top, tl.load(stats + (first + i * stride) * 2 * M + m, cache_modifier=".cg"))
            total = tl.zeros([M], tl.float32)
            acc = tl.zeros([M, DP], tl.float32)
            for i in range(parts):
                part = first + i * stride
                weight = tl.exp2(tl.load(stats + part * 2 * M + m, cache_modifier=".cg") - top)
                total += weight * tl.load(stats + part * 2 * M + M + m, cache_modifier=".cg")
                at = partial + part * M * DP + m[:, None] * DP + d[None, :]
                acc += tl.load(at, mask=keep, other=0.0, cache_modifier=".cg") * weight[:, None]
            tl.store(out_at, (acc / total[:, None]).to(out_at.dtype.element_ty), mask=keep)


@jit
def _cut(length, splits, least, N: tl.constexpr):
    """Tokens of a part, when a cache of `length` is cut into `splits` of at least `least` tokens, and how many parts have any."""
    per = tl.maximum(tl.cdiv(tl.cdiv(length, splits), N) * N, least)
    return per, tl.cdiv(length, per)


@jit(do_not_specialize=["splits", "least"])
def decode_kernel(
    qkv, keys, values, tables, slots, positions, limit, partial, stats, arrived, out,
    scale, qkv_stride, table_stride, splits, least,
    HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, BLOCK: tl.constexpr, N: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """One (row, key head, split): its queries over its part of the row's cache.

    `least` is the fewest tokens worth a split of their own; rows from `limit` int32 [1] on are not decoding.
    """
    row, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    if row >= tl.load(limit):
        return
    length = tl.load(positions + row) + 1
    per, used = _cut(length, splits, least, N)
    if split >= used:
        return
    table = tables + tl.load(slots + row).to(tl.int64) * table_stride
    g = tl.arange(0, 16)
    d = tl.arange(0, DP)
    inside = d < D
    q_at = qkv + row.to(tl.int64) * qkv_stride + (head * GROUP + g[:, None]) * D + d[None, :]
    keep = (g[:, None] < GROUP) & inside[None, :]
    q = tl.load(q_at, mask=keep, other=0.0)
    best = tl.full([16], -float("inf"), tl.float32)
    total = tl.zeros([16], tl.float32)
    acc = tl.zeros([16, DP], tl.float32)
    end = tl.minimum(split * per + per, length)
    for n in range(split * per, end, N):
        offs = n + tl.arange(0, N)
        valid = offs < end
        page = tl.load(table + offs // BLOCK, mask=valid, other=0).to(tl.int64)
        at = ((page * HEADS + head) * BLOCK + offs % BLOCK) * D
        k = tl.load(keys + at[:, None] + d[None, :], mask=valid[:, None] & inside[None, :], other=0.0)
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
        s = tl.where(valid[None, :], s, -float("inf"))
        top = tl.maximum(best, tl.max(s, 1))
        p = tl.exp2(s - top[:, None])
        shrink = tl.exp2(best - top)
        total = total * shrink + tl.sum(p, 1)
        v = tl.load(values + at[:, None] + d[None, :], mask=valid[:, None] & inside[None, :], other=0.0)
        acc = acc * shrink[:, None] + tl.dot(p.to(v.dtype), v, input_precision=PRECISION)
        best = top
    out_at = out + (row.to(tl.int64) * HEADS * GROUP + head * GROUP + g[:, None]) * D + d[None, :]
    unit = row.to(tl.int64) * HEADS + head
    first = unit * splits
    _finish_split(acc, total, best, partial, stats, arrived + unit, out_at, keep, used, first + split, first, 1, 16, DP)


@jit
def _attend(
    acc, total, best, q, table, keys, values, first, last, limit, head, d, scale,
    HEADS: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, N: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Folds cache positions [first, last) into the running softmax; `limit` [M] is the last position that each query sees."""
    for n in range(first, last, N):
        offs = n + tl.arange(0, N)
        page = tl.load(table + offs // BLOCK, mask=offs < last, other=0).to(tl.int64)
        at = ((page * HEADS + head) * BLOCK + offs % BLOCK) * D
        if MASKED:
            k = tl.load(keys + at[:, None] + d[None, :], mask=(d < D)[None, :], other=0.0)
        else:
            k = tl.load(keys + at[:, None] + d[None, :])
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        if MASKED:
            s = tl.where(offs[None, :] <= limit[:, None], s, -float("inf"))
        top = tl.maximum(best, tl.max(s, 1) * scale)
        p = tl.exp2(s * scale - top[:, None])
        shrink = tl.exp2(best - top)
        total = total * shrink + tl.sum(p, 1)
        acc = acc * shrink[:, None]
        if MASKED:
            v = tl.load(values + at[:, None] + d[None, :], mask=(offs < last)[:, None] & (d < D)[None, :], other=0.0)
        else:
            v = tl.load(values + at[:, None] + d[None, :])
        acc = tl.dot(p.to(v.dtype), v, acc, input_precision=PRECISION)
        best = top
    return acc, total, best


@jit
def _attend_tiles(
    acc, total, best, q, table, keys, values, first, last, limit, head, scale,
    HEADS: tl.constexpr, BLOCK: tl.constexpr, N: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """As `_attend`, over whole tiles of N tokens within a page that the copy engine brings; `keys`, `values` are descriptors."""
    page = tl.load(table + first // BLOCK)
    for n in range(first, last, N):
        row = (page * HEADS + head) * BLOCK + n % BLOCK
        page = tl.load(table + (n + N) // BLOCK)  # one tile ahead, so that its latency hides behind this one
        k = keys.load([row, 0])
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        if MASKED:
            s = tl.where((n + tl.arange(0, N))[None, :] <= limit[:, None], s, -float("inf"))
        top = tl.maximum(best, tl.max(s, 1) * scale)
        p = tl.exp2(s * scale - top[:, None])
        shrink = tl.exp2(best - top)
        total = total * shrink + tl.sum(p, 1)
        acc = acc * shrink[:, None]
        v = values.load([row, 0])
        if MASKED:  # what another request left behind may be no number, which even a weight of zero would pass on
            v = tl.where((n + tl.arange(0, N) < last)[:, None], v, 0.0)
        acc = tl.dot(p.to(v.dtype), v, acc, input_precision=PRECISION)
        best = top
    return acc, total, best


@jit(do_not_specialize=["splits", "least"])
def decode_tiles_kernel(
    qkv, keys, values, tables, slots, positions, limit, partial, stats, arrived, out,
    scale, qkv_stride, table_stride, splits, least,
    HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """`decode_kernel` for pages of a multiple of N tokens: keys and values are descriptors of [*, D] in tiles [N, D]."""
    row, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    if row >= tl.load(limit):
        return
    length = tl.load(positions + row) + 1
    per, used = _cut(length, splits, least, N)
    if split >= used:
        return
    table = tables + tl.load(slots + row).to(tl.int64) * table_stride
    g = tl.arange(0, 16)
    d = tl.arange(0, D)
    q_at = qkv + row.to(tl.int64) * qkv_stride + (head * GROUP + g[:, None]) * D + d[None, :]
    q = tl.load(q_at, mask=g[:, None] < GROUP, other=0.0)
    best = tl.full([16], -1e30, tl.float32)
    total = tl.zeros([16], tl.float32)
    acc = tl.zeros([16, D], tl.float32)
    first = split * per
    end = tl.minimum(first + per, length)
    whole = first + (end - first) // N * N
    limits = tl.zeros([16], tl.int32) + (end - 1)
    acc, total, best = _attend_tiles(
        acc, total, best, q, table, keys, values, first, whole, limits, head, scale, HEADS, BLOCK, N, False, PRECISION
    )  # fmt: skip
    if whole < end:
        acc, total, best = _attend_tiles(
            acc, total, best, q, table, keys, values, whole, end, limits, head, scale, HEADS, BLOCK, N, True, PRECISION
        )  # fmt: skip
    keep = (g[:, None] < GROUP) & (d < D)[None, :]
    out_at = out + (row.to(tl.int64) * HEADS * GROUP + head * GROUP + g[:, None]) * D + d[None, :]
    unit = row.to(tl.int64) * HEADS + head
    first_place = unit * splits
    _finish_split(
        acc, total, best, partial, stats, arrived + unit, out_at, keep, used, first_place + split, first_place, 1, 16, D
    )  # fmt: skip


@jit
def prefill_kernel(
    qkv, keys, values, tables, parts, count, partial, stats, arrived, out, scale, qkv_stride, table_stride,
    HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, BLOCK: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Blocks of up to M consecutive tokens of one request, by query head, causal over the request's whole cache.

    parts int32 [*, COLUMNS] of blocks, `count` int32 [1] of them real: see `ops.prompt_blocks`, which cuts them so that as many
    programs as there are multiprocessors end at about the same time.
    """
    items = tl.load(count) * HEADS * GROUP
    programs, program = tl.num_programs(0), tl.program_id(0)
    m = tl.arange(0, M)
    d = tl.arange(0, DP)
    for turn in range(tl.cdiv(items, programs)):
        item = turn * programs + tl.where(turn % 2 == 0, program, programs - 1 - program)  # there and back
        if item < items:
            query = item % (HEADS * GROUP)
            part = parts + item // (HEADS * GROUP) * COLUMNS
            position = tl.load(part + 1)
            token = tl.load(part + 2)
            rows = tl.load(part + 3)
            first = tl.load(part + 4) * PAIR
            last = tl.minimum(tl.load(part + 5) * PAIR, position + rows)
            head = query // GROUP
            table = tables + tl.load(part).to(tl.int64) * table_stride
            keep = (m[:, None] < rows) & (d < D)[None, :]
            q_at = qkv + (token + m[:, None]).to(tl.int64) * qkv_stride + query * D + d[None, :]
            q = tl.load(q_at, mask=keep, other=0.0)
            best = tl.full([M], -1e30, tl.float32)
            total = tl.zeros([M], tl.float32)
            acc = tl.zeros([M, DP], tl.float32)
            limit = position + m
            seen = tl.maximum(first, tl.minimum((position + 1) // N * N, last))  # every query sees all of [first, seen)
            acc, total, best = _attend(
                acc, total, best, q, table, keys, values, first, seen, limit, head, d, scale, HEADS, D, BLOCK, N, D != DP, PRECISION
            )  # fmt: skip
            acc, total, best = _attend(
                acc, total, best, q, table, keys, values, seen, last, limit, head, d, scale, HEADS, D, BLOCK, N, True, PRECISION
            )  # fmt: skip
            out_at = out + ((token + m[:, None]).to(tl.int64) * HEADS * GROUP + query) * D + d[None, :]
            mine = tl.load(part + 7) * HEADS * GROUP + query
            start = tl.load(part + 8) * HEADS * GROUP + query
            _finish_split(
                acc, total, best, partial, stats, arrived + start, out_at, keep, tl.load(part + 6), mine, start, HEADS * GROUP, M, DP
            )  # fmt: skip
