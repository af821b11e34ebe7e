# pyright: basic, reportMissingImports=false, reportInvalidTypeForm=false, reportAttributeAccessIssue=false, reportArgumentType=false, reportIndexIssue=false, reportCallIssue=false, reportOperatorIssue=false
# ruff: noqa: E501
"""Paged attention in Triton: decode rows split over the cache, prompt rows in blocks; both read tables and lengths on the device.

The cache of one layer is [pages + 1, key heads, page_size, head_dim] for keys and for values: the tokens of one head in one page
lie together, so that a program reads whole pages in a row. If the cache has another dtype than the activations, the kernels that
read by address convert the values; those that read tiles need one dtype. Page 0 belongs to no request. Grids follow from captured
sizes, and programs without work end at once. A step's inputs say how its prompts are cut (`ops.prompt_blocks`).
"""

from triton.tools.tensor_descriptor import TensorDescriptor

from slipstream.ops.cuda import prompt_blocks
from slipstream.ops.cuda.launch import jit, tl

TILE = 64  # tokens of the cache that a kernel takes at a time
COLUMNS = tl.constexpr(prompt_blocks.COLUMNS)
PAIR = tl.constexpr(prompt_blocks.PAIR)
LOG2E = tl.constexpr(1.4426950408889634)


def decode_tile(cache, tokens: int):
    """A cache [pages + 1, heads, block, head_dim] as the descriptor of tiles of `tokens` that `decode_tiles_kernel` reads."""
    d = cache.shape[-1]
    return TensorDescriptor.from_tensor(cache.view(-1, d), [tokens, d])


@jit
def cap(s, SOFTCAP: tl.constexpr):
    """Scores in units of log2(e) to SOFTCAP * tanh(score / SOFTCAP) in the same units."""
    y = s * (2.0 / (LOG2E * SOFTCAP))
    return (SOFTCAP * LOG2E) * (1.0 - 2.0 / (1.0 + tl.exp(y)))


@jit
def finish_split(
    acc, total, best, sink, partial, stats, arrived, out_at, keep, parts, mine, first, stride, M: tl.constexpr, DP: tl.constexpr
):  # fmt: skip
    """Writes the output of M queries where their cache has one part; else the last part to arrive joins them all.

    partial float32 [places, M, DP], stats float32 [places, 2, M], arrived int32, zero before and after; the parts' places are
    `first`, `first` + `stride` and so on, this one's is `mine`. `sink` [M]: a score that takes its share, -inf for none.
    """
    m = tl.arange(0, M)
    d = tl.arange(0, DP)
    if parts == 1:
        total += tl.exp2(sink - best)
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
            total = tl.exp2(sink - top)
            acc = tl.zeros([M, DP], tl.float32)
            for i in range(parts):
                part = first + i * stride
                weight = tl.exp2(tl.load(stats + part * 2 * M + m, cache_modifier=".cg") - top)
                total += weight * tl.load(stats + part * 2 * M + M + m, cache_modifier=".cg")
                at = partial + part * M * DP + m[:, None] * DP + d[None, :]
                acc += tl.load(at, mask=keep, other=0.0, cache_modifier=".cg") * weight[:, None]
            tl.store(out_at, (acc / total[:, None]).to(out_at.dtype.element_ty), mask=keep)


