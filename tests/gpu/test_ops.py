"""The Triton operations against the same arithmetic in float64, on fresh random inputs and poisoned outputs."""

import numpy as np
import pytest
import torch

from slipstream.shard import Heads, Shard

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


def reference_attention(x, past, positions, lengths, heads: Heads, dim, table, norms):
    """float64 [T, queries * dim]: x [T, heads, dim] of rows with `lengths` tokens each after `past` [row][n, 2, keys, dim]."""
    x = x.double()
    q, k, v = x.split([heads.num_q_heads, heads.num_kv_heads, heads.num_kv_heads], 1)
    if norms is not None:
        q, k = (t * torch.rsqrt(t.pow(2).mean(-1, keepdim=True) + 1e-6) * w.double() for t, w in ((q, norms[0]), (k, norms[1])))
    cos, sin = table.double()[positions].unsqueeze(1).chunk(2, -1)

    def turn(t):
        a, b = t.chunk(2, -1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

    q, k = turn(q), turn(k)
    out, at = [], 0
    for row, n in enumerate(lengths):
        keys = torch.cat([past[row][:, 0].double(), k[at : at + n]])
        values = torch.cat([past[row][:, 1].double(), v[at : at + n]])
        share = heads.num_q_heads // heads.num_kv_heads
        keys, values = keys.repeat_interleave(share, 1), values.repeat_interleave(share, 1)
        s = torch.einsum("qhd,khd->hqk", q[at : at + n], keys) * dim**-0.5
        seen = torch.arange(len(keys), device=DEVICE)[None] <= torch.arange(n, device=DEVICE)[:, None] + len(past[row])
        out.append(torch.einsum("hqk,khd->qhd", s.masked_fill(~seen, -torch.inf).softmax(-1), values))
        at += n
    return torch.cat(out).flatten(1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("num_q_heads, num_kv_heads, dim", [(8, 2, 64), (6, 3, 80), (16, 4, 128), (4, 4, 96), (4, 1, 256)])
@pytest.mark.parametrize("shape", ["decode", "one long row", "one among short ones", "mixed", "short chunk, long context"])
@pytest.mark.parametrize("page_size", [16, 64, 128])
def test_attention_equals_float64(dtype, num_q_heads, num_kv_heads, dim, shape, page_size):
    from slipstream.ops.cuda.ops import CudaStep, Norm
    from slipstream.ops.cuda.prompt_blocks import COLUMNS
    from slipstream.ops.interface import Attention

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
    norms = [torch.rand(dim, device=DEVICE, dtype=dtype) + 0.5 for _ in range(2)] if dim == 128 else None
    if page_size > 16 and (dtype == torch.float32 or dim not in (64, 128)):
        pytest.skip("pages of many tokens matter where tiles are taken")
    table = rotary(4096, dim)
    spec = Attention(0, heads, dim, dim**-0.5, table, *([Norm(w, 1e-6) for w in norms] if norms else [None, None]))
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
            for p in range(-(-start // page_size)):
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
        qkv[:total].view(total, -1, dim), past, positions[:total].long(), counts, heads, dim, table, norms
    )  # fmt: skip
    parts = np.zeros((128, COLUMNS), np.int32)
    part_counts = ops.cutter(num_q_heads).cut(prompts, parts)
    put = lambda x: torch.tensor(x, dtype=torch.int32, device=DEVICE)
    step = CudaStep(
        positions, positions, slots, tables, [(cache[0], cache[1])], ops.tile_caches([(cache[0], cache[1])], page_size),
        ops.scratch(8, num_kv_heads, dim), ops.prompt_scratch(dim), page_size, 8 if prompts else decodes, put([decodes]), bool(prompts),
        put(parts), put(part_counts),
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
    cache = torch.zeros(1, heads, 64, 64, device=DEVICE)
    put = lambda x: torch.tensor(x, dtype=torch.int32, device=DEVICE)
    for real in sorted({0, 1, rows // 3, rows}):
        for longest in (300, 4000, 130_000):
            lengths = rng.integers(1, longest, rows)
            step = SimpleNamespace(
                positions=put(lengths - 1), decodes=put([real]), decode_rows=rows, scratch=scratch, caches=[(cache, cache)]
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
    step = SimpleNamespace(positions=put(lengths) - 1, decodes=put([17]), decode_rows=128, scratch=scratch, caches=step.caches)
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
    assert error(ops.norm(x, Norm(weight, 1e-5)), norm(x.double())) < bound(dtype)

    residual = torch.randn_like(x)
    w = torch.randn(width, width, device=DEVICE, dtype=dtype) / width**0.5
    wanted = residual.double() + x.double() @ w.double().t()
    torch.backends.cuda.matmul.allow_tf32 = False
    total, out = ops.add_norm(x, Linear(w), residual.clone(), Norm(weight, 1e-5))
    assert error(total, wanted) < bound(dtype)
    assert error(out, norm(wanted)) < bound(dtype)

    gate, up = (torch.randn(160, width, device=DEVICE, dtype=dtype) / width**0.5 for _ in range(2))
    wanted = torch.nn.functional.silu(x.double() @ gate.double().t()) * (x.double() @ up.double().t())
    assert error(ops.swiglu(x, ops.gated_weight(gate, up)), wanted) < bound(dtype)


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
