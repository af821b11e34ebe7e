"""The feed-forward half of a layer that is a mixture of experts, and what families with experts share in building it."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from slipstream.errors import ModelError
from slipstream.models.llama import Llama
from slipstream.ops.interface import ForwardStep, Ops
from slipstream.ops.layers import Experts, Routing
from slipstream.weights.experts import PROJECTIONS, ExpertShape, read_experts


@dataclass(frozen=True, eq=False, slots=True)
class Mixture:
    """Each token through the experts that it chooses."""

    ops: Ops
    spec: Experts

    def __call__(self, x: Tensor, step: ForwardStep) -> Tensor:
        return self.ops.experts(x, self.spec, step)


def mixture(
    model: Llama,
    prefix: str,
    routing: Routing,
    count: int,
    inner: int,
    names: tuple[str, str, str] = PROJECTIONS,
    **more: Any,
) -> Mixture:
    """Gated experts whose names begin with `prefix`, of `inner` columns each. `more`: further fields of `Experts`."""
    ops, c = model.ops, model.config
    shape = ExpertShape(count, inner, c.hidden, ops.shard.even(inner))
    gate_up, down = read_experts(model.checkpoint, prefix, shape, ops.dtype, names)
    return Mixture(ops, Experts(routing, ops.expert_weight(gate_up), ops.expert_weight(down), c.gate, **more))


def read_router(model: Llama, name: str, count: int) -> Tensor:
    """The weight of the router `name`, [count, hidden]."""
    weight = model.checkpoint.tensor(name + ".weight", (count, model.config.hidden), dtype=model.ops.dtype)
    return model.ops.tensor(weight)


def read_count(config: dict, key: str, default: int) -> int:
    """The experts of a layer: `key`, or `num_local_experts`, under which transformers 5 saves it for every family."""
    return config.get("num_local_experts") or config.get(key) or default


def read_top_k(config: dict, count: int, default: int) -> int:
    """`num_experts_per_tok`: how many of `count` experts a token chooses."""
    top_k = config.get("num_experts_per_tok") or default
    if not 1 <= top_k <= count:
        raise ModelError(f"num_experts_per_tok is {top_k}; a token chooses between 1 and all {count} experts")
    return top_k


def read_groups(config: dict, count: int, group_best: int) -> tuple[int, int]:
    """`n_group` and `topk_group` of `count` experts, where a group is as good as its `group_best` best ones together."""
    groups, best = config.get("n_group") or 1, config.get("topk_group") or 1
    if count % groups or not 1 <= best <= groups:
        raise ModelError(f"n_group is {groups} and topk_group {best}, which do not fit {count} experts")
    if groups > 1 and count // groups < group_best:
        raise ModelError(f"n_group is {groups}: a group of {count} experts needs at least {group_best}")
    return groups, best
