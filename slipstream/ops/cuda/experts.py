# pyright: basic, reportMissingImports=false, reportInvalidTypeForm=false, reportAttributeAccessIssue=false, reportArgumentType=false, reportIndexIssue=false, reportCallIssue=false, reportOperatorIssue=false
"""Mixtures of experts: each token's choice, rows sorted by expert on the device, grouped products, and the weighted sum.

A tile is up to M rows of one expert. `places` [T, top_k] says in which row of the tiles each of a token's choices stands, by
rising expert, so the sum of a token does not depend on the rows that share the step. Padding rows choose nothing.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from slipstream.ops.cuda.launch import cdiv, jit, power, tl
from slipstream.ops.cuda.rows import act, gate_product
from slipstream.ops.layers import Experts, Routing

ROWS = 64  # tokens that one program sorts; more take three kernels
# outputs and inputs of a product's tile, warps, stages; by whether it is gated and has many rows (measured: docs/gpu_log.md)
TILES = {
    (True, False): (32, 128, 4, 3), (True, True): (64, 64, 4, 3),
    (False, False): (128, 128, 4, 3), (False, True): (128, 128, 8, 2),
}  # fmt: skip


class ExpertWeight(NamedTuple):
    """One layer of all experts. data [experts, out, in]; bias [experts, out] or None."""

    data: Tensor
    bias: Tensor | None


@jit
def _take(score, e, E: tl.constexpr, COUNT: tl.constexpr):
    """1 where one of the COUNT largest scores of each row [R, E] stands, the first where several are as large."""
    taken = tl.zeros(score.shape, tl.int32)
    for _ in tl.static_range(COUNT):
        top = tl.max(score, 1)
        column = tl.min(tl.where(score == top[:, None], e[None, :], E), 1)
        here = e[None, :] == column[:, None]
        taken = tl.where(here, 1, taken)
        score = tl.where(here, -float("inf"), score)
    return taken


@jit
def _limit_groups(
    score, e, R: tl.constexpr, E: tl.constexpr, GROUPS: tl.constexpr, TOP: tl.constexpr, BEST: tl.constexpr
):  # fmt: skip
    """Scores [R, E] with -inf outside the TOP best of GROUPS groups; a group counts by the sum of its BEST best."""
    size: tl.constexpr = E // GROUPS
    by_group = tl.reshape(score, [R * GROUPS, size])
    column = tl.arange(0, size)
    best = _take(by_group, column, size, BEST) > 0
    worth = tl.reshape(tl.sum(tl.where(best, by_group, 0.0), 1), [R, GROUPS])
    taken = _take(worth, tl.arange(0, GROUPS), GROUPS, TOP)
    allowed = tl.reshape(taken, [R * GROUPS, 1]) + tl.zeros([R * GROUPS, size], tl.int32)
    return tl.where(tl.reshape(allowed, [R, E]) > 0, score, -float("inf"))


@jit
def _choose(
    logits, bias, choice_bias, slots, t, live, nobody, scale,
    EXPERTS: tl.constexpr, R: tl.constexpr, E: tl.constexpr, TOP: tl.constexpr, SCORE: tl.constexpr, BIAS: tl.constexpr,
    CHOICE_BIAS: tl.constexpr, NORMED: tl.constexpr, GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr, GROUP_BEST: tl.constexpr,
):  # fmt: skip
    """The weights [R, E] of the experts that tokens `t` choose: 0 for all others. Also 1 where chosen."""
    e = tl.arange(0, E)
    real = live & (tl.load(slots + t, mask=live, other=nobody) != nobody)
    inside = (e < EXPERTS)[None, :]
    x = tl.load(logits + t[:, None] * EXPERTS + e[None, :], mask=live[:, None] & inside, other=0.0).to(tl.float32)
    if BIAS:
        x += tl.load(bias + e, mask=e < EXPERTS, other=0.0)[None, :]
    x = tl.where(inside, x, -float("inf"))
    if SCORE == "sigmoid":
        x = tl.where(inside, 1.0 / (1.0 + tl.exp(-x)), 0.0)
    elif SCORE == "softmax":
        x = tl.exp(x - tl.max(x, 1)[:, None])
        x = x / tl.sum(x, 1)[:, None]
    choice = x
    if CHOICE_BIAS:
        choice += tl.load(choice_bias + e, mask=e < EXPERTS, other=0.0)[None, :]
    choice = tl.where(inside, choice, -float("inf"))
    if GROUPS > 1:
        choice = _limit_groups(choice, e, R, E, GROUPS, TOP_GROUPS, GROUP_BEST)
    chosen = _take(choice, e, E, TOP)
    if SCORE == "softmax_of_chosen":
        x = tl.where(chosen > 0, x, -float("inf"))
        x = tl.exp(x - tl.max(x, 1)[:, None])
        x = x / tl.sum(x, 1)[:, None]
    weight = tl.where(chosen > 0, x, 0.0)
    if NORMED:
        weight = weight / (tl.sum(weight, 1) + 1e-20)[:, None]
    return weight * scale, tl.where(real[:, None], chosen, 0)


@jit
def _write_choice(
    weight, chosen, position, t, live, rows, places, weights,
    EXPERTS: tl.constexpr, R: tl.constexpr, E: tl.constexpr, TOP: tl.constexpr,
):  # fmt: skip
    """Puts tokens into their rows of the tiles, and these rows and weights into places and weights [T, TOP]."""
    mask = (chosen > 0) & live[:, None]
    token = t[:, None] + tl.zeros([R, E], tl.int32)
    tl.store(rows + position, token, mask=mask)
    column = tl.cumsum(chosen, 1) - chosen
    tl.store(places + token * TOP + column, position, mask=mask)
    tl.store(weights + token * TOP + column, weight, mask=mask)


@jit(do_not_specialize=["tokens"])
def router_kernel(
    x, router, logits, tokens, x_stride,
    EXPERTS: tl.constexpr, K: tl.constexpr, M: tl.constexpr, N: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """N logits of M tokens: x [T, K] router [EXPERTS, K]^T in float32."""
    t, e = tl.program_id(1) * M + tl.arange(0, M), tl.program_id(0) * N + tl.arange(0, N)
    k = tl.arange(0, BK)
    acc = tl.zeros([M, N], tl.float32)
    for begin in range(0, K, BK):
        left = (begin + k < K)[None, :]
        a = tl.load(x + t[:, None].to(tl.int64) * x_stride + begin + k[None, :], mask=(t < tokens)[:, None] & left, other=0.0)
        b = tl.load(router + e[:, None] * K + begin + k[None, :], mask=(e < EXPERTS)[:, None] & left, other=0.0)
        acc = tl.dot(a, tl.trans(b), acc, input_precision=PRECISION)
    tl.store(logits + t[:, None] * EXPERTS + e[None, :], acc, mask=(t < tokens)[:, None] & (e < EXPERTS)[None, :])


@jit(do_not_specialize=["count", "nobody"])
def route_kernel(
    logits, bias, choice_bias, slots, count, nobody, scale, rows, places, weights, tiles, total,
    EXPERTS: tl.constexpr, R: tl.constexpr, E: tl.constexpr, TOP: tl.constexpr, SCORE: tl.constexpr, BIAS: tl.constexpr,
    CHOICE_BIAS: tl.constexpr, NORMED: tl.constexpr, GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr, GROUP_BEST: tl.constexpr,
    M: tl.constexpr, MOST: tl.constexpr,
):  # fmt: skip
    """All of a small step's tokens in one program: choices, and the tiles of each expert, whose number goes to `total`.

    rows int32 [MOST * M]: a tile's tokens, -1 where it has none; tiles int32 [MOST]: a tile's expert.
    """
    t, e = tl.arange(0, R), tl.arange(0, E)
    live = t < count
    for i in range(0, MOST * M, 1024):
        at = i + tl.arange(0, 1024)
        tl.store(rows + at, -1, mask=at < MOST * M)
    for i in tl.static_range(TOP):
        tl.store(places + t * TOP + i, -1, mask=live)
    tl.debug_barrier()  # other threads write the real rows and places
    weight, chosen = _choose(
        logits, bias, choice_bias, slots, t, live, nobody, scale, EXPERTS, R, E, TOP, SCORE, BIAS, CHOICE_BIAS, NORMED, GROUPS,
        TOP_GROUPS, GROUP_BEST,
    )  # fmt: skip
    needed = (tl.sum(chosen, 0) + M - 1) // M
    end = tl.cumsum(needed, 0)
    tl.store(total, tl.sum(needed, 0))
    first = end - needed
    for i in range(tl.max(needed, 0)):
        tl.store(tiles + first + i, e, mask=i < needed)
    position = first[None, :] * M + tl.cumsum(chosen, 0) - chosen
    _write_choice(weight, chosen, position, t, live, rows, places, weights, EXPERTS, R, E, TOP)


@jit(do_not_specialize=["count", "nobody"])
def choose_kernel(
    logits, bias, choice_bias, slots, count, nobody, scale, ranks, counts,
    EXPERTS: tl.constexpr, R: tl.constexpr, E: tl.constexpr, TOP: tl.constexpr, SCORE: tl.constexpr, BIAS: tl.constexpr,
    CHOICE_BIAS: tl.constexpr, NORMED: tl.constexpr, GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr, GROUP_BEST: tl.constexpr,
):  # fmt: skip
    """R tokens of a large step: the weights of all experts over their logits, and where chosen the rank among the R tokens.

    ranks int32 [T, EXPERTS], -1 where not chosen; counts int32 [programs, EXPERTS].
    """
    program = tl.program_id(0)
    t, e = program * R + tl.arange(0, R), tl.arange(0, E)
    live = t < count
    weight, chosen = _choose(
        logits, bias, choice_bias, slots, t, live, nobody, scale, EXPERTS, R, E, TOP, SCORE, BIAS, CHOICE_BIAS, NORMED, GROUPS,
        TOP_GROUPS, GROUP_BEST,
    )  # fmt: skip
    at = t[:, None] * EXPERTS + e[None, :]
    mask = live[:, None] & (e < EXPERTS)[None, :]
    tl.store(logits + at, weight, mask=mask)
    tl.store(ranks + at, tl.where(chosen > 0, tl.cumsum(chosen, 0) - chosen, -1), mask=mask)
    tl.store(counts + program * EXPERTS + e, tl.sum(chosen, 0), mask=e < EXPERTS)


@jit(do_not_specialize=["programs"])
def tiles_kernel(counts, programs, firsts, tiles, total, EXPERTS: tl.constexpr, E: tl.constexpr, M: tl.constexpr):
    """The tiles of a large step: counts [programs, EXPERTS] become, in firsts, the first row of each program's tokens."""
    e = tl.arange(0, E)
    inside = e < EXPERTS
    number = tl.zeros([E], tl.int32)
    for p in range(programs):
        number += tl.load(counts + p * EXPERTS + e, mask=inside, other=0)
    needed = (number + M - 1) // M
    end = tl.cumsum(needed, 0)
    tl.store(total, tl.sum(needed, 0))
    row = (end - needed) * M
    for i in range(tl.max(needed, 0)):
        tl.store(tiles + end - needed + i, e, mask=i < needed)
    for p in range(programs):
        tl.store(firsts + p * EXPERTS + e, row, mask=inside)
        row += tl.load(counts + p * EXPERTS + e, mask=inside, other=0)


