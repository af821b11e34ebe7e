"""The plain operations against their definitions."""

import pytest
import torch
import torch.nn.functional as F

from slipstream.ops.cpu import ops as cpu_ops
from slipstream.ops.cpu.ops import PlainOps, _nearest
from slipstream.ops.interface import JudgedRows
from slipstream.weights.packed import dense

STEP = JudgedRows(torch.zeros(0, dtype=torch.int64))  # these operations need nothing of it
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 3e-3}


@pytest.fixture(params=TOLERANCE, ids=str)
def ops(request):
    torch.manual_seed(0)
    with torch.inference_mode():
        yield PlainOps(request.param)


def close(ops, a, b):
    return torch.allclose(a.float(), b.float(), atol=TOLERANCE[ops.dtype], rtol=TOLERANCE[ops.dtype])


@pytest.mark.parametrize("rows", [1, 5, 17, 64])
def test_linear_layers_with_and_without_bias(ops, rows):
    w, b, x = (torch.randn(s, dtype=ops.dtype) / 6 for s in ((40, 32), (40,), (rows, 32)))
    assert close(ops, ops.linear(x, ops.weight([dense(w)]), STEP), F.linear(x.float(), w.float()))
    assert close(ops, ops.linear(x, ops.weight([dense(w)], b), STEP), F.linear(x.float(), w.float(), b.float()))


def test_few_row_counts_reach_the_packed_layers(monkeypatch):
    """oneDNN keeps kernels for each row count for ever: mixed prompts made a rank grow by gigabytes."""
    ops = PlainOps(torch.float32)
    if not ops.packs:
        pytest.skip("this PyTorch has no oneDNN, so nothing is packed")
    met, real = set(), cpu_ops._linear
    monkeypatch.setattr(cpu_ops, "_linear", lambda x, *rest: met.add(x.shape[0]) or real(x, *rest))
    weight = ops.weight([dense(torch.randn(8, 4))])
    for rows in range(2, 2049):
        assert ops.linear(torch.ones(rows, 4), weight, STEP).shape == (rows, 8)
    assert len(met) < 80


def test_the_gate_is_silu_of_the_first_part(ops):
    gate, up, x = (torch.randn(s, dtype=ops.dtype) / 6 for s in ((24, 32), (24, 32), (3, 32)))
    expected = F.silu(F.linear(x.float(), gate.float())) * F.linear(x.float(), up.float())
    assert close(ops, ops.gated(x, ops.weight([dense(gate), dense(up)]), "silu", STEP), expected)


def test_a_norm_is_rms_norm_with_its_epsilon(ops):
    w = torch.randn(32, dtype=ops.dtype)
    for scale in (1.0, 1e-3):
        x = torch.randn(4, 32, dtype=ops.dtype) * scale
        expected = F.rms_norm(x.float(), (32,), w.float(), 1e-5)
        assert close(ops, ops.norm(x, ops.norm_weight(w, 1e-5), STEP), expected)
    zero = torch.zeros(1, 32, dtype=ops.dtype)
    assert not ops.norm(zero, ops.norm_weight(w, 1e-5), STEP).any()


def test_a_block_ends_with_the_residual_sum_and_its_norm(ops):
    w, x, r, n = (torch.randn(s, dtype=ops.dtype) / 6 for s in ((32, 16), (3, 16), (3, 32), (32,)))
    expected = r.float() + F.linear(x.float(), w.float())
    partial = ops.partial(x, ops.weight([dense(w)]), STEP)
    total, normed = ops.reduce_add_norm(partial, r.clone(), ops.norm_weight(n, 1e-5), STEP)
    assert close(ops, total, expected)
    assert close(ops, normed, F.rms_norm(expected, (32,), n.float(), 1e-5))


def test_weights_are_counted():
    ops = PlainOps(torch.float32)
    ops.weight([dense(torch.zeros(4, 20)), dense(torch.zeros(6, 20))], torch.zeros(10))
    ops.norm_weight(torch.zeros(20), 1e-5)
    ops.tensor(torch.zeros(3))
    assert ops.weight_bytes == 4 * (200 + 10 + 20 + 3)


def test_close_candidates_do_not_tie_for_bfloat16():
    """Logits around 20 are 0.125 apart in bfloat16; the best one must win by less than that, not by its id."""
    ops = PlainOps(torch.bfloat16)
    weight = torch.zeros(64, 64, dtype=torch.bfloat16)
    weight[7, :2] = torch.tensor([20.0, 0.0])
    weight[9, :2] = torch.tensor([20.0, 0.046875])  # 20.046875 is rounded to 20 in bfloat16
    head = ops.weight([dense(ops.tensor(weight))])
    hidden = torch.zeros(3, 64, dtype=torch.bfloat16)
    hidden[:, :2] = 1.0
    for rows in (1, 3):
        logits = ops.logits(hidden[:rows], head, STEP)
        assert logits.argmax(1).tolist() == [9] * rows
        assert torch.allclose(logits[:, [7, 9]], torch.tensor([20.0, 20.046875]))


@pytest.mark.parametrize("rows, vocabulary", [(1, 7), (2, 256), (3, 257), (4, 1000), (2, 50257)])
def test_every_close_candidate_is_found_whatever_the_vocabulary(rows, vocabulary):
    """Close ones are put at both ends, in the part that the last window shares, and nowhere for a row that is not finite."""
    logits = torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(vocabulary))
    for column in {0, vocabulary // 2, vocabulary - 5, vocabulary - 1}:
        logits[0, column] = 20.0 + column / vocabulary / 8
    if rows > 2:
        logits[2, 3] = torch.nan
    found = {(int(r), int(c)) for r, c in zip(*_nearest(logits), strict=True)}
    best = logits.amax(1, keepdim=True)
    assert found == {(int(r), int(c)) for r, c in torch.nonzero(logits >= best - best.abs() / 64)}
    assert len([r for r, _ in found if r == 0]) >= 4
