"""Experts on the CPU against a plain loop over tokens and their experts."""

import pytest
import torch
import torch.nn.functional as F

from slipstream.ops.cpu.ops import PlainOps
from slipstream.ops.layers import Experts, Routing
from slipstream.weights.packed import dense

COUNT, HIDDEN, INNER, TOP = 8, 24, 10, 3
OPS = PlainOps(torch.float32)


def normal(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


ROUTER, GATE_UP, DOWN = normal(1, COUNT, HIDDEN), normal(2, COUNT, 2 * INNER, HIDDEN), normal(3, COUNT, HIDDEN, INNER)
GATE_UP_BIAS, DOWN_BIAS, BIAS = normal(4, COUNT, 2 * INNER), normal(5, COUNT, HIDDEN), normal(6, COUNT)


def softmax(logits: torch.Tensor) -> dict[int, float]:
    best = logits.softmax(0).topk(TOP)
    return dict(zip(best.indices.tolist(), best.values.tolist(), strict=True))


def softmax_normed(logits: torch.Tensor) -> dict[int, float]:
    found = softmax(logits)
    return {e: w / sum(found.values()) for e, w in found.items()}


def softmax_of_chosen(logits: torch.Tensor) -> dict[int, float]:
    best = (logits + BIAS).topk(TOP)
    return dict(zip(best.indices.tolist(), best.values.softmax(0).tolist(), strict=True))


def sigmoid_in_groups(logits: torch.Tensor) -> dict[int, float]:
    """4 groups of 2, the best 2 of them; the bias decides which are chosen, not how much they weigh."""
    scores = logits.sigmoid()
    biased = (scores + BIAS).tolist()
    best = sorted(range(4), key=lambda g: -(biased[2 * g] + biased[2 * g + 1]))[:2]
    chosen = sorted((e for g in best for e in (2 * g, 2 * g + 1)), key=lambda e: -biased[e])[:TOP]
    total = sum(scores[e].item() for e in chosen)
    return {e: 2.5 * scores[e].item() / total for e in chosen}


def softmax_in_groups_by_best(logits: torch.Tensor) -> dict[int, float]:
    """2 groups of 4, the one with the best expert."""
    scores = logits.softmax(0).tolist()
    first = 0 if max(scores[:4]) > max(scores[4:]) else 4
    return {e: scores[e] for e in sorted(range(first, first + 4), key=lambda e: -scores[e])[:TOP]}


ROUTINGS = {
    softmax: Routing(ROUTER, TOP, "softmax"),
    softmax_normed: Routing(ROUTER, TOP, "softmax", normed=True),
    softmax_of_chosen: Routing(ROUTER, TOP, "softmax_of_chosen", bias=BIAS),
    sigmoid_in_groups: Routing(ROUTER, TOP, "sigmoid", choice_bias=BIAS, normed=True, scale=2.5, groups=4, top_groups=2),
    softmax_in_groups_by_best: Routing(ROUTER, TOP, "softmax", groups=2, top_groups=1, group_best=1),
}
GATES = {
    "silu": lambda g, u: F.silu(g) * u,
    "gelu_tanh": lambda g, u: F.gelu(g, approximate="tanh") * u,
    "swigluoai": lambda g, u: g.clamp(max=7) * torch.sigmoid(1.702 * g.clamp(max=7)) * (u.clamp(-7, 7) + 1),
}


def expected(x: torch.Tensor, weigh, activate) -> torch.Tensor:
    out = torch.zeros_like(x)
    for t, row in enumerate(x):
        for e, weight in weigh(ROUTER @ row).items():
            inner = activate(GATE_UP[e] @ row + GATE_UP_BIAS[e])
            out[t] += weight * (DOWN[e] @ inner + DOWN_BIAS[e])
    return out


def gated(name: str):
    return lambda both: GATES[name](*both.chunk(2))


@pytest.mark.parametrize("weigh", ROUTINGS, ids=lambda f: f.__name__)
def test_experts_equal_a_loop_over_tokens_for_each_routing(weigh):
    weights = OPS.expert_weight(dense(GATE_UP), GATE_UP_BIAS), OPS.expert_weight(dense(DOWN), DOWN_BIAS)
    for rows in (1, 2, 37):
        x = normal(7 + rows, rows, HIDDEN)
        found = OPS.experts(x.clone(), Experts(ROUTINGS[weigh], *weights, "silu"), None)
        assert torch.allclose(found, expected(x, weigh, gated("silu")), atol=1e-4), rows


@pytest.mark.parametrize("gate", GATES)
def test_experts_equal_a_loop_over_tokens_for_each_gate(gate):
    weights = OPS.expert_weight(dense(GATE_UP), GATE_UP_BIAS), OPS.expert_weight(dense(DOWN), DOWN_BIAS)
    x = 3 * normal(8, 20, HIDDEN)  # far enough from zero for the limits of gpt-oss's gate
    found = OPS.experts(x.clone(), Experts(ROUTINGS[softmax], *weights, gate), None)
    assert torch.allclose(found, expected(x, softmax, gated(gate)), atol=1e-3)


def test_experts_may_have_no_gate():
    weights = OPS.expert_weight(dense(GATE_UP[:, :INNER])), OPS.expert_weight(dense(DOWN))
    x = normal(9, 20, HIDDEN)
    found = OPS.experts(x.clone(), Experts(ROUTINGS[softmax], *weights, "relu2"), None)
    out = torch.zeros_like(x)
    for t, row in enumerate(x):
        for e, weight in softmax(ROUTER @ row).items():
            out[t] += weight * (DOWN[e] @ F.relu(GATE_UP[e, :INNER] @ row) ** 2)
    assert torch.allclose(found, out, atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize("with_gate", (False, True))
def test_a_shared_expert_is_added_to_every_token(with_gate):
    weights = OPS.expert_weight(dense(GATE_UP)), OPS.expert_weight(dense(DOWN))
    shared = normal(10, 2 * 6, HIDDEN), normal(11, HIDDEN, 6)
    gate = normal(12, 1, HIDDEN)
    x = normal(13, 20, HIDDEN)
    plain = Experts(ROUTINGS[softmax], *weights, "silu")
    more = Experts(
        ROUTINGS[softmax], *weights, "silu",
        shared=tuple(OPS.weight([dense(w)]) for w in shared), shared_gate=OPS.weight([dense(gate)]) if with_gate else None,
    )  # fmt: skip
    g, u = (x @ shared[0].T).chunk(2, -1)
    added = F.silu(g) * u @ shared[1].T * (torch.sigmoid(x @ gate.T) if with_gate else 1)
    assert torch.allclose(OPS.experts(x, more, None) - OPS.experts(x, plain, None), added, atol=1e-4)


def test_parts_of_the_inner_columns_add_up_and_a_part_may_be_empty():
    x = normal(14, 20, HIDDEN)
    parts = []
    for start, stop in ((0, 7), (7, 10), (10, 10)):
        gate_up = torch.cat([GATE_UP[:, start:stop], GATE_UP[:, INNER + start : INNER + stop]], 1)
        weights = OPS.expert_weight(dense(gate_up)), OPS.expert_weight(dense(DOWN[..., start:stop].contiguous()))
        parts.append(OPS.experts(x, Experts(ROUTINGS[softmax], *weights, "silu"), None))
    whole = Experts(ROUTINGS[softmax], OPS.expert_weight(dense(GATE_UP)), OPS.expert_weight(dense(DOWN)), "silu")
    assert torch.allclose(sum(parts), OPS.experts(x, whole, None), atol=1e-4)
    assert not parts[2].any()


def test_only_the_experts_that_rows_chose_are_computed():
    weights = [OPS.expert_weight(dense(GATE_UP)), OPS.expert_weight(dense(DOWN))]
    x = normal(15, 1, HIDDEN)
    chosen = softmax(ROUTER @ x[0])
    for weight in weights:
        weight.layers[:] = [w if e in chosen else None for e, w in enumerate(weight.layers)]
    assert OPS.experts(x, Experts(ROUTINGS[softmax], *weights, "silu"), None).isfinite().all()


def test_experts_in_bfloat16_stay_near_float32():
    ops, x = PlainOps(torch.bfloat16), normal(16, 20, HIDDEN)
    low = [dense(w.bfloat16()) for w in (GATE_UP, DOWN)]
    weights = [ops.expert_weight(w) for w in low]
    routing = Routing(ROUTER.bfloat16(), TOP, "softmax")
    found = ops.experts(x.bfloat16(), Experts(routing, *weights, "silu"), None)
    exact = [OPS.expert_weight(dense(w.data.float())) for w in low]
    near = OPS.experts(x.bfloat16().float(), Experts(Routing(ROUTER.bfloat16().float(), TOP, "softmax"), *exact, "silu"), None)
    assert found.dtype == torch.bfloat16 and (found - near).abs().mean() < 0.02 * near.abs().mean()
