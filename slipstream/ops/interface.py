"""The operations that a model needs from a device, as one namespace between `models/` and the kernels.

`ops/cpu/ops.py` is the PyTorch implementation, for the CPU and as the reference of all others. A CUDA namespace with the same
methods replaces it without a change in any model. A model never sees page tables, lengths or streams: it passes its `step` to
every operation. All collectives of a forward are inside `embed` and `reduce_add_norm`. So the collectives that run, and their
shapes, depend only on the step's padded token count.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from slipstream.shard import Heads, Shard
from slipstream.weights.packed import Packed


@dataclass(frozen=True, eq=False)
class Attention:
    """The parameters of one layer's attention.

    `q_norm`, `k_norm` are prepared RMSNorm weights [head_dim] applied to each head before rotation (Qwen3), or None.
    `rotary` [max_len, head_dim] float32: cosines of a position in the first half, sines in the second; rotation pairs
    element i with i + head_dim / 2 (the "rotate half" form of the Hugging Face checkpoints).
    """

    cache: int  # index into the model's `caches`, and so into the step's
    table: int  # the page table of that cache: index into `log.caches.windows` of the model's `caches`
    heads: Heads
    head_dim: int
    scale: float
    rotary: Tensor
    q_norm: Any = None
    k_norm: Any = None


class Step(Protocol):
    """Rows that go through operations together. Executors add fields for their operations; models pass the step unchanged."""

    slots: Tensor  # [rows] whose they are


class ForwardStep(Step, Protocol):
    """The tokens of one forward."""

    ids: Tensor  # [T] token ids, any integer type
    positions: Tensor  # [T]


@dataclass(eq=False)
class JudgedRows:
    """The rows of a step that reach the output layer (a `Step`)."""

    slots: Tensor


class Ops(Protocol):
    """Operations over the T rows of a step. Tensors are [T, width], contiguous, of `dtype` unless said otherwise.

    Methods that prepare weights run once. Every operation takes the step, as a row's adapter, expert or window may matter.
    """

    dtype: torch.dtype
    device: torch.device
    shard: Shard

    def weight(self, parts: list[Packed], bias: Tensor | None = None) -> Any:
        """Prepares linear layers that read the same input as one, for `linear`, `swiglu`, `partial` and `logits`.

        `bias` [out] is of all parts together.
        """
        ...

    def norm_weight(self, tensor: Tensor, eps: float) -> Any:
        """Prepares an RMSNorm's weight and epsilon for `norm` and `reduce_add_norm`."""
        ...

    def tensor(self, tensor: Tensor) -> Tensor:
        """Puts a tensor (an embedding, a rotary table) on the device as it is."""
        ...

    def embed(self, table: Tensor, first: int, step: Any) -> Tensor:
        """Rows of the embedding for step.ids, summed over the ranks: this rank holds ids [first, first + len(table))."""
        ...

    def norm(self, x: Tensor, weight: Any, step: Any) -> Tensor:
        """RMSNorm over the last dimension, statistics in float32."""
        ...

    def linear(self, x: Tensor, weight: Any, step: Any) -> Tensor:
        """x [T, in] to [T, out], this rank's columns."""
        ...

    def attention(self, qkv: Tensor, spec: Attention, step: Any) -> Tensor:
        """[T, (queries + 2 keys) head_dim] to [T, queries head_dim].

        Norms and rotates queries and keys, writes keys and values at each row's position into the pages of cache `spec.cache`,
        and attends causally over all tokens of the row's request there, or over the latest tokens where that cache is a window.
        A rank without heads gets and returns [T, 0].
        """
        ...

    def swiglu(self, x: Tensor, weight: Any, step: Any) -> Tensor:
        """silu(x gate^T) * (x up^T), this rank's columns, of a weight made of gate and up."""
        ...

    def partial(self, x: Tensor, weight: Any, step: Any) -> Tensor:
        """x weight^T of a layer whose inputs are split over the ranks: this rank's part of a sum, [T, hidden].

        x is [T, this rank's columns], possibly [T, 0]. The result lies where the device's `reduce_add_norm` reads it, until the
        second `partial` after this one.
        """
        ...

    def reduce_add_norm(self, partial: Tensor, residual: Tensor, norm: Any, step: Any) -> tuple[Tensor, Tensor]:
        """residual + the sum of `partial` over the ranks; returns it and its RMSNorm. Both arguments may be overwritten."""
        ...

    def logits(self, hidden: Tensor, head: Any, step: Any) -> Tensor:
        """[n, hidden], whose rows are the step's, to this rank's part of the vocabulary, float32 [n, part]."""
        ...