@jit(do_not_specialize=["count"])
def place_kernel(
    logits, ranks, firsts, count, rows, places, weights,
    EXPERTS: tl.constexpr, R: tl.constexpr, E: tl.constexpr, TOP: tl.constexpr,
):  # fmt: skip
    """Puts the tokens of `choose_kernel`'s programs into the tiles of `tiles_kernel`."""
    program = tl.program_id(0)
    t, e = program * R + tl.arange(0, R), tl.arange(0, E)
    live = t < count
    mask = live[:, None] & (e < EXPERTS)[None, :]
    at = t[:, None] * EXPERTS + e[None, :]
    rank = tl.load(ranks + at, mask=mask, other=-1)
    weight = tl.load(logits + at, mask=mask, other=0.0)
    first = tl.load(firsts + program * EXPERTS + e, mask=e < EXPERTS, other=0)
    chosen = tl.where(rank >= 0, 1, 0)
    _write_choice(weight, chosen, first[None, :] + rank, t, live, rows, places, weights, EXPERTS, R, E, TOP)


@jit(do_not_specialize=["x_stride"])
def grouped_kernel(
    x, weight, bias, rows, tiles, total, out, x_stride,
    N: tl.constexpr, K: tl.constexpr, KIND: tl.constexpr, GATED: tl.constexpr, BIAS: tl.constexpr, GATHER: tl.constexpr,
    M: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One (tile, BN outputs): out[tile's row] = x[row] weight[expert]^T, behind it a gate or an activation unless KIND is "".

    GATHER: x is by token, at `rows`; else it is by row of the tiles. weight [experts, N or 2 N, K]: with GATED the second N
    outputs multiply the gates of the first.
    """
    tile, n = tl.program_id(1), tl.program_id(0) * BN + tl.arange(0, BN)
    if tile >= tl.load(total):
        return
    m, k = tl.arange(0, M), tl.arange(0, BK)
    expert = tl.load(tiles + tile).to(tl.int64)
    token = tl.load(rows + tile * M + m)
    real = token >= 0
    source = tl.where(real, token, 0) if GATHER else tile * M + m
    x_at = x + source.to(tl.int64)[:, None] * x_stride + k[None, :]
    inside = n < N
    OUT: tl.constexpr = 2 * N if GATED else N
    w_at = weight + expert * OUT * K + tl.where(inside, n, 0).to(tl.int64)[None, :] * K + k[:, None]
    acc = tl.zeros([M, BN], tl.float32)
    more = tl.zeros([M, BN], tl.float32)
    for begin in range(0, K, BK):
        left = k < K - begin
        a = tl.load(x_at + begin, mask=real[:, None] & left[None, :], other=0.0)
        if K % BK == 0:
            b = tl.load(w_at + begin)
        else:
            b = tl.load(w_at + begin, mask=left[:, None], other=0.0)
        acc = tl.dot(a, b, acc, input_precision=PRECISION)
        if GATED:
            if K % BK == 0:
                c = tl.load(w_at + N * K + begin)
            else:
                c = tl.load(w_at + N * K + begin, mask=left[:, None], other=0.0)
            more = tl.dot(a, c, more, input_precision=PRECISION)
    if BIAS:
        acc += tl.load(bias + expert * OUT + n, mask=inside, other=0.0).to(tl.float32)[None, :]
        if GATED:
            more += tl.load(bias + expert * OUT + N + n, mask=inside, other=0.0).to(tl.float32)[None, :]
    DTYPE: tl.constexpr = out.dtype.element_ty
    if GATED:
        acc = gate_product(acc.to(DTYPE).to(tl.float32), more.to(DTYPE).to(tl.float32), KIND, DTYPE)
    elif KIND != "":
        acc = act(acc.to(DTYPE).to(tl.float32), KIND)
    into = out + (tile * M + m).to(tl.int64)[:, None] * N + n[None, :]
    tl.store(into, acc.to(DTYPE), mask=real[:, None] & inside[None, :])


@jit(do_not_specialize=["gate_stride"])
def combine_kernel(
    y, places, weights, shared, shared_gate, out, gate_stride,
    H: tl.constexpr, TOP: tl.constexpr, SHARED: tl.constexpr, GATE: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    """out[t] = the sum of a token's rows y[place] times their weights, and its row of the shared expert."""
    t, h = tl.program_id(0).to(tl.int64), tl.program_id(1) * B + tl.arange(0, B)
    inside = h < H
    total = tl.zeros([B], tl.float32)
    for i in tl.static_range(TOP):
        place = tl.load(places + t * TOP + i)
        chosen = place >= 0
        row = tl.load(y + tl.where(chosen, place, 0).to(tl.int64) * H + h, mask=inside & chosen, other=0.0)
        total += row.to(tl.float32) * tl.load(weights + t * TOP + i, mask=chosen, other=0.0)
    if SHARED:
        row = tl.load(shared + t * H + h, mask=inside, other=0.0).to(tl.float32)
        if GATE:
            row *= 1.0 / (1.0 + tl.exp(-tl.load(shared_gate + t * gate_stride).to(tl.float32)))
        total += row
    tl.store(out + t * H + h, total.to(out.dtype.element_ty), mask=inside)


class Tiling(NamedTuple):
    """Rows of the tiles that a step's tokens are sorted into."""

    rows: Tensor  # int32 [tiles * M]: tokens, -1 for none
    places: Tensor  # int32 [T, top_k]
    weights: Tensor  # float32 [T, top_k]
    tiles: Tensor  # int32 [tiles]: experts
    total: Tensor  # int32 [1]
    m: int


def router_logits(x: Tensor, router: Tensor, precision: str) -> Tensor:
    """float32 [T, experts]; few tokens by a kernel of many programs, where a library's product has few."""
    if x.shape[0] > ROWS:
        return torch.mm(x, router.t(), out_dtype=torch.float32) if x.dtype != torch.float32 else torch.mm(x, router.t())
    experts, k = router.shape
    logits = torch.empty((x.shape[0], experts), dtype=torch.float32, device=x.device)
    router_kernel[(cdiv(experts, 16), cdiv(x.shape[0], 16))](
        x, router, logits, x.shape[0], x.stride(0), EXPERTS=experts, K=k, M=16, N=16, BK=512 // x.element_size(),
        PRECISION=precision, num_warps=4, num_stages=3,
    )  # fmt: skip
    return logits


def tile_rows(tokens: int, top_k: int, experts: int) -> int:
    """Rows of a tile: about as many as an expert gets, so that its weights are read once."""
    return min(128, max(16, power(2 * tokens * top_k // experts)))


def route(logits: Tensor, routing: Routing, step: Any) -> Tiling:
    """logits float32 [T, experts], which are overwritten."""
    tokens, experts = logits.shape
    m = tile_rows(tokens, routing.top_k, experts)
    entries = tokens * routing.top_k
    most = min(entries, cdiv(entries, m) + experts)
    ints = {"dtype": torch.int32, "device": logits.device}
    single = tokens <= ROWS
    rows = torch.empty(most * m, **ints) if single else torch.full((most * m,), -1, **ints)
    places = torch.empty((tokens, routing.top_k), **ints) if single else torch.full((tokens, routing.top_k), -1, **ints)
    weights = torch.empty((tokens, routing.top_k), dtype=torch.float32, device=logits.device)
    tiles, total = torch.empty(most, **ints), torch.empty(1, **ints)
    e = power(experts)
    options = {
        "EXPERTS": experts, "E": e, "TOP": routing.top_k, "SCORE": routing.score, "BIAS": routing.bias is not None,
        "CHOICE_BIAS": routing.choice_bias is not None, "NORMED": routing.normed, "GROUPS": routing.groups,
        "TOP_GROUPS": routing.top_groups, "GROUP_BEST": routing.group_best,
    }  # fmt: skip
    none = logits  # an address that is not read
    given = (
        logits, none if routing.bias is None else routing.bias, none if routing.choice_bias is None else routing.choice_bias,
        step.slots, tokens, step.nobody, routing.scale,
    )  # fmt: skip
    found = Tiling(rows, places, weights, tiles, total, m)
    if single:
        r = power(tokens)
        route_kernel[(1,)](*given, *found[:5], M=m, MOST=most, R=r, num_warps=4 if r * e <= 2048 else 8, **options)
        return found
    r = max(1, 4096 // e)
    programs = cdiv(tokens, r)
    ranks, counts, firsts = torch.empty((tokens, experts), **ints), *(torch.empty((programs, experts), **ints) for _ in "ab")
    choose_kernel[(programs,)](*given, ranks, counts, R=r, num_warps=4, **options)
    tiles_kernel[(1,)](counts, programs, firsts, tiles, total, EXPERTS=experts, E=e, M=m, num_warps=4)
    place_kernel[(programs,)](
        logits, ranks, firsts, tokens, rows, places, weights, EXPERTS=experts, R=r, E=e, TOP=routing.top_k, num_warps=4
    )  # fmt: skip
    return found


def grouped(x: Tensor, weight: ExpertWeight, tiling: Tiling, kind: str, gated: bool, gather: bool, precision: str) -> Tensor:
    """x, by token with `gather` or else by row of the tiles, to rows of the tiles [tiles * M, out]."""
    n, k = weight.data.shape[1] // (2 if gated else 1), weight.data.shape[2]
    y = x.new_empty((tiling.rows.shape[0], n))
    if not n:
        return y
    m = tiling.m
    bn, bk, warps, stages = TILES[gated, m > 32]
    if x.dtype == torch.float32:
        bk, stages = bk // 2, 2
    grouped_kernel[(cdiv(n, bn), tiling.tiles.shape[0])](
        x, weight.data, weight.data if weight.bias is None else weight.bias, tiling.rows, tiling.tiles, tiling.total, y,
        x.stride(0), N=n, K=k, KIND=kind, GATED=gated, BIAS=weight.bias is not None, GATHER=gather, M=m, BN=bn, BK=bk,
        PRECISION=precision, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return y


def experts(
    x: Tensor, spec: Experts, shared: Tensor | None, shared_gate: Tensor | None, out: Tensor, step: Any,
    precision: str,
) -> Tensor:  # fmt: skip
    """Writes [T, hidden] to `out`; `shared` [T, hidden] is added, times the sigmoid of its gate [T, 1]."""
    tiling = route(router_logits(x, spec.routing.router, precision), spec.routing, step)
    gated = spec.gate_up.data.shape[1] == 2 * spec.down.data.shape[2]
    inner = grouped(x, spec.gate_up, tiling, spec.gate, gated, True, precision)
    y = grouped(inner, spec.down, tiling, "", False, False, precision)
    hidden, block = out.shape[1], 1024
    combine_kernel[(x.shape[0], cdiv(hidden, block))](
        y, tiling.places, tiling.weights, y if shared is None else shared, y if shared_gate is None else shared_gate, out,
        0 if shared_gate is None else shared_gate.stride(0), H=hidden, TOP=spec.routing.top_k, SHARED=shared is not None,
        GATE=shared_gate is not None, B=block, num_warps=4,
    )  # fmt: skip
    return out
