"""Mixtures of experts in plain PyTorch: how tokens choose, and the products of the experts that some token chose."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from slipstream.ops.cpu.activations import activated, gated
from slipstream.ops.layers import Activation, Experts, Gate, Routing

Product = Callable[[Tensor, Any], Tensor]  # rows and a prepared layer to its outputs


class ExpertLinear(NamedTuple):
    """The same layer of all experts, each prepared by itself."""

    layers: list[Any]
    out: int
    inputs: int


def route(x: Tensor, routing: Routing) -> tuple[Tensor, Tensor]:
    """x [T, hidden] to the experts that each row chooses, int64 [T, top_k], and their weights, float32 [T, top_k]."""
    logits = F.linear(x.float(), routing.router.float(), routing.bias)
    if routing.score == "softmax_of_chosen":
        best, chosen = logits.topk(routing.top_k, -1)
        return chosen, best.softmax(-1).mul_(routing.scale)
    scores = logits.softmax(-1) if routing.score == "softmax" else logits.sigmoid()
    preference = scores if routing.choice_bias is None else scores + routing.choice_bias
    chosen = _within_groups(preference, routing).topk(routing.top_k, -1).indices
    weights = scores.gather(1, chosen)
    if routing.normed:
        weights /= weights.sum(-1, keepdim=True) + 1e-20  # sigmoids may all be zero
    return chosen, weights.mul_(routing.scale)


def _within_groups(preference: Tensor, routing: Routing) -> Tensor:
    """-inf in place of the preference for experts outside of each row's best groups."""
    if routing.top_groups >= routing.groups:
        return preference
    by_group = preference.view(len(preference), routing.groups, -1)
    best = by_group.topk(routing.group_best, -1).values.sum(-1).topk(routing.top_groups, -1).indices
    outside = torch.ones(by_group.shape[:2], dtype=torch.bool).scatter_(1, best, False)
    return by_group.masked_fill(outside[..., None], -torch.inf).view_as(preference)


def experts(x: Tensor, spec: Experts, linear: Product) -> Tensor:
    """[T, hidden] to this rank's part of the sum. Rows are sorted by expert; experts that none chose are not touched."""
    chosen, weights = route(x, spec.routing)
    top_k = chosen.shape[1]
    order = chosen.view(-1).argsort(stable=True)
    rows = x.index_select(0, order // top_k)
    found = torch.empty_like(rows)
    first = 0
    for e, count in enumerate(torch.bincount(chosen.view(-1), minlength=len(spec.gate_up.layers)).tolist()):
        if count:
            last = first + count
            inner = _activate(linear(rows[first:last], spec.gate_up.layers[e]), spec)
            found[order[first:last]] = linear(inner, spec.down.layers[e])
            first = last
    out = torch.bmm(weights[:, None], found.view(-1, top_k, x.shape[1]).float())[:, 0]
    if spec.shared is not None:
        gate_up, down = spec.shared
        shared = linear(_activate(linear(x, gate_up), spec), down).float()
        out += shared if spec.shared_gate is None else shared * linear(x, spec.shared_gate).float().sigmoid_()
    return out.to(x.dtype)


def _activate(x: Tensor, spec: Experts) -> Tensor:
    """Experts without a gate have as many inner columns as outputs of the first product."""
    if spec.gate_up.out == spec.down.inputs:
        activation: Activation = spec.gate  # type: ignore[assignment]
        return activated(x, activation)
    gate: Gate = spec.gate  # type: ignore[assignment]
    return gated(x, gate)
