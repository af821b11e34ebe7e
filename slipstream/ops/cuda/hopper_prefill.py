# pyright: basic, reportMissingImports=false, reportInvalidTypeForm=false, reportAttributeAccessIssue=false, reportArgumentType=false, reportIndexIssue=false, reportCallIssue=false, reportOperatorIssue=false
# ruff: noqa: E501
"""Prompt attention for Hopper in Gluon: one warp brings tiles of the cache, two groups of four warps each attend 64 queries.

The order within a group is FlashAttention-3's (Shah et al. 2024, section 3.2): the scores of the next tiles are asked of the
matrix units before the values of these, so that the softmax of the next runs during the product of these. Triton's own pipeliner
puts the softmax between its products. What a block, a part and the scratch are is as in `attention.prefill_kernel`.
"""

from typing import Any, cast

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)  # fmt: skip
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from slipstream.ops.cuda import prompt_blocks
from slipstream.ops.cuda.attention import TILE

jit = cast(Any, gluon.jit)  # a kernel is subscripted with its grid, which a checker of types cannot know

assert prompt_blocks.PAIR == prompt_blocks.ROWS == 2 * TILE
M = gl.constexpr(prompt_blocks.ROWS // 2)  # queries of one group of warps
N = gl.constexpr(TILE)  # tokens of a tile ...
PAIR = gl.constexpr(prompt_blocks.PAIR)  # ... and of the two that are taken at a time
TYPES = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}
COLUMNS = gl.constexpr(prompt_blocks.COLUMNS)
NOTHING = gl.constexpr(-1e30)  # a maximum below every score, of which differences are still numbers


def prompt_tile(cache):
    """A cache [pages + 1, heads, block, head_dim] of 16-bit numbers as the descriptor of tiles that the kernel reads."""
    d = cache.shape[-1]
    layout = gl.NVMMASharedLayout.get_default_for([TILE, d], TYPES[cache.dtype])
    return TensorDescriptor.from_tensor(cache.view(-1, d), [TILE, d], layout)


_barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier  # renamed in Triton 3.7


@jit
def _share(counts, QUERIES: gl.constexpr):
    """(items, how many of them, the first, are all that their program has to do, how many programs share the others)."""
    items = gl.load(counts) * QUERIES
    own = gl.load(counts + 1) * QUERIES
    return items, own, gl.maximum(gl.num_programs(0) - own, 1)


@jit
def _turns(counts, QUERIES: gl.constexpr):
    """How often this program takes an item, or looks for one."""
    items, own, others = _share(counts, QUERIES)
    return gl.where(gl.program_id(0) < own, 1, gl.cdiv(items - own, others))


@jit
def _item(counts, turn, QUERIES: gl.constexpr):
    """Which item a program takes in its `turn`, and whether there is one: there and back, so that a program with a long
    one has a short one next. Read again each time: no register is left to keep it in."""
    items, own, others = _share(counts, QUERIES)
    place = gl.program_id(0) - own  # below 0 for an item that is all its program has to do
    item = own + turn * others + gl.where(turn % 2 == 0, place, others - 1 - place)
    return item, item < items


