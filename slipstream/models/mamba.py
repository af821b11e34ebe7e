"""A Mamba-2 mixer as a sublayer: its numbers, its cache, and which part of its weights a rank holds."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from slipstream.errors import ModelError
from slipstream.log.caches import PerSlot, StateArray
from slipstream.models.llama import Llama
from slipstream.ops.interface import ForwardStep, Ops
from slipstream.ops.layers import Mamba2
from slipstream.weights.parts import Part


@dataclass(frozen=True)
class MambaConfig:
    """The numbers of the mixers, of all ranks."""

    num_heads: int
    head_dim: int
    groups: int  # heads of a group share B and C, and a norm
    state_dim: int
    kernel: int
    conv_bias: bool
    bias: bool  # on the products before and after the mixer
    dt_limits: tuple[float, float]
    eps: float  # of the norm behind the mixer

    @property
    def inner(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def share(self) -> int:
        """Heads of a group."""
        return self.num_heads // self.groups


def read_heads(config: dict, heads: str, groups: str) -> tuple[int, int]:
    """The heads and groups that two keys of the config say. Raises ModelError for groups of unequal size."""
    if config[groups] < 1 or config[heads] % config[groups]:
        raise ModelError(f"{heads} {config[heads]} is not a multiple of {groups} {config[groups]}")
    return config[heads], config[groups]


@dataclass(frozen=True, eq=False, slots=True)
class MambaMixer:
    """Gates, x, B, C and dt as one product, the mixer, and the output's product."""

    ops: Ops
    inputs: Any
    spec: Mamba2
    out: Any

    def __call__(self, x: Tensor, step: ForwardStep) -> Tensor:
        mixed = self.ops.linear(x, self.inputs, step)
        if self.spec.num_heads:  # a rank may have no group of them
            mixed = self.ops.mamba2(mixed, self.spec, step)
        return self.ops.partial(mixed, self.out, step)


def state_layout(ops: Ops, m: MambaConfig) -> PerSlot:
    """The cache of one mixer on this rank, which has whole groups of heads, since each group has a norm of its own."""
    first, last = ops.shard.even(m.groups)
    heads = (last - first) * m.share
    channels = heads * m.head_dim + 2 * (last - first) * m.state_dim
    return PerSlot(
        (
            StateArray((m.kernel - 1, channels), str(ops.dtype).removeprefix("torch.")),
            StateArray((heads, m.head_dim, m.state_dim), "float32"),
        )
    )


def mamba_mixer(model: Llama, i: int, prefix: str, m: MambaConfig) -> MambaMixer:
    """The mixer of layer i. The rows of `in_proj` are gates, x, B, C and dt of all heads, in this order."""
    ops, read = model.ops, model.checkpoint.tensor
    group, end = ops.shard.even(m.groups)
    heads, own = _scaled((group, end), m.share), _scaled((group, end), m.share * m.head_dim)
    in_groups, all_groups = _scaled((group, end), m.state_dim), m.groups * m.state_dim
    channels = [own, _at(m.inner, in_groups), _at(m.inner + all_groups, in_groups)]
    width = m.inner + 2 * all_groups
    total = m.inner + width + m.num_heads
    rows = [own, *(_at(m.inner, part) for part in channels), _at(m.inner + width, heads)]

    def of_heads(name: str) -> Tensor:
        return read(prefix + name, (m.num_heads,), rows=heads, dtype=torch.float32)

    def of_channels(name: str, *shape: int) -> Tensor:
        return torch.cat([read(prefix + name, (width, *shape), rows=part, dtype=torch.float32) for part in channels])

    norm = read(prefix + "norm.weight", (m.inner,), rows=own, dtype=ops.dtype)
    spec = Mamba2(
        cache=i,
        num_heads=heads[1] - heads[0],
        head_dim=m.head_dim,
        groups=end - group,
        state_dim=m.state_dim,
        conv=ops.tensor(of_channels("conv1d.weight", 1, m.kernel)[:, 0].t().contiguous()),
        conv_bias=ops.tensor(of_channels("conv1d.bias")) if m.conv_bias else None,
        rate=ops.tensor(of_heads("A_log").exp()),
        dt_bias=ops.tensor(of_heads("dt_bias")),
        skip=ops.tensor(of_heads("D")),
        dt_limits=m.dt_limits,
        norm=ops.norm_weight(norm, m.eps),
    )
    inputs = model.joined(prefix, [("in_proj", total, part) for part in rows], m.bias)
    return MambaMixer(ops, inputs, spec, model.row_parallel(prefix + "out_proj", m.inner, own, m.bias))


def _scaled(part: Part, size: int) -> Part:
    return part[0] * size, part[1] * size


def _at(start: int, part: Part) -> Part:
    return start + part[0], start + part[1]