@jit(do_not_specialize=["rows", "room"])
def decode_parts_kernel(
    positions, limit, parts, count, rows, room,
    HEADS: tl.constexpr, MOST: tl.constexpr, WINDOW: tl.constexpr, TILE: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """Cuts the caches of up to `rows` decode rows into at most `room` parts int32 [*, 5], longer ones into more, and counts them.

    A part is (row, first token, end, parts of its row, the row's first part). The least size of a part follows from the number of
    rows (measured: docs/gpu_log.md); parts are larger if `room` is too small. Rows from `limit` int32 [1] on do not decode.
    With a WINDOW they begin at the tile of the first token that the row reads.
    """
    r = tl.arange(0, R)
    real = tl.minimum(rows, tl.load(limit))
    end = tl.load(positions + r, mask=r < real, other=-1) + 1
    start = tl.maximum(end - WINDOW, 0) // TILE * TILE if WINDOW else tl.zeros([R], tl.int32)
    length = end - start
    units = real * HEADS
    size = tl.where(units <= 16, 128, tl.where(units <= 64, 256, tl.where(units <= 256, 512, 1024)))
    n = tl.minimum(tl.cdiv(length, size), MOST)
    while tl.sum(n, 0) > room:
        size += size // 2
        n = tl.minimum(tl.cdiv(length, size), MOST)
    size = tl.maximum(tl.cdiv(tl.cdiv(length, tl.maximum(n, 1)), TILE), 1) * TILE
    n = tl.cdiv(length, size)
    first = tl.cumsum(n, 0) - n
    tl.store(count, tl.sum(n, 0))
    i = tl.arange(0, MOST)[None, :]
    keep = i < n[:, None]
    at = parts + (first[:, None] + i) * 5
    begin = start[:, None] + i * size[:, None]
    tl.store(at, r[:, None] + i * 0, mask=keep)
    tl.store(at + 1, begin, mask=keep)
    tl.store(at + 2, tl.minimum(begin + size[:, None], end[:, None]), mask=keep)
    tl.store(at + 3, n[:, None] + i * 0, mask=keep)
    tl.store(at + 4, first[:, None] + i * 0, mask=keep)


@jit
def decode_kernel(
    qkv, keys, values, tables, slots, parts, count, partial, stats, arrived, out, positions, sinks, scale, qkv_stride,
    table_stride,
    HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, PAGE_SIZE: tl.constexpr, N: tl.constexpr,
    PRECISION: tl.constexpr, WINDOW: tl.constexpr, SINKS: tl.constexpr, SOFTCAP: tl.constexpr,
):  # fmt: skip
    """One (part, key head): a decode row's queries over its part of the row's cache, or of the row's window."""
    part, head = tl.program_id(0), tl.program_id(1)
    if part >= tl.load(count):
        return
    row, begin, end = tl.load(parts + part * 5), tl.load(parts + part * 5 + 1), tl.load(parts + part * 5 + 2)
    table = tables + tl.load(slots + row).to(tl.int64) * table_stride
    g = tl.arange(0, 16)
    d = tl.arange(0, DP)
    inside = d < D
    q_at = qkv + row.to(tl.int64) * qkv_stride + (head * GROUP + g[:, None]) * D + d[None, :]
    keep = (g[:, None] < GROUP) & inside[None, :]
    q = tl.load(q_at, mask=keep, other=0.0)
    best = tl.full([16], -1e30, tl.float32)
    total = tl.zeros([16], tl.float32)
    acc = tl.zeros([16, DP], tl.float32)
    lowest = tl.load(positions + row) - WINDOW + 1 if WINDOW else 0
    for n in range(begin, end, N):
        offs = n + tl.arange(0, N)
        valid = (offs < end) & (offs >= lowest)
        page = tl.load(table + offs // PAGE_SIZE, mask=valid, other=0).to(tl.int64)
        at = ((page * HEADS + head) * PAGE_SIZE + offs % PAGE_SIZE) * D
        k = tl.load(keys + at[:, None] + d[None, :], mask=valid[:, None] & inside[None, :], other=0.0).to(q.dtype)
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
        if SOFTCAP > 0:
            s = cap(s, SOFTCAP)
        s = tl.where(valid[None, :], s, -float("inf"))
        top = tl.maximum(best, tl.max(s, 1))
        p = tl.exp2(s - top[:, None])
        shrink = tl.exp2(best - top)
        total = total * shrink + tl.sum(p, 1)
        v = tl.load(values + at[:, None] + d[None, :], mask=valid[:, None] & inside[None, :], other=0.0).to(q.dtype)
        acc = acc * shrink[:, None] + tl.dot(p.to(v.dtype), v, input_precision=PRECISION)
        best = top
    out_at = out + (row.to(tl.int64) * HEADS * GROUP + head * GROUP + g[:, None]) * D + d[None, :]
    sink = tl.full([16], -float("inf"), tl.float32)
    if SINKS:
        sink = tl.load(sinks + head * GROUP + g, mask=g < GROUP, other=0.0) * LOG2E
    _finish_decode(acc, total, best, sink, partial, stats, arrived, out_at, keep, parts, part, row, head, HEADS, DP)


@jit
def _finish_decode(
    acc, total, best, sink, partial, stats, arrived, out_at, keep, parts, part, row, head, HEADS: tl.constexpr, DP: tl.constexpr
):  # fmt: skip
    """`finish_split` for a part of a decode row; arrived int32 [rows, HEADS]."""
    many, first = tl.load(parts + part * 5 + 3), tl.load(parts + part * 5 + 4)
    finish_split(
        acc, total, best, sink, partial, stats, arrived + row * HEADS + head, out_at, keep, many, part * HEADS + head,
        first * HEADS + head, HEADS, 16, DP,
    )  # fmt: skip


@jit
def _attend(
    acc, total, best, q, table, keys, values, first, last, limit, head, d, scale,
    HEADS: tl.constexpr, D: tl.constexpr, PAGE_SIZE: tl.constexpr, N: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
):  # fmt: skip
    """Folds cache positions [first, last) into the running softmax; `limit` [M] is the last position that each query sees.

    `first` lies at most a tile before the first position that the first query sees; what lies before that is another's.
    """
    for n in range(first, last, N):
        offs = n + tl.arange(0, N)
        page = tl.load(table + offs // PAGE_SIZE, mask=offs < last, other=0).to(tl.int64)
        at = ((page * HEADS + head) * PAGE_SIZE + offs % PAGE_SIZE) * D
        if MASKED:
            k = tl.load(keys + at[:, None] + d[None, :], mask=(d < D)[None, :], other=0.0)
        else:
            k = tl.load(keys + at[:, None] + d[None, :])
        s = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision=PRECISION)
        if SOFTCAP > 0:
            s = cap(s * scale, SOFTCAP) / scale
        if MASKED:
            s = tl.where(offs[None, :] <= limit[:, None], s, -float("inf"))
        if WINDOW:
            s = tl.where(offs[None, :] > limit[:, None] - WINDOW, s, -float("inf"))
        top = tl.maximum(best, tl.max(s, 1) * scale)
        p = tl.exp2(s * scale - top[:, None])
        shrink = tl.exp2(best - top)
        total = total * shrink + tl.sum(p, 1)
        acc = acc * shrink[:, None]
        if MASKED:
            live = offs < last
            if WINDOW:
                live = live & (offs > tl.min(limit, 0) - WINDOW)
            v = tl.load(values + at[:, None] + d[None, :], mask=live[:, None] & (d < D)[None, :], other=0.0)
        else:
            v = tl.load(values + at[:, None] + d[None, :])
        acc = tl.dot(p.to(q.dtype), v.to(q.dtype), acc, input_precision=PRECISION)
        best = top
    return acc, total, best


@jit
def _attend_tiles(
    acc, total, best, q, table, keys, values, first, last, limit, head, scale,
    HEADS: tl.constexpr, PAGE_SIZE: tl.constexpr, N: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """As `_attend`, over whole tiles of N tokens within a page that the copy engine brings; `keys`, `values` are descriptors."""
    page = tl.load(table + first // PAGE_SIZE)
    for n in range(first, last, N):
        row = (page * HEADS + head) * PAGE_SIZE + n % PAGE_SIZE
        page = tl.load(table + (n + N) // PAGE_SIZE)  # one tile ahead, so that its latency hides behind this one
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


@jit
def decode_tiles_kernel(
    qkv, keys, values, tables, slots, parts, count, partial, stats, arrived, out, scale, qkv_stride, table_stride,
    HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, PAGE_SIZE: tl.constexpr, N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """`decode_kernel` for pages of a multiple of N tokens: keys and values are descriptors of [*, D] in tiles [N, D]."""
    part, head = tl.program_id(0), tl.program_id(1)
    if part >= tl.load(count):
        return
    row, begin, end = tl.load(parts + part * 5), tl.load(parts + part * 5 + 1), tl.load(parts + part * 5 + 2)
    table = tables + tl.load(slots + row).to(tl.int64) * table_stride
    g = tl.arange(0, 16)
    d = tl.arange(0, D)
    q_at = qkv + row.to(tl.int64) * qkv_stride + (head * GROUP + g[:, None]) * D + d[None, :]
    q = tl.load(q_at, mask=g[:, None] < GROUP, other=0.0)
    best = tl.full([16], -1e30, tl.float32)
    total = tl.zeros([16], tl.float32)
    acc = tl.zeros([16, D], tl.float32)
    whole = begin + (end - begin) // N * N
    limits = tl.zeros([16], tl.int32) + (end - 1)
    acc, total, best = _attend_tiles(
        acc, total, best, q, table, keys, values, begin, whole, limits, head, scale, HEADS, PAGE_SIZE, N, False, PRECISION
    )  # fmt: skip
    if whole < end:
        acc, total, best = _attend_tiles(
            acc, total, best, q, table, keys, values, whole, end, limits, head, scale, HEADS, PAGE_SIZE, N, True, PRECISION
        )  # fmt: skip
    keep = (g[:, None] < GROUP) & (d < D)[None, :]
    out_at = out + (row.to(tl.int64) * HEADS * GROUP + head * GROUP + g[:, None]) * D + d[None, :]
    sink = tl.full([16], -float("inf"), tl.float32)
    _finish_decode(acc, total, best, sink, partial, stats, arrived, out_at, keep, parts, part, row, head, HEADS, D)


@jit
def prefill_kernel(
    qkv, keys, values, tables, parts, counts, partial, stats, arrived, out, sinks, scale, qkv_stride, table_stride,
    HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, PAGE_SIZE: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, PRECISION: tl.constexpr, WINDOW: tl.constexpr, SINKS: tl.constexpr, SOFTCAP: tl.constexpr,
):  # fmt: skip
    """Blocks of up to M consecutive tokens of one request, by query head, causal over the request's whole cache.

    parts int32 [*, COLUMNS] of blocks; counts int32 [2]: how many of them are real, and how many, the first, have their own
    programs. `ops.prompt_blocks` cuts them so that one program for each multiprocessor ends at about the same time as the others.
    """
    items = tl.load(counts) * HEADS * GROUP
    own = tl.load(counts + 1) * HEADS * GROUP
    program = tl.program_id(0)
    others = tl.maximum(tl.num_programs(0) - own, 1)  # programs that share the items after the first `own`
    m = tl.arange(0, M)
    d = tl.arange(0, DP)
    for turn in range(tl.where(program < own, 1, tl.cdiv(items - own, others))):
        place = program - own  # below 0 for an item that is all a program has to do
        item = own + turn * others + tl.where(turn % 2 == 0, place, others - 1 - place)  # there and back
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
            if WINDOW:
                seen = tl.maximum(first, tl.maximum(position - WINDOW + 1, 0) // N * N)
            else:
                seen = tl.maximum(first, tl.minimum((position + 1) // N * N, last))  # every query sees all of [first, seen)
                acc, total, best = _attend(
                    acc, total, best, q, table, keys, values, first, seen, limit, head, d, scale, HEADS, D, PAGE_SIZE, N, D != DP,
                    PRECISION, 0, SOFTCAP,
                )  # fmt: skip
            acc, total, best = _attend(
                acc, total, best, q, table, keys, values, seen, last, limit, head, d, scale, HEADS, D, PAGE_SIZE, N, True, PRECISION,
                WINDOW, SOFTCAP,
            )  # fmt: skip
            sink = tl.full([M], -float("inf"), tl.float32)
            if SINKS:
                sink = tl.zeros([M], tl.float32) + tl.load(sinks + query) * LOG2E
            out_at = out + ((token + m[:, None]).to(tl.int64) * HEADS * GROUP + query) * D + d[None, :]
            mine = tl.load(part + 7) * HEADS * GROUP + query
            start = tl.load(part + 8) * HEADS * GROUP + query
            finish_split(
                acc, total, best, sink, partial, stats, arrived + start, out_at, keep, tl.load(part + 6), mine, start, HEADS * GROUP, M, DP
            )  # fmt: skip
