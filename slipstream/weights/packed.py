"""A linear layer's weight as it is stored, and the schemes that read, cut and join such weights.

A scheme knows which tensors a layer has, how a rank's rows and columns lie in them, and how layers that read the same input
become one. The device decides the form that its kernels take (`Ops.weight`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from slipstream.weights.parts import Part

ReadTensor = Callable[..., Tensor]  # `Checkpoint.tensor`


class Scheme(Protocol):
    """How the weight [out, in] of a linear layer is stored."""

    name: str

    def read(
        self, tensor: ReadTensor, name: str, shape: tuple[int, int], rows: Part | None, cols: Part | None, **options: Any
    ) -> "Packed":
        """The outputs `rows` and inputs `cols` of layer `name`, whose whole weight is of `shape`; nothing else is read.

        `options`: dtype and device, as for `tensor`.
        """
        ...

    def join(self, parts: Sequence["Packed"]) -> "Packed":
        """Layers with the same inputs as one, whose outputs follow one another."""
        ...


@dataclass(frozen=True, eq=False)
class Packed:
    """A part of a linear layer's weight."""

    data: Tensor
    scale: Tensor | None
    zero: Tensor | None
    scheme: Scheme


class Dense:
    """One number a weight: `data` [out, in] in the activations' dtype, neither scale nor zero."""

    name = "dense"

    def read(
        self, tensor: ReadTensor, name: str, shape: tuple[int, int], rows: Part | None, cols: Part | None, **options: Any
    ) -> Packed:
        return dense(tensor(name + ".weight", shape, rows=rows, cols=cols, **options))

    def join(self, parts: Sequence[Packed]) -> Packed:
        return parts[0] if len(parts) == 1 else dense(torch.cat([part.data for part in parts]))


DENSE = Dense()


def dense(data: Tensor) -> Packed:
    return Packed(data, None, None, DENSE)


def join(parts: Sequence[Packed]) -> Packed:
    """Layers of one scheme that read the same input, as one layer."""
    return parts[0].scheme.join(parts)
