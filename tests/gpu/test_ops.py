"""The Triton operations against the same arithmetic in float64, on fresh random inputs and poisoned outputs."""

import numpy as np
import pytest
import torch

from slipstream.ops.interface import JudgedRows
from slipstream.shard import Heads, Shard
from slipstream.weights.packed import dense

STEP = JudgedRows(torch.zeros(0, dtype=torch.int32))  # these operations need nothing of it
DEVICE = torch.device("cuda", 0)


def make_ops(dtype):
    from slipstream.ops.cuda.ops import CudaOps
    from slipstream.ops.cuda.symmetric import Symmetric

    return CudaOps(dtype, DEVICE, Shard(), Symmetric(DEVICE, 0, 1))


def error(out: torch.Tensor, reference: torch.Tensor) -> float:
    """‖out − reference‖ / ‖reference‖; NaN stays NaN, so it never passes."""
    return ((out.double() - reference).norm() / reference.norm()).item()


def bound(dtype) -> float:
    return 1e-5 if dtype == torch.float32 else 1e-2


def rotary(length: int, dim: int) -> torch.Tensor:
    angles = torch.outer(torch.arange(length), 1e4 ** -(torch.arange(0, dim, 2) / dim)).float()
    return torch.cat([angles.cos(), angles.sin()], 1).to(DEVICE)


