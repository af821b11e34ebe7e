"""One rank's part of a layer's experts, stacked, from either way in which checkpoints store them.

On disk most families have a linear layer for each expert; transformers, and random weights here, have one tensor for all.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from slipstream.weights.packed import Packed, dense
from slipstream.weights.parts import Part

PROJECTIONS = ("gate_proj", "up_proj", "down_proj")  # of an expert, as most families name them


class ExpertShape(NamedTuple):
    """The sizes of a layer's experts, and which inner columns [start, stop) of each are this rank's."""

    count: int
    inner: int
    hidden: int
    part: Part


def read_experts(
    checkpoint: Any,
    prefix: str,
    shape: ExpertShape,
    dtype: torch.dtype,
    names: tuple[str, str, str] = PROJECTIONS,
) -> tuple[Packed, Packed]:
    """[count, 2 * part, hidden], gates and then what they multiply, and [count, hidden, part].

    prefix: of the experts' names, as in `{prefix}gate_up_proj` or `{prefix}7.gate_proj.weight`. names: of an expert's layers.
    """
    count, inner, hidden, (start, stop) = shape
    if checkpoint.has(prefix + "gate_up_proj"):
        both = (count, 2 * inner, hidden)
        halves = [
            checkpoint.tensor(prefix + "gate_up_proj", both, cols=(start + at, stop + at), dtype=dtype) for at in (0, inner)
        ]
        down = checkpoint.tensor(prefix + "down_proj", (count, hidden, inner), inner=shape.part, dtype=dtype)
        return dense(torch.cat(halves, 1)), dense(down)

    def stacked(name: str, size: tuple[int, int], **part: Part) -> Tensor:
        return torch.stack(
            [checkpoint.tensor(f"{prefix}{e}.{name}.weight", size, **part, dtype=dtype) for e in range(count)]
        )  # fmt: skip

    gate, up = (stacked(name, (inner, hidden), rows=shape.part) for name in names[:2])
    return dense(torch.cat([gate, up], 1)), dense(stacked(names[2], (hidden, inner), cols=shape.part))
