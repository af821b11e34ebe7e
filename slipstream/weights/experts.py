"""One rank's part of a layer's experts, stacked, from every way in which checkpoints store them.

On disk most families have a linear layer for each expert; transformers, and random weights here, have one tensor for all.
gpt-oss has one tensor for all as well, transposed or as MXFP4, in which gates and what they multiply take turns.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from slipstream.errors import ModelError
from slipstream.weights import mxfp4
from slipstream.weights.packed import Packed, dense
from slipstream.weights.parts import Part

PROJECTIONS = ("gate_proj", "up_proj", "down_proj")  # of an expert, as most families name them


class ExpertShape(NamedTuple):
    """The sizes of a layer's experts, and which inner columns [start, stop) of each are this rank's."""

    experts: int
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
    count, inner, hidden, _ = shape
    if checkpoint.has(prefix + "gate_up_proj"):
        return read_stacked_experts(checkpoint, prefix + "gate_up_proj", prefix + "down_proj", shape, dtype)

    def stacked(name: str, size: tuple[int, int], **part: Part) -> Tensor:
        return _stack(checkpoint, prefix, name, (count, *size), dtype, **part)

    gate, up = (stacked(name, (inner, hidden), rows=shape.part) for name in names[:2])
    return dense(torch.cat([gate, up], 1)), dense(stacked(names[2], (hidden, inner), cols=shape.part))


def read_stacked_experts(
    checkpoint: Any, gate_up: str, down: str, shape: ExpertShape, dtype: torch.dtype
) -> tuple[Packed, Packed]:  # fmt: skip
    """The same from two tensors of these names, [count, 2 * inner, hidden] and [count, hidden, inner]."""
    count, inner, hidden, (start, stop) = shape
    both = (count, 2 * inner, hidden)
    halves = [checkpoint.tensor(gate_up, both, cols=(start + at, stop + at), dtype=dtype) for at in (0, inner)]
    last = checkpoint.tensor(down, (count, hidden, inner), inner=shape.part, dtype=dtype)
    return dense(torch.cat(halves, 1)), dense(last)


def read_plain_experts(checkpoint: Any, prefix: str, shape: ExpertShape, dtype: torch.dtype) -> tuple[Packed, Packed]:
    """Experts without a gate, stacked or one by one: [count, part, hidden] and [count, hidden, part]."""
    count, inner, hidden, part = shape
    if checkpoint.has(prefix + "up_proj"):
        up = checkpoint.tensor(prefix + "up_proj", (count, inner, hidden), cols=part, dtype=dtype)
        down = checkpoint.tensor(prefix + "down_proj", (count, hidden, inner), inner=part, dtype=dtype)
    else:
        up = _stack(checkpoint, prefix, "up_proj", (count, inner, hidden), dtype, rows=part)
        down = _stack(checkpoint, prefix, "down_proj", (count, hidden, inner), dtype, cols=part)
    return dense(up), dense(down)


def _stack(
    checkpoint: Any, prefix: str, name: str, shape: tuple[int, int, int], dtype: torch.dtype, **part: Part
) -> Tensor:  # fmt: skip
    """A part of the same layer of all experts, each of which is stored by itself."""
    names = [f"{prefix}{e}.{name}.weight" for e in range(shape[0])]
    return torch.stack([checkpoint.tensor(n, shape[1:], **part, dtype=dtype) for n in names])


def read_interleaved_experts(checkpoint: Any, prefix: str, shape: ExpertShape, dtype: torch.dtype) -> tuple[Packed, Packed]:
    """The same from gpt-oss's tensors: `{prefix}gate_up_proj` [count, hidden, 2 * inner], or `..._blocks` and `..._scales`."""
    count, inner, hidden, (start, stop) = shape
    both = 2 * start, 2 * stop
    if f"{prefix}gate_proj.weight" in checkpoint.names():  # of a GGUF file
        names, size = (f"{prefix}gate_proj.weight", f"{prefix}up_proj.weight"), (count, inner, hidden)
        halves = [checkpoint.tensor(name, size, cols=shape.part, dtype=dtype) for name in names]
        down = checkpoint.tensor(prefix + "down_proj.weight", (count, hidden, inner), inner=shape.part, dtype=dtype)
        return dense(torch.cat(halves, 1)), dense(down)
    if f"{prefix}gate_up_proj_blocks" in checkpoint.names():
        gate_up = _read_mxfp4(checkpoint, prefix + "gate_up_proj", (count, 2 * inner, hidden), both, (0, hidden), dtype)
        down = _read_mxfp4(checkpoint, prefix + "down_proj", (count, hidden, inner), (0, hidden), shape.part, dtype)
    else:
        name = prefix + "gate_up_proj"
        gate_up = checkpoint.tensor(name, (count, hidden, 2 * inner), inner=both, dtype=dtype).transpose(1, 2)
        down = checkpoint.tensor(prefix + "down_proj", (count, inner, hidden), cols=shape.part, dtype=dtype).transpose(1, 2)
    return dense(split_pairs(gate_up)), dense(down.contiguous())


def read_interleaved_biases(checkpoint: Any, prefix: str, shape: ExpertShape, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Of the same layers: [count, 2 * part] and [count, hidden]."""
    count, inner, hidden, (start, stop) = shape
    if f"{prefix}gate_proj.bias" in checkpoint.names():
        halves = [
            checkpoint.tensor(f"{prefix}{n}_proj.bias", (count, inner), cols=shape.part, dtype=dtype) for n in ("gate", "up")
        ]
        return torch.cat(halves, 1), checkpoint.tensor(prefix + "down_proj.bias", (count, hidden), dtype=dtype)
    gate_up = checkpoint.tensor(prefix + "gate_up_proj_bias", (count, 2 * inner), cols=(2 * start, 2 * stop), dtype=dtype)
    return split_pairs(gate_up), checkpoint.tensor(prefix + "down_proj_bias", (count, hidden), dtype=dtype)


def split_pairs(gate_up: Tensor) -> Tensor:
    """[count, 2 * n, ...] in which gates and what they multiply take turns, to one with all gates first."""
    return torch.cat([gate_up[:, 0::2], gate_up[:, 1::2]], 1)


def _read_mxfp4(
    checkpoint: Any, name: str, shape: tuple[int, int, int], rows: Part, inputs: Part, dtype: torch.dtype
) -> Tensor:
    """[count, rows, inputs] of a weight of `shape`; whole blocks are read. One expert at a time is made of its blocks."""
    count, out, width = shape
    if width % mxfp4.BLOCK:
        raise ModelError(f"{name}: {width} inputs do not fill blocks of {mxfp4.BLOCK}")
    stored, size = (count, out, width // mxfp4.BLOCK), mxfp4.BLOCK
    first, last = inputs[0] // size, -(-inputs[1] // size)
    part = {"cols": rows, "inner": (first, max(first, last))}
    blocks = checkpoint.tensor(name + "_blocks", (*stored, size // 2), **part)
    exponents = checkpoint.tensor(name + "_scales", stored, **part)
    made = blocks.new_empty((count, rows[1] - rows[0], inputs[1] - inputs[0]), dtype=dtype)
    for e in range(count):
        values = mxfp4.dequantize(blocks[e], exponents[e], dtype)
        made[e] = values[:, inputs[0] - first * size : inputs[1] - first * size]
    return made
