# pyright: basic, reportMissingImports=false, reportInvalidTypeForm=false, reportAttributeAccessIssue=false, reportArgumentType=false, reportIndexIssue=false, reportCallIssue=false, reportOperatorIssue=false
# ruff: noqa: E501
"""Paged attention in Triton: decode rows split over the cache, prompt rows in blocks; both read tables and lengths on the device.

The cache of one layer is [pages + 1, key heads, block, head_dim] for keys and for values: the tokens of one head in one page lie
together, so that a program reads whole pages in a row. Page 0 is nobody's. Nothing here depends on a host-side plan: grids follow
from captured sizes, and programs without work leave at once.
"""

from slipstream.ops.triton_kernel import jit, tl


@jit
def _finish_split(
    acc, total, best, partial, stats, arrived, out_at, keep, unit, split, splits, used, M: tl.constexpr, DP: tl.constexpr
):  # fmt: skip
    """Writes the output of M queries where their cache has one part; else the last part to arrive joins them all.

    partial float32 [units * splits, M, DP], stats float32 [units * splits, 2, M], arrived int32 [units], zero before and after.
    """
    m = tl.arange(0, M)
    d = tl.arange(0, DP)
    if used == 1:
        tl.store(out_at, (acc / total[:, None]).to(out_at.dtype.element_ty), mask=keep)
    else:
        mine = unit * splits + split
        tl.store(partial + mine * M * DP + m[:, None] * DP + d[None, :], acc, mask=keep)
        tl.store(stats + mine * 2 * M + m, best)
        tl.store(stats + mine * 2 * M + M + m, total)
        tl.debug_barrier()  # every thread's stores come before the one atomic of this program
        if tl.atomic_add(arrived + unit, 1, sem="acq_rel") == used - 1:
            tl.store(arrived + unit, 0)
            top = tl.full([M], -float("inf"), tl.float32)
            for i in range(used):
                top = tl.maximum(top, tl.load(stats + (unit * splits + i) * 2 * M + m, cache_modifier=".cg"))
            total = tl.zeros([M], tl.float32)
            acc = tl.zeros([M, DP], tl.float32)
            for i in range(used):
                part = unit * splits + i
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
    _finish_split(acc, total, best, partial, stats, arrived, out_at, keep, unit, split, splits, used, 16, DP)


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
    _finish_split(acc, total, best, partial, stats, arrived, out_at, keep, unit, split, splits, used, 16, D)


@jit
def _even_splits(units, programs, MOST: tl.constexpr, ROOM: tl.constexpr):
    """Into how many parts each unit is cut so that `programs` programs end at about the same time; a part costs a little more."""
    best = tl.cdiv(units, programs) * programs * 1000 // units
    splits = 1
    for s in tl.static_range(2, MOST + 1):
        cost = tl.cdiv(units * s, programs) * programs * (1000 + 40 * (s - 1)) // (units * s)
        better = (cost < best) & (units * s <= ROOM)
        splits = tl.where(better, s, splits)
        best = tl.where(better, cost, best)
    return splits


@jit
def prefill_kernel(
    qkv, keys, values, tables, blocks, count, partial, stats, arrived, out, scale, qkv_stride, table_stride,
    HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, BLOCK: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, MOST: tl.constexpr, ROOM: tl.constexpr, LEAST: tl.constexpr, TILES: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Blocks of up to M consecutive tokens of one request, by query head, causal over the request's whole cache.

    blocks int32 [*, 4]: (slot, position of the block's first token, its index in the step, tokens); `count` int32 [1] blocks are real.
    As many programs as there are multiprocessors share them: few blocks are cut along the cache into up to MOST parts of at least
    LEAST tokens, so that a short chunk behind a long context is no slower than its work. TILES: see `decode_tiles_kernel`.
    """
    units = tl.load(count) * HEADS * GROUP
    programs = tl.num_programs(0)
    splits = _even_splits(tl.maximum(units, 1), programs, MOST, ROOM)
    m = tl.arange(0, M)
    d = tl.arange(0, DP)
    for item in range(tl.program_id(0), units * splits, programs):
        unit, split = item // splits, item % splits
        query = unit % (HEADS * GROUP)
        block = blocks + unit // (HEADS * GROUP) * 4
        slot = tl.load(block)
        position = tl.load(block + 1)
        token = tl.load(block + 2)
        rows = tl.load(block + 3)
        length = position + rows
        per, used = _cut(length, splits, LEAST, N)
        if split < used:
            head = query // GROUP
            table = tables + slot.to(tl.int64) * table_stride
            keep = (m[:, None] < rows) & (d < D)[None, :]
            q_at = qkv + (token + m[:, None]).to(tl.int64) * qkv_stride + query * D + d[None, :]
            q = tl.load(q_at, mask=keep, other=0.0)
            best = tl.full([M], -1e30, tl.float32)
            total = tl.zeros([M], tl.float32)
            acc = tl.zeros([M, DP], tl.float32)
            limit = position + m
            first = split * per
            last = tl.minimum(first + per, length)
            seen = tl.maximum(first, tl.minimum((position + 1) // N * N, last))  # every query sees all of [first, seen)
            if TILES:
                acc, total, best = _attend_tiles(
                    acc, total, best, q, table, keys, values, first, seen, limit, head, scale, HEADS, BLOCK, N, False, PRECISION
                )  # fmt: skip
                acc, total, best = _attend_tiles(
                    acc, total, best, q, table, keys, values, seen, last, limit, head, scale, HEADS, BLOCK, N, True, PRECISION
                )  # fmt: skip
            else:
                acc, total, best = _attend(
                    acc, total, best, q, table, keys, values, first, seen, limit, head, d, scale, HEADS, D, BLOCK, N, D != DP,
                    PRECISION,
                )  # fmt: skip
                acc, total, best = _attend(
                    acc, total, best, q, table, keys, values, seen, last, limit, head, d, scale, HEADS, D, BLOCK, N, True,
                    PRECISION,
                )  # fmt: skip
            out_at = out + ((token + m[:, None]).to(tl.int64) * HEADS * GROUP + query) * D + d[None, :]
            where = unit.to(tl.int64)
            _finish_split(acc, total, best, partial, stats, arrived, out_at, keep, where, split, splits, used, M, DP)
