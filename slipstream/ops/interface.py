"""What a model asks of a device: one namespace of operations, the seam between `models/` and the kernels.

`ops/cpu/ops.py` is the PyTorch implementation (the CPU's, and the reference of every other); a CUDA namespace with the same
methods takes its place without a change in any model. A model never sees block tables, lengths or streams: it hands the
`step` it was given back to the operations that need them. Every collective of a forward is inside `embed` and `add_norm`, so
which ones run, and their shapes, follow from the step's padded token count alone.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from slipstream.shard import Heads, Shard


@dataclass(frozen=True, eq=False)
class Attention:
    """One layer's attention, as its operation needs it.

    `q_norm`, `k_norm` are prepared RMSNorm weights [head_dim] applied to each head before rotation (Qwen3), or None.
    `rotary` [max_len, head_dim] float32: cosines of a position in the first half, sines in the second; rotation pairs
    element i with i + head_dim / 2 (the "rotate half" form of the Hugging Face checkpoints).
    """

    layer: int  # index into the step's caches
    heads: Heads
    head_dim: int
    scale: float
    rotary: Tensor
    q_norm: Any = None
    k_norm: Any = None


class Step(Protocol):
    """One step's inputs on the device. Executors add what their operations need beside; models read only these."""

    ids: Tensor  # [T] token ids, any integer type
    positions: Tensor  # [T]


class Ops(Protocol):
    """Operations over the T rows of a step. Tensors are [T, width], contiguous, of `dtype` unless said otherwise."""

    dtype: torch.dtype
    device: torch.device
    shard: Shard

    def weight(self, tensor: Tensor, bias: Tensor | None = None) -> Any:
        """Prepares a linear layer's [out, in] part (packs it for the device); what `linear` and `add_norm` take."""
        ...

    def gated_weight(self, gate: Tensor, up: Tensor, bias: tuple[Tensor, Tensor] | None = None) -> Any:
        """Prepares two [width, in] parts for `swiglu`."""
        ...

    def norm_weight(self, tensor: Tensor, eps: float) -> Any:
        """Prepares an RMSNorm's weight and epsilon for `norm` and `add_norm`."""
        ...

    def tensor(self, tensor: Tensor) -> Tensor:
        """Puts a tensor (an embedding, a rotary table) on the device as it is."""
        ...

    def embed(self, table: Tensor, first: int, step: Any) -> Tensor:
        """Rows of the embedding for step.ids, summed over the ranks: this rank holds ids [first, first + len(table))."""
        ...

    def norm(self, x: Tensor, weight: Any) -> Tensor:
        """RMSNorm over the last dimension, statistics in float32."""
        ...

    def linear(self, x: Tensor, weight: Any) -> Tensor:
        """x [T, in] to [T, out], this rank's columns."""
        ...

    def attention(self, qkv: Tensor, spec: Attention, step: Any) -> Tensor:
        """[T, (queries + 2 keys) head_dim] to [T, queries head_dim].

        Norms and rotates queries and keys, writes keys and values at each row's position into the pages of layer `spec.layer`,
        and attends causally over everything its request has there. A rank without heads gets and returns [T, 0].
        """
        ...

    def swiglu(self, x: Tensor, weight: Any) -> Tensor:
        """silu(x gate^T) * (x up^T), this rank's columns."""
        ...

    def add_norm(self, x: Tensor, weight: Any, residual: Tensor, norm: Any) -> tuple[Tensor, Tensor]:
        """The row-parallel end of a block: residual + sum over ranks of x weight^T; returns it and its RMSNorm.

        `residual` may be overwritten. x is [T, this rank's columns], possibly [T, 0]; the weight's bias is added once.
        """
        ...

    def logits(self, hidden: Tensor, head: Any) -> Tensor:
        """[n, hidden] to this rank's part of the vocabulary, float32 [n, part]."""
        ...