def reference_attention(
    x, past, positions, lengths, heads: Heads, dim, table, norms, window: int = 0, sinks=None, softcap: float = 0.0
):  # fmt: skip
    """float64 [T, queries * dim]: x [T, heads, dim] of rows with `lengths` tokens each after `past` [row][n, 2, keys, dim]."""
    x = x.double()
    q, k, v = x.split([heads.num_q_heads, heads.num_kv_heads, heads.num_kv_heads], 1)
    if norms is not None:
        q, k = (t * torch.rsqrt(t.pow(2).mean(-1, keepdim=True) + 1e-6) * w.double() for t, w in ((q, norms[0]), (k, norms[1])))
    width = 0 if table is None else table.shape[1]

    def turn(t):
        if table is None:
            return t
        cos, sin = table.double()[positions].unsqueeze(1).chunk(2, -1)
        a, b = t[..., :width].chunk(2, -1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin, t[..., width:]], -1)

    q, k = turn(q), turn(k)
    out, at = [], 0
    for row, n in enumerate(lengths):
        keys = torch.cat([past[row][:, 0].double(), k[at : at + n]])
        values = torch.cat([past[row][:, 1].double(), v[at : at + n]])
        share = heads.num_q_heads // heads.num_kv_heads
        keys, values = keys.repeat_interleave(share, 1), values.repeat_interleave(share, 1)
        s = torch.einsum("qhd,khd->hqk", q[at : at + n], keys) * dim**-0.5
        if softcap:
            s = softcap * torch.tanh(s / softcap)
        behind = torch.arange(n, device=DEVICE)[:, None] + len(past[row]) - torch.arange(len(keys), device=DEVICE)[None]
        seen = (behind >= 0) & (behind < (window or len(keys) + 1))
        s = s.masked_fill(~seen, -torch.inf)
        if sinks is not None:
            s = torch.cat([s, sinks.double()[:, None, None].expand(-1, n, 1)], -1)
        out.append(torch.einsum("hqk,khd->qhd", s.softmax(-1)[..., : len(keys)], values))
        at += n
    return torch.cat(out).flatten(1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("num_q_heads, num_kv_heads, dim", [(8, 2, 64), (6, 3, 80), (16, 4, 128), (4, 4, 96), (4, 1, 256)])
@pytest.mark.parametrize("shape", ["decode", "one long row", "one among short ones", "mixed", "short chunk, long context"])
@pytest.mark.parametrize("page_size", [16, 64, 128])
def test_attention_equals_float64(dtype, num_q_heads, num_kv_heads, dim, shape, page_size):
    if page_size > 16 and (dtype == torch.float32 or dim not in (64, 128, 256)):
        pytest.skip("pages of many tokens matter where tiles are taken")
    check_attention(dtype, num_q_heads, num_kv_heads, dim, shape, page_size, turned=dim)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", ["decode", "mixed", "short chunk, long context"])
@pytest.mark.parametrize("window, has_sinks, softcap, turned", [
    (128, True, 0.0, 64), (100, False, 0.0, 64), (0, True, 2.0, 0), (700, False, 2.0, 16), (0, False, 0.0, 16),
    (1, False, 0.0, 64),
])  # fmt: skip
def test_windows_sinks_capped_scores_and_partial_rotation_equal_float64(dtype, shape, window, has_sinks, softcap, turned):
    check_attention(dtype, 8, 2, 64, shape, 16, turned, window, has_sinks, softcap)
    check_attention(dtype, 4, 2, 256, shape, 64, turned, window, has_sinks, softcap)


def check_attention(
    dtype, num_q_heads, num_kv_heads, dim, shape, page_size, turned, window=0, has_sinks=False, softcap=0.0
):  # fmt: skip
    sinks = torch.randn(num_q_heads, device=DEVICE) if has_sinks else None
    from slipstream.ops.cuda.ops import CudaStep, Norm
    from slipstream.ops.cuda.prompt_blocks import COLUMNS
    from slipstream.ops.layers import Attention

    ops = make_ops(dtype)
    heads = Heads(0, num_q_heads, 0, num_kv_heads)
    starts, counts, decodes = {
        "decode": ([0, 5, 300, 1500, 31, 32], [1] * 6, 6),
        "one long row": ([2900], [1], 1),
        "one among short ones": ([40, 3900, 70, 100], [1, 1, 1, 60], 3),
        "short chunk, long context": ([3900, 2000], [40, 131], 0),
        "mixed": ([40, 700, 0, 129, 1000], [1, 1, 150, 1, 77], 2),
    }[shape]
    rows, total, padded = len(starts), sum(counts), sum(counts) + 3
    pages = 1000
    norms = [torch.rand(dim, device=DEVICE, dtype=dtype) + 0.5 for _ in range(2)] if dim in (128, 256) else None
    table = rotary(4096, turned) if turned else None
    spec = Attention(
        0, 0, heads, dim, dim**-0.5, table, *([Norm(w, 1e-6) for w in norms] if norms else [None, None]), sinks, softcap
    )  # fmt: skip
    cache = [torch.full((pages + 1, num_kv_heads, page_size, dim), float("nan"), device=DEVICE, dtype=dtype) for _ in range(2)]
    for c in cache:
        c[0] = 0
    tables = torch.zeros((rows + 1, 256), dtype=torch.int32, device=DEVICE)
    free = (torch.randperm(pages) + 1).tolist()
    past = []
    for row, (start, count) in enumerate(zip(starts, counts, strict=True)):
        mine = [free.pop() for _ in range(-(-(start + count) // page_size))]
        tables[row, : len(mine)] = torch.tensor(mine, dtype=torch.int32)
        old = torch.randn(start, 2, num_kv_heads, dim, device=DEVICE, dtype=dtype)
        past.append(old)
        for i in (0, 1):
            for p in range(max(0, start - window + 1) // page_size if window else 0, -(-start // page_size)):
                part = old[p * page_size : (p + 1) * page_size, i]
                cache[i][mine[p], :, : len(part)] = part.transpose(0, 1)
                cache[i][mine[p], :, len(part) :] = 0
    qkv = torch.randn(padded, (num_q_heads + 2 * num_kv_heads) * dim, device=DEVICE, dtype=dtype)
    positions = torch.zeros(padded, dtype=torch.int32, device=DEVICE)
    slots = torch.full((padded,), rows, dtype=torch.int32, device=DEVICE)
    prompts, at = [], 0
    for row, (start, count) in enumerate(zip(starts, counts, strict=True)):
        positions[at : at + count] = torch.arange(start, start + count, dtype=torch.int32)
        slots[at : at + count] = row
        if row >= decodes:
            prompts.append((row, start, at, count))
        at += count
    wanted = reference_attention(
        qkv[:total].view(total, -1, dim), past, positions[:total].long(), counts, heads, dim, table, norms, window, sinks,
        softcap,
    )  # fmt: skip
    parts = np.zeros((128, COLUMNS), np.int32)
    part_counts = ops.cutter(num_q_heads).cut(prompts, parts)
    put = lambda x: torch.tensor(x, dtype=torch.int32, device=DEVICE)
    step = CudaStep(
        positions, positions, slots, [tables], [(cache[0], cache[1])], [ops.tiles_of((cache[0], cache[1]), page_size)],
        (window,), {(num_kv_heads, window): ops.scratch(8, num_kv_heads, dim)}, ops.prompt_scratch(dim), page_size, rows,
        8 if prompts else decodes,
        put([decodes]), bool(prompts), put(parts), put(part_counts),
    )  # fmt: skip
    ops.begin(step)
    for _ in range(3):  # the splits' counters are zero again after each kernel
        got = ops.attention(qkv.clone(), spec, step)[:total]
        assert error(got, wanted) < bound(dtype)


@pytest.mark.parametrize("heads", [1, 4, 8])
@pytest.mark.parametrize("rows", [1, 16, 48, 128])
def test_parts_of_decode_rows_cover_their_caches(rows, heads):
    """Each part once, in whole tiles but for the last, of as many rows as are real; a long row among short ones gets many."""
    from types import SimpleNamespace

    from slipstream.ops.cuda.attention import TILE
    from slipstream.ops.cuda.ops import MOST_PARTS, decode_parts

    ops, rng = make_ops(torch.bfloat16), np.random.default_rng(rows * heads)
    scratch = ops.scratch(128, heads, 64)
    put = lambda x: torch.tensor(x, dtype=torch.int32, device=DEVICE)
    for real in sorted({0, 1, rows // 3, rows}):
        for longest in (300, 4000, 130_000):
            lengths = rng.integers(1, longest, rows)
            step = SimpleNamespace(
                positions=put(lengths - 1), decodes=put([real]), decode_rows=rows, scratch={(heads, 0): scratch}
            )
            ops.begin(step)
            count = scratch.count.item()
            assert count <= decode_parts(rows, heads) <= len(scratch.parts)
            parts = scratch.parts[:count].tolist()
            at = 0
            for row, length in enumerate(lengths[:real].tolist()):
                mine = parts[at : at + parts[at][3]]
                assert [p[1] for p in mine] == [0, *(p[2] for p in mine[:-1])] and mine[-1][2] == length
                assert all(p[0] == row and p[1] < p[2] and p[1] % TILE == 0 for p in mine)
                assert all(p[3] == len(mine) <= MOST_PARTS and p[4] == at for p in mine)
                at += len(mine)
            assert at == count
    lengths = [900] * 16 + [25_000]
    step = SimpleNamespace(positions=put(lengths) - 1, decodes=put([17]), decode_rows=128, scratch={(heads, 0): scratch})
    ops.begin(step)
    parts = scratch.parts[: scratch.count.item()].tolist()
    assert max(end - begin for _, begin, end, _, _ in parts) <= 1024


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("width", [96, 576, 4096])
def test_norm_swiglu_and_embedding_equal_float64(dtype, width):
    from slipstream.ops.cuda.ops import Linear, Norm

    ops = make_ops(dtype)
    x = torch.randn(37, width, device=DEVICE, dtype=dtype)
    weight = torch.rand(width, device=DEVICE, dtype=dtype) + 0.5
    norm = lambda t: t * torch.rsqrt(t.pow(2).mean(-1, keepdim=True) + 1e-5) * weight.double()
    assert error(ops.norm(x, Norm(weight, 1e-5), STEP), norm(x.double())) < bound(dtype)

    residual = torch.randn_like(x)
    w = torch.randn(width, width, device=DEVICE, dtype=dtype) / width**0.5
    wanted = residual.double() + x.double() @ w.double().t()
    torch.backends.cuda.matmul.allow_tf32 = False
    total, out = ops.reduce_add_norm(ops.partial(x, Linear(w), STEP), residual.clone(), Norm(weight, 1e-5), STEP)
    assert error(total, wanted) < bound(dtype)
    assert error(out, norm(wanted)) < bound(dtype)

    gate, up = (torch.randn(160, width, device=DEVICE, dtype=dtype) / width**0.5 for _ in range(2))
    wanted = torch.nn.functional.silu(x.double() @ gate.double().t()) * (x.double() @ up.double().t())
    assert error(ops.gated(x, ops.weight([dense(gate), dense(up)]), "silu", STEP), wanted) < bound(dtype)


@pytest.mark.parametrize("vocab", [331, 5000, 151936])
def test_the_draw_equals_the_plain_one(vocab):
    import numpy as np

    from slipstream.log.request import SamplingParams
    from slipstream.ops.cuda.sample import TILE, local_best_kernel
    from slipstream.ops.sampling import choose, mix

    n = 7
    logits = torch.randn(n, vocab, device=DEVICE) * 2
    temperatures = [0.0, 0.3, 0.7, 1.0, 1.5, 1.0, 0.0]
    seeds = [5, 2**62 + 12345, 77, 1, 0, 2**63 - 1, 3]
    ends = [72, 35, 46, 1, 30000, 9, 8]
    bases = torch.tensor(np.array([mix(mix(s) ^ 2) for s in seeds], np.uint64).view(np.int64), device=DEVICE)
    tiles = -(-vocab // TILE)
    scores = torch.full((n, tiles), float("nan"), device=DEVICE)
    ids = torch.full((n, tiles), -7, dtype=torch.int32, device=DEVICE)
    rows, positions = torch.arange(n, device=DEVICE, dtype=torch.int32), torch.tensor(ends, device=DEVICE, dtype=torch.int32)
    counter = torch.zeros(1, device=DEVICE, dtype=torch.int32)
    local_best_kernel[(n, tiles)](
        logits, rows, positions, torch.tensor(temperatures, device=DEVICE), bases, scores, ids, counter, 0, vocab, vocab,
        TILE=TILE,
    )  # fmt: skip
    got = ids.gather(1, scores.argmax(1, keepdim=True))[:, 0].tolist()
    assert got == [
        choose(logits[i].cpu(), SamplingParams(temperature=temperatures[i], seed=seeds[i], choice=2), ends[i]) for i in range(n)
    ]  # fmt: skip
    assert counter.item() == 1


@pytest.mark.parametrize("width", [1, 3])
def test_a_decode_step_is_prepared_from_the_tables(width):
    """Padding rows and positions whose judgement would lie beyond the request's limit are nobody's."""
    from slipstream.ops.cuda.prepare import decode_prepare_kernel

    slots, rows, padded, stride = 150, 130, 136, 64
    rng = np.random.default_rng(width)
    row_slots = np.full(padded, slots, np.int32)
    row_slots[:rows] = rng.permutation(slots)[:rows]
    next, limits = (np.zeros(slots + 1, np.int32) for _ in range(2))
    next[:slots] = rng.integers(0, 40, slots)
    limits[:slots] = next[:slots] + rng.integers(2, 6, slots)
    tokens = rng.integers(0, 999, (slots + 1, stride)).astype(np.int32)
    put = lambda x: torch.tensor(x, device=DEVICE)
    out = [torch.full((padded * width,), -7, dtype=torch.int32, device=DEVICE) for _ in range(6)]
    mine = put(row_slots)
    if width == 1:
        out[0] = mine
    n = padded * width
    decode_prepare_kernel[(-(-n // 128),)](
        mine, put(next), put(limits), put(tokens), *out, padded, stride, slots, WIDTH=width, B=128
    )  # fmt: skip
    slot = np.repeat(row_slots, width)
    position = next[slot] + np.tile(np.arange(width, dtype=np.int32), padded)
    if width > 1:
        past = position + 1 >= limits[slot]
        assert past[: rows * width].any() and not past[: rows * width].all()
        slot, position = np.where(past, slots, slot), np.where(past, 0, position)
    expected = [slot, tokens[slot, position], position, np.arange(n), slot, position + 1]
    for got, wanted in zip(out, expected, strict=True):
        assert got.tolist() == wanted.tolist()


@pytest.mark.parametrize("width", [1, 3])
def test_drafts_are_accepted_as_far_as_they_are_what_was_chosen(width):
    from slipstream.ops.cuda.sample import ELSEWHERE, NO_TOKEN, UNFORCED, exchange_kernel

    slots, rows, padded, parts, stride, depth = 40, 29, 32, 5, 64, 4
    rng = np.random.default_rng(width)
    tokens = rng.integers(0, 2, (slots + 1, stride)).astype(np.int32)  # two ids, so that drafts are often right
    scores = rng.standard_normal((padded * width, parts)).astype(np.float32)
    ids = rng.integers(0, 2, (padded * width, parts)).astype(np.int32)
    forced = np.full(padded * width, UNFORCED, np.int32)
    forced[::7], forced[5::11] = 1, ELSEWHERE  # with one rank, a row that another one chooses has no token
    slot = np.full((padded, width), slots, np.int32)
    slot[:rows] = rng.permutation(slots)[:rows, None]
    sampled = np.where(np.arange(padded) % 3, width, rng.integers(1, width + 1, padded))
    slot[np.arange(width) >= sampled[:, None]] = slots
    position = (rng.integers(1, 50, padded)[:, None] + np.arange(width)).astype(np.int32)
    next = rng.integers(0, 9, slots + 1).astype(np.int32)
    words = slots * width + (slots if width > 1 else 0) + 1
    put = lambda x: torch.tensor(np.asarray(x), device=DEVICE)
    device_tokens, device_next = put(tokens), put(next)
    ring = torch.full((depth, words), -7, dtype=torch.int32, device=DEVICE)
    one = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    exchange_kernel[(padded,)](
        put(scores), put(ids), put(forced), put(slot.reshape(-1)), put(position.reshape(-1)), device_tokens, device_next, ring,
        put(np.int32([6])), one, one, one.int(), put(np.int32([9])), parts, stride, ring.stride(0), 0, slots, 0, PARTS=8,
        WORLD=1, PROGRAMS=1024, PAIRS=slots * width, DEPTH=depth, WIDTH=width, num_warps=1,
    )  # fmt: skip
    chosen = ids[np.arange(len(ids)), scores.argmax(1)]
    chosen = np.where(forced == UNFORCED, chosen, np.where(forced == ELSEWHERE, NO_TOKEN, forced)).reshape(padded, width)
    counts = np.zeros(padded, np.int32)
    for r in range(padded):
        for j in range(width):
            if slot[r, j] == slots:
                break
            counts[r] += 1
            at = slot[r, j], position[r, j]
            right = tokens[at] == chosen[r, j]
            tokens[at], next[slot[r, j]] = max(chosen[r, j], 0), position[r, j]
            if not right:
                break
    assert set(counts[:rows].tolist()) == set(range(1, width + 1))
    place = ring[5 % depth].tolist()
    assert place[: padded * width] == chosen.reshape(-1).tolist() and place[-1] == 9
    if width > 1:
        assert place[slots * width : slots * width + padded] == counts.tolist()
    assert (ring[[i for i in range(depth) if i != 5 % depth]] == -7).all()
    assert torch.equal(device_tokens.cpu(), torch.tensor(tokens))
    assert device_next.tolist()[:slots] == next.tolist()[:slots]


def test_pages_are_written_to_the_tables_that_they_are_named_for():
    from slipstream.ops.cuda.prepare import pages_kernel

    rng = np.random.default_rng(0)
    tables = np.zeros((3, 5, 64), np.int32)
    places = np.array([(t, s, c) for t in range(3) for s in range(4) for c in range(0, 64, 3)], np.int32)
    places = np.concatenate([places, rng.integers(1, 999, (len(places), 1), np.int32)], 1)[rng.permutation(len(places))]
    got = torch.tensor(tables, device=DEVICE)
    pages_kernel[(2,)](torch.tensor(places, device=DEVICE), got, len(places), got.stride(0), got.stride(1), B=256)
    tables[tuple(places[:, :3].T)] = places[:, 3]
    assert got.tolist() == tables.tolist()


@pytest.mark.parametrize(
    "dtype, stored",
    [(torch.bfloat16, torch.float32), (torch.bfloat16, torch.float16), (torch.float32, torch.bfloat16)],
    ids=str,
)
def test_attention_reads_a_cache_of_another_dtype(dtype, stored):
    """Keys and values are rounded to the cache's dtype; tiles are for caches of the activations' dtype alone."""
    from slipstream.ops.cuda.ops import CudaStep
    from slipstream.ops.cuda.prompt_blocks import COLUMNS
    from slipstream.ops.layers import Attention

    ops, heads, dim, page_size = make_ops(dtype), Heads(0, 8, 0, 2), 64, 64
    table, start, count = rotary(1024, dim), 500, 70
    cache = tuple(torch.zeros((20, 2, page_size, dim), device=DEVICE, dtype=stored) for _ in range(2))
    assert ops.tiles_of(cache, page_size) is None
    pages = torch.zeros((2, 16), dtype=torch.int32, device=DEVICE)
    pages[0] = torch.randperm(19)[:16].int() + 1
    past = torch.randn(start, 2, 2, dim, device=DEVICE).to(stored)
    for i in (0, 1):
        for p in range(-(-start // page_size)):
            part = past[p * page_size : (p + 1) * page_size, i]
            cache[i][pages[0, p], :, : len(part)] = part.transpose(0, 1)
    qkv = torch.randn(count + 1, 12 * dim, device=DEVICE, dtype=dtype)
    put = lambda x: torch.tensor(x, dtype=torch.int32, device=DEVICE)
    positions, slots = put(range(start, start + count + 1)), put([0] * (count + 1))
    wanted = reference_attention(qkv.view(-1, 12, dim), [past], positions.long(), [count + 1], heads, dim, table, None)
    spec = Attention(0, 0, heads, dim, dim**-0.5, table)
    parts = np.zeros((128, COLUMNS), np.int32)
    found = ops.cutter(8).cut([(0, start, 0, count)], parts)
    shared = [pages], [cache], [None], (0,), {(2, 0): ops.scratch(8, 2, dim)}, ops.prompt_scratch(dim), page_size, 1
    chunk = CudaStep(positions[:count], positions[:count], slots[:count], *shared, 8, put([0]), True, put(parts), put(found))
    decode = CudaStep(positions[count:], positions[count:], slots[count:], *shared, 1, put([1]))
    for step, rows in ((chunk, slice(0, count)), (decode, slice(count, count + 1))):
        ops.begin(step)
        assert error(ops.attention(qkv[rows].clone(), spec, step), wanted[rows]) < bound(torch.bfloat16)


def two_ranks(rows: int, hidden: int, dtype):
    """Operations of two ranks that share one GPU: on two streams their kernels run at the same time and wait for each other."""
    from slipstream.ops.cuda.ops import CudaOps
    from slipstream.ops.cuda.symmetric import BUFFERS, PROGRAMS, Region, Symmetric

    def share(shape, kind):
        local = [torch.zeros(shape, dtype=kind, device=DEVICE) for _ in range(2)]
        addresses = torch.tensor([t.data_ptr() for t in local], dtype=torch.int64, device=DEVICE)
        return [Region(t, addresses) for t in local]

    ranks = [Symmetric(DEVICE, r, 2) for r in range(2)]
    sums, flags = [share((rows, hidden), dtype) for _ in range(BUFFERS)], share((2, PROGRAMS), torch.int32)
    for r, symmetric in enumerate(ranks):
        symmetric.sums, symmetric.flags = [one[r] for one in sums], flags[r]
    return [CudaOps(dtype, DEVICE, Shard(r, 2), symmetric) for r, symmetric in enumerate(ranks)]


@pytest.mark.parametrize("rows", [1, 37, 150])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_partial_sums_of_two_ranks_are_added_where_both_can_read_them(dtype, rows):
    """150 rows take one barrier before the sum, fewer take one a row; buffers take turns over the sums of a step."""
    from types import SimpleNamespace

    from slipstream.ops.cuda.ops import Norm

    torch.backends.cuda.matmul.allow_tf32 = False
    hidden, inner = 576, 192
    both = two_ranks(160, hidden, dtype)
    streams = [torch.cuda.Stream(DEVICE) for _ in both]
    steps = [SimpleNamespace(turn=0) for _ in both]
    norm = Norm(torch.rand(hidden, device=DEVICE, dtype=dtype) + 0.5, 1e-5)
    residual, w_any = (torch.randn(n, hidden, device=DEVICE, dtype=dtype) for n in (rows, hidden))
    for ops, step in zip(
        both, steps, strict=True
    ):  # loads the kernels, which would wait for those that run; no wait after a fault
        ops.symmetric.fault.fill_(1)
        ops.reduce_add_norm(ops.partial(residual, ops.weight([dense(w_any)]), step), residual.clone(), norm, step)
        torch.cuda.synchronize()
    for ops, step in zip(both, steps, strict=True):
        step.turn = 0
        for state in (ops.symmetric.fault, ops.symmetric.counts, ops.symmetric.flags.local):
            state.zero_()
    mine, total = [residual.clone() for _ in both], residual.double()
    for turn in (0, 1, 0):
        x = torch.randn(rows, inner, device=DEVICE, dtype=dtype)
        w = torch.randn(hidden, inner, device=DEVICE, dtype=dtype) / inner**0.5
        total = total + x.double() @ w.double().t()
        cut = (slice(0, 128), slice(128, inner))
        parts = [(x[:, c].contiguous(), ops.weight([dense(w[:, c].contiguous())])) for ops, c in zip(both, cut, strict=True)]
        torch.cuda.synchronize()
        normed = [x, x]
        for r, ops in enumerate(both):
            with torch.cuda.stream(streams[r]):
                partial = ops.partial(*parts[r], steps[r])
                assert partial.data_ptr() == ops.symmetric.sums[turn].local.data_ptr() and len(partial) == rows
                mine[r], normed[r] = ops.reduce_add_norm(partial, mine[r], norm, steps[r])
        torch.cuda.synchronize()
        wanted = total * torch.rsqrt(total.pow(2).mean(-1, keepdim=True) + 1e-5) * norm.weight.double()
        for r in range(2):
            assert error(mine[r], total) < bound(dtype) and error(normed[r], wanted) < bound(dtype)
            assert not both[r].symmetric.fault.item()
        assert torch.equal(mine[0], mine[1]) and torch.equal(normed[0], normed[1])
