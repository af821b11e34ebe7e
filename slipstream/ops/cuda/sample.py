# pyright: basic, reportMissingImports=false, reportInvalidTypeForm=false, reportAttributeAccessIssue=false, reportArgumentType=false, reportIndexIssue=false, reportCallIssue=false, reportOperatorIssue=false
"""Sampling on the device: each rank's best (score, id) with the noise of ops/sampling.py, the exchange, the tokens' writing.

Scores and ids carry failures: the id NO_TOKEN and a score of -inf where nothing is allowed, NOT_FINITE and +inf where a logit
is NaN.
"""

from slipstream.ops.cuda.launch import jit, tl
from slipstream.ops.cuda.sums import barrier

NO_TOKEN, NOT_FINITE = -1, -2  # in place of a token id
UNFORCED, ELSEWHERE = -100, -101  # in `forced`: the row's own best counts; another rank chooses
TILE = 2048  # ids of one program


@jit
def _mix(x):
    """SplitMix64's output function on uint64."""
    x = x + tl.full([], 0x9E3779B97F4A7C15, tl.uint64)
    x = (x ^ (x >> 30)) * tl.full([], 0xBF58476D1CE4E5B9, tl.uint64)
    x = (x ^ (x >> 27)) * tl.full([], 0x94D049BB133111EB, tl.uint64)
    return x ^ (x >> 31)


@jit
def _gumbel(ids, base, position):
    """float32 noise of `ids` for the draw keyed by (base, position); bit for bit the integers of ops/sampling.py."""
    key = _mix(base.to(tl.uint64, bitcast=True) ^ position.to(tl.uint64))
    k0, k1 = key.to(tl.uint32), (key >> 32).to(tl.uint32)
    h = ids.to(tl.uint32) * tl.full([], 0x9E3779B1, tl.uint32) + k0
    h = (h ^ (h >> 16)) * tl.full([], 0x7FEB352D, tl.uint32)
    h = (h ^ (h >> 15)) + k1
    h = h * tl.full([], 0x846CA68B, tl.uint32)
    h = (h ^ (h >> 16)) * tl.full([], 0x7FEB352D, tl.uint32)
    h = (h ^ (h >> 15)) * tl.full([], 0x846CA68B, tl.uint32)
    h = h ^ (h >> 16)
    v = tl.minimum(((h >> 1).to(tl.float32) + 0.5) * 4.656612873077393e-10, 0.99999994)
    u = 1.0 - v
    log = tl.where(u == 1.0, -v, tl.log(u) * v / tl.where(u == 1.0, 1.0, 1.0 - u))  # log1p(-v), after W. Kahan
    return -tl.log(-log)


@jit(do_not_specialize=["first", "width"])
def local_best_kernel(
    logits, slots, positions, temperatures, bases, scores, ids, counter, first, width, stride, TILE: tl.constexpr
):  # fmt: skip
    """(row, part): the best of logits / temperature + noise over TILE of this rank's ids, the lowest id among equals.

    logits float32 [rows, stride] of ids first, first + 1, ...; temperatures float32 and bases int64 by slot; scores and ids
    [rows, parts]. Program 0 counts the step, for the outcome ring.
    """
    row, part = tl.program_id(0), tl.program_id(1)
    if row + part == 0:
        tl.store(counter, tl.load(counter) + 1)
    slot = tl.load(slots + row)
    temperature = tl.load(temperatures + slot)
    c = part * TILE + tl.arange(0, TILE)
    x = tl.load(logits + row.to(tl.int64) * stride + c, mask=c < width, other=-float("inf"))
    broken = tl.max((x != x).to(tl.int32), 0)
    if temperature > 0.0:
        noise = _gumbel(first + c, tl.load(bases + slot), tl.load(positions + row))
        x = tl.where(c < width, x / temperature + noise, -float("inf"))
    x = tl.where(x != x, float("inf"), x)
    best = tl.max(x, 0)
    id = tl.min(tl.where(x == best, first + c, 2147483647), 0)
    id = tl.where(broken != 0, -2, tl.where(best == -float("inf"), -1, id))
    tl.store(scores + row * tl.num_programs(1) + part, best)
    tl.store(ids + row * tl.num_programs(1) + part, id)


@jit
def _join(scores, ids, row, parts, PARTS: tl.constexpr):
    """The best (score, id) of a row's parts."""
    p = tl.arange(0, PARTS)
    s = tl.load(scores + row * parts + p, mask=p < parts, other=-float("inf"))
    i = tl.load(ids + row * parts + p, mask=p < parts, other=2147483647)
    best = tl.max(s, 0)
    return best, tl.min(tl.where((s == best) & (p < parts), i, 2147483647), 0)


@jit(do_not_specialize=["parts"])
def force_kernel(scores, ids, rows, forced, parts, PARTS: tl.constexpr):
    """forced[rows[i]] = the best id of row i's parts: a token that this rank has chosen for the group."""
    i = tl.program_id(0)
    _, id = _join(scores, ids, i, parts, PARTS)
    tl.store(forced + tl.load(rows + i), id)


@jit
def _chosen(scores, ids, forced, token, parts, PARTS: tl.constexpr):
    """This rank's (score, id) of a judged token: its own best, or what `forced` says."""
    best, id = _join(scores, ids, token, parts, PARTS)
    will = tl.load(forced + token)
    best = tl.where(will == -101, -float("inf"), tl.where(will == -100, best, 3.0e38))
    return best, tl.where(will == -101, -1, tl.where(will == -100, id, will))


@jit
def _best_of_ranks(pairs, rank, token, WORLD: tl.constexpr, PAIRS: tl.constexpr):
    """The best id that the ranks have written for a judged token."""
    best = -float("inf")
    id = -1
    own = tl.load(pairs + rank)
    for r in tl.static_range(WORLD):
        here = (own + (r * PAIRS + token) * 8).to(tl.pointer_type(tl.int32))
        score = tl.load(here, volatile=True).to(tl.float32, bitcast=True)
        other = tl.load(here + 1, volatile=True)
        id = tl.where(score > best, other, id)
        best = tl.maximum(best, score)
    return id


@jit(do_not_specialize=["parts", "rank", "nobody"])
def exchange_kernel(
    scores, ids, forced, slots, positions, tokens, next, ring, counter, pairs, flags, counts, fault,
    parts, stride, ring_stride, rank, nobody, bound,
    PARTS: tl.constexpr, WORLD: tl.constexpr, PROGRAMS: tl.constexpr, PAIRS: tl.constexpr, DEPTH: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    """One row of WIDTH judged tokens: joins their parts, exchanges (score, id) with the other ranks, accepts, and writes.

    pairs int64 [WORLD]: addresses of the ranks' int32 [WORLD, PAIRS, 2]. Token j of a row is accepted where those before it
    are and equal the drafts that tokens[slot, position] held. A row's judged tokens come first; the rest have slot `nobody`.
    Accepted ones go to tokens[slot, position], the last one's position to next[slot]: there the next step reads them.
    This step's place in ring int32 [DEPTH, ring_stride] gets all ids or failures, then, where WIDTH > 1, the rows' accepted
    counts (from the word nobody * WIDTH on), and in its last word the fault.
    """
    row = tl.program_id(0)
    if WORLD > 1:
        for j in tl.static_range(WIDTH):
            best, id = _chosen(scores, ids, forced, row * WIDTH + j, parts, PARTS)
            for r in tl.static_range(WORLD):
                there = (tl.load(pairs + r) + (rank * PAIRS + row * WIDTH + j) * 8).to(tl.pointer_type(tl.int32))
                tl.store(there, best.to(tl.int32, bitcast=True))
                tl.store(there + 1, id)
        tl.debug_barrier()
        barrier(flags, counts, fault, rank, bound, row, WORLD, PROGRAMS, True)
    place = ring + (tl.load(counter) - 1) % DEPTH * ring_stride
    accepted = 0
    right = True  # the drafts so far
    for j in tl.static_range(WIDTH):
        token = row * WIDTH + j
        if WORLD > 1:
            id = _best_of_ranks(pairs, rank, token, WORLD, PAIRS)
        else:
            _, id = _chosen(scores, ids, forced, token, parts, PARTS)
        tl.store(place + token, id)
        slot = tl.load(slots + token)
        live = right & (slot != nobody)
        position = tl.load(positions + token)
        at = tokens + slot.to(tl.int64) * stride + position
        if WIDTH > 1:
            right = live & (tl.load(at) == id)
        tl.store(at, tl.maximum(id, 0), mask=live)
        tl.store(next + slot, position, mask=live)
        accepted += live.to(tl.int32)
    if WIDTH > 1:
        tl.store(place + nobody * WIDTH + row, accepted)
    if row == 0:
        tl.store(place + ring_stride - 1, tl.load(fault))