@jit
def _bring(
    keys, values, tables, parts, counts, table_stride, k_tiles, v_tiles, k_full, k_empty, v_full, v_empty,
    HEADS: gl.constexpr, GROUP: gl.constexpr, PAGE_SIZE: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Asks the copy engine for all pairs of tiles of this program's items, the last of an item first."""
    turn = 0
    for round in range(_turns(counts, HEADS * GROUP)):
        item, real = _item(counts, round, HEADS * GROUP)
        if real:
            part = parts + item // (HEADS * GROUP) * COLUMNS
            head = item % (HEADS * GROUP) // GROUP
            table = tables + gl.load(part).to(gl.int64) * table_stride
            begin = gl.load(part + 4)
            end = gl.load(part + 5)
            for i in range(end - begin):
                n = (end - 1 - i) * PAIR
                one = (gl.load(table + n // PAGE_SIZE) * HEADS + head) * PAGE_SIZE + n % PAGE_SIZE
                n += N
                two = (gl.load(table + n // PAGE_SIZE) * HEADS + head) * PAGE_SIZE + n % PAGE_SIZE
                stage = turn % STAGES
                phase = turn // STAGES & 1 ^ 1
                mbarrier.wait(k_empty.index(stage), phase)
                mbarrier.expect(k_full.index(stage), 2 * keys.block_type.nbytes)
                tma.async_copy_global_to_shared(keys, [one, 0], k_full.index(stage), k_tiles.index(2 * stage))
                tma.async_copy_global_to_shared(keys, [two, 0], k_full.index(stage), k_tiles.index(2 * stage + 1))
                mbarrier.wait(v_empty.index(stage), phase)
                mbarrier.expect(v_full.index(stage), 2 * values.block_type.nbytes)
                tma.async_copy_global_to_shared(values, [one, 0], v_full.index(stage), v_tiles.index(2 * stage))
                tma.async_copy_global_to_shared(values, [two, 0], v_full.index(stage), v_tiles.index(2 * stage + 1))
                turn += 1


@jit
def _soften(a, b, best, total, n, limit, scale, S: gl.constexpr, MASKED: gl.constexpr):
    """Scores of two tiles to weights, the running maximum and sum after them, and what the output before shrinks by."""
    if MASKED:
        at = n + gl.arange(0, N, gl.SliceLayout(0, S))
        a = gl.where(at[None, :] <= limit[:, None], a, -float("inf"))
        b = gl.where(at[None, :] + N <= limit[:, None], b, -float("inf"))
    top = gl.maximum(best, gl.max(gl.maximum(a, b), 1) * scale)
    a = gl.exp2(a * scale - top[:, None])
    b = gl.exp2(b * scale - top[:, None])
    shrink = gl.exp2(best - top)
    total = total * shrink + gl.sum(a + b, 1)
    return a, b, top, total, shrink


@jit
def _scores(q, k_tiles, k_full, turn, S: gl.constexpr, STAGES: gl.constexpr):
    """Starts the two products of a pair's scores once its keys are there."""
    stage = turn % STAGES
    mbarrier.wait(k_full.index(stage), turn // STAGES & 1)
    zero = gl.zeros([M, N], gl.float32, S)
    a = warpgroup_mma(q, k_tiles.index(2 * stage).permute((1, 0)), zero, use_acc=False, is_async=True)
    b = warpgroup_mma(q, k_tiles.index(2 * stage + 1).permute((1, 0)), zero, use_acc=False, is_async=True)
    return a, b


@jit
def _weigh(a, b, shrink, v_tiles, v_full, turn, acc, OUT: gl.constexpr, STAGES: gl.constexpr):
    """Starts acc = acc x shrink + weights x values of a pair once its values are there."""
    P: gl.constexpr = gl.DotOperandLayout(0, OUT, 2)
    stage = turn % STAGES
    mbarrier.wait(v_full.index(stage), turn // STAGES & 1)
    acc = acc * gl.convert_layout(shrink, gl.SliceLayout(1, OUT))[:, None]
    a = gl.convert_layout(a.to(v_tiles.dtype), P)
    b = gl.convert_layout(b.to(v_tiles.dtype), P)
    acc = warpgroup_mma(a, v_tiles.index(2 * stage), acc, is_async=True)
    return warpgroup_mma(b, v_tiles.index(2 * stage + 1), acc, is_async=True)


@jit
def _fold(
    acc, a, b, best, total, shrink, q, k_tiles, v_tiles, k_full, k_empty, v_full, v_empty, turn, n, begin, end, limit, scale,
    S: gl.constexpr, OUT: gl.constexpr, STAGES: gl.constexpr, MASKED: gl.constexpr,
):  # fmt: skip
    """Pairs [begin, end) of an item, counted from its last; `turn` and `n` are the item's first turn and last pair's token.

    a and b are the weights of the pair before, in float32: carried round the loop in 16 bits they would be taken apart.
    """
    for i in range(begin, end):
        c, d = _scores(q, k_tiles, k_full, turn + i, S, STAGES)
        acc = _weigh(a, b, shrink, v_tiles, v_full, turn + i - 1, acc, OUT, STAGES)
        c, d = warpgroup_mma_wait(2, deps=(c, d))
        mbarrier.arrive(k_empty.index((turn + i) % STAGES), count=1)
        a, b, best, total, shrink = _soften(c, d, best, total, n - i * PAIR, limit, scale, S, MASKED)
        acc = warpgroup_mma_wait(0, deps=(acc,))
        mbarrier.arrive(v_empty.index((turn + i - 1) % STAGES), count=1)
    return acc, a, b, best, total, shrink


@jit
def _attend(
    qkv, parts, counts, partial, stats, arrived, out, scale, qkv_stride, q, k_tiles, v_tiles, k_full, k_empty, v_full, v_empty,
    HALF: gl.constexpr, QUERIES: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """One group of four warps: queries [64 * HALF, 64 * HALF + 64) of each block."""
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16])
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    READ: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    turn = 0
    for round in range(_turns(counts, QUERIES)):
        item, real = _item(counts, round, QUERIES)
        if real:
            part = parts + item // QUERIES * COLUMNS
            query = item % QUERIES
            position = gl.load(part + 1) + HALF * M
            token = gl.load(part + 2) + HALF * M
            rows = gl.load(part + 3) - HALF * M
            begin = gl.load(part + 4)
            stop = gl.load(part + 5)
            length = position + rows
            m = gl.arange(0, M, gl.SliceLayout(1, READ))
            d = gl.arange(0, D, gl.SliceLayout(0, READ))
            q_at = qkv + (token + m[:, None]).to(gl.int64) * qkv_stride + query * D + d[None, :]
            q.store(gl.load(q_at, mask=m[:, None] < rows, other=0.0))
            fence_async_shared()
            _barrier()
            limit = position + gl.arange(0, M, gl.SliceLayout(1, S))
            best = gl.full([M], NOTHING, gl.float32, gl.SliceLayout(1, S))
            total = gl.zeros([M], gl.float32, gl.SliceLayout(1, S))
            n = (stop - 1) * PAIR
            a, b = _scores(q, k_tiles, k_full, turn, S, STAGES)
            a, b = warpgroup_mma_wait(0, deps=(a, b))
            mbarrier.arrive(k_empty.index(turn % STAGES), count=1)
            a, b, best, total, shrink = _soften(a, b, best, total, n, limit, scale, S, True)
            if (
                n + PAIR > length
            ):  # what another request left behind may be no number, which even a weight of zero would pass on
                stage = turn % STAGES
                mbarrier.wait(v_full.index(stage), turn // STAGES & 1)
                for half in gl.static_range(2):
                    tile = v_tiles.index(2 * stage + half)
                    there = n + half * N + gl.arange(0, N, gl.SliceLayout(1, READ)) < length
                    tile.store(gl.where(there[:, None], tile.load(READ), 0.0))
                fence_async_shared()
                _barrier()
            pairs = stop - begin
            whole = gl.minimum(gl.maximum((position + 1) // PAIR - begin, 0), pairs)  # pairs of which every query sees all
            edge = gl.minimum(gl.maximum(pairs - whole, 1), pairs)
            acc = gl.zeros([M, D], gl.float32, OUT)
            acc, a, b, best, total, shrink = _fold(
                acc, a, b, best, total, shrink, q, k_tiles, v_tiles, k_full, k_empty, v_full, v_empty, turn, n, 1, edge, limit, scale,
                S, OUT, STAGES, True,
            )  # fmt: skip
            acc, a, b, best, total, shrink = _fold(
                acc, a, b, best, total, shrink, q, k_tiles, v_tiles, k_full, k_empty, v_full, v_empty, turn, n, edge, pairs, limit, scale,
                S, OUT, STAGES, False,
            )  # fmt: skip
            turn += pairs
            acc = _weigh(a, b, shrink, v_tiles, v_full, turn - 1, acc, OUT, STAGES)
            acc = warpgroup_mma_wait(0, deps=(acc,))
            mbarrier.arrive(v_empty.index((turn - 1) % STAGES), count=1)
            best = gl.convert_layout(best, gl.SliceLayout(1, OUT))
            total = gl.convert_layout(total, gl.SliceLayout(1, OUT))
            m = gl.arange(0, M, gl.SliceLayout(1, OUT))
            d = gl.arange(0, D, gl.SliceLayout(0, OUT))
            if gl.load(part + 6) > 1:
                acc, total, rows = _join(acc, best, total, partial, stats, arrived, rows, part, query, HALF, QUERIES, D, OUT)
            out_at = out + ((token + m[:, None]).to(gl.int64) * QUERIES + query) * D + d[None, :]
            gl.store(out_at, (acc / total[:, None]).to(out.dtype.element_ty), mask=(m[:, None] < rows) & (d[None, :] < D))


@jit
def _join(
    acc, best, total, partial, stats, arrived, rows, part, query, HALF: gl.constexpr, QUERIES: gl.constexpr, D: gl.constexpr,
    OUT: gl.constexpr,
):  # fmt: skip
    """Puts this part down and, as the last of its block to arrive, joins them all; (output, its sum, rows to write: 0 for others).

    partial float32 [place, query, 2, M, D], stats float32 [place, query, 2, 2, M], arrived int32 [place, query, 2], zero before
    and after.
    """
    m = gl.arange(0, M, gl.SliceLayout(1, OUT))
    d = gl.arange(0, D, gl.SliceLayout(0, OUT))
    count = gl.load(part + 6)
    mine = (gl.load(part + 7) * QUERIES + query) * 2 + HALF
    first = (gl.load(part + 8) * QUERIES + query) * 2 + HALF
    gl.store(partial + mine * M * D + m[:, None] * D + d[None, :], acc)
    gl.store(stats + mine * 2 * M + m, best)
    gl.store(stats + mine * 2 * M + M + m, total)
    _barrier()  # every thread's stores come before the one atomic of this group
    if gl.atomic_add(arrived + first, 1, sem="acq_rel") == count - 1:
        gl.store(arrived + first, 0)
        best = gl.full([M], NOTHING, gl.float32, gl.SliceLayout(1, OUT))
        for i in range(count):
            other = first + i * 2 * QUERIES
            best = gl.maximum(best, gl.load(stats + other * 2 * M + m, cache_modifier=".cg"))
        total = gl.zeros([M], gl.float32, gl.SliceLayout(1, OUT))
        acc = gl.zeros([M, D], gl.float32, OUT)
        for i in range(count):
            other = first + i * 2 * QUERIES
            weight = gl.exp2(gl.load(stats + other * 2 * M + m, cache_modifier=".cg") - best)
            total += weight * gl.load(stats + other * 2 * M + M + m, cache_modifier=".cg")
            acc += gl.load(partial + other * M * D + m[:, None] * D + d[None, :], cache_modifier=".cg") * weight[:, None]
    else:
        rows = 0
    return acc, total, rows


@jit
def hopper_prefill_kernel(
    qkv, keys, values, tables, parts, counts, partial, stats, arrived, out, scale, qkv_stride, table_stride,
    HEADS: gl.constexpr, GROUP: gl.constexpr, D: gl.constexpr, PAGE_SIZE: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """`attention.prefill_kernel` for tiles: keys and values are descriptors of [*, D] in tiles [64, D], blocks have 128 rows."""
    q = gl.allocate_shared_memory(keys.dtype, [2, M, D], keys.layout)
    k_tiles = gl.allocate_shared_memory(keys.dtype, [2 * STAGES, N, D], keys.layout)
    v_tiles = gl.allocate_shared_memory(keys.dtype, [2 * STAGES, N, D], values.layout)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=2)
        mbarrier.init(v_empty.index(i), count=2)
    gl.warp_specialize(
        [
            (_attend, (
                qkv, parts, counts, partial, stats, arrived, out, scale, qkv_stride, q.index(0), k_tiles, v_tiles, k_full,
                k_empty, v_full, v_empty, 0, HEADS * GROUP, D, STAGES,
            )),
            (_attend, (
                qkv, parts, counts, partial, stats, arrived, out, scale, qkv_stride, q.index(1), k_tiles, v_tiles, k_full,
                k_empty, v_full, v_empty, 1, HEADS * GROUP, D, STAGES,
            )),
            (_bring, (
                keys, values, tables, parts, counts, table_stride, k_tiles, v_tiles, k_full, k_empty, v_full, v_empty,
                HEADS, GROUP, PAGE_SIZE, STAGES,
            )),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip
