"""The operations that a model needs from a device, as one namespace between `models/` and the kernels.

`ops/cpu/ops.py` is the PyTorch implementation, for the CPU and as the reference of all others. A CUDA namespace with the same
methods replaces it without a change in any model. A model never sees page tables, lengths or streams: it passes its `step` to
every operation. All collectives of a forward are inside `embed`, `reduce_add_norm` and `all_reduce`. So the collectives that
run, and their shapes, depend only on the step's padded token count.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from slipstream.ops.layers import Activation, Attention, Experts, Gate, GatedDelta, LatentAttention, Mamba2
from slipstream.shard import Shard
from slipstream.weights.packed import Packed


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
        """Prepares linear layers that read the same input as one, for `linear`, `gated`, `activated`, `partial` and `logits`.

        `bias` [out] is of all parts together.
        """
        ...

    def expert_weight(self, weight: Packed, bias: Tensor | None = None) -> Any:
        """Prepares the same layer of all experts, [experts, out, in], for `experts`; `bias` [experts, out]."""
        ...

    def norm_weight(self, tensor: Tensor, eps: float) -> Any:
        """Prepares an RMSNorm's weight and epsilon for `norm` and `reduce_add_norm`."""
        ...

    def tensor(self, tensor: Tensor) -> Tensor:
        """Puts a tensor (an embedding, a rotary table) on the device as it is."""
        ...

    def embed(self, table: Tensor, first: int, step: Any, scale: float = 1.0) -> Tensor:
        """Rows of the embedding for step.ids, times `scale`, summed over the ranks.

        This rank holds ids [first, first + len(table)). The result begins the residual.
        """
        ...

    def norm(self, x: Tensor, weight: Any, step: Any) -> Tensor:
        """RMSNorm over the last dimension, statistics in float32."""
        ...

    def linear(self, x: Tensor, weight: Any, step: Any) -> Tensor:
        """x [T, in] to [T, out], this rank's columns."""
        ...

    def attention(self, qkv: Tensor, spec: Attention, step: Any) -> Tensor:
        """[T, at least (queries + 2 keys) head_dim] to [T, queries head_dim]; further columns are not read.

        Norms and rotates queries and keys, writes keys and values at each row's position into the pages of cache `spec.cache`,
        and attends causally over all tokens of the row's request there, or over the latest tokens where that cache is a window.
        A rank without heads gets and returns [T, 0].
        """
        ...

    def latent_attention(self, q: Tensor, kv: Tensor, spec: LatentAttention, step: Any) -> Tensor:
        """q [T, heads * (nope_dim + rope_dim)] and kv [T, latent_dim + rope_dim] to [T, heads * value_dim].

        Norms the latent values, rotates queries and keys, writes kv at each row's position into the pages of `spec.cache`, and
        attends causally over all tokens of the row's request there.
        """
        ...

    def gated_delta(self, x: Tensor, spec: GatedDelta, step: Any) -> Tensor:
        """[T, channels + gate + b + a] to [T, value heads * value_dim]; moves each row's slot's state past the row's tokens."""
        ...

    def mamba2(self, x: Tensor, spec: Mamba2, step: Any) -> Tensor:
        """[T, gate + channels + dt] to [T, heads * head_dim]; moves each row's slot's state past the row's tokens."""
        ...

    def gate(self, x: Tensor, gate: Tensor, step: Any) -> Tensor:
        """x * sigmoid(gate), of one shape; may overwrite x."""
        ...

    def gated(self, x: Tensor, weight: Any, gate: Gate, step: Any) -> Tensor:
        """gate(x g^T) * (x u^T), this rank's columns, of a weight made of g and u."""
        ...

    def activated(self, x: Tensor, weight: Any, activation: Activation, step: Any) -> Tensor:
        """activation(x w^T), this rank's columns."""
        ...

    def experts(self, x: Tensor, spec: Experts, step: Any) -> Tensor:
        """[T, hidden] to this rank's part of a sum, as `partial` gives it: each token through the experts that it chooses."""
        ...

    def partial(self, x: Tensor, weight: Any, step: Any) -> Tensor:
        """x weight^T of a layer whose inputs are split over the ranks: this rank's part of a sum, [T, hidden].

        x is [T, this rank's columns], possibly [T, 0]. The result lies where the device's `reduce_add_norm` reads it, until the
        second `partial` after this one.
        """
        ...

    def all_reduce(self, x: Tensor, step: Any) -> Tensor:
        """The sum of x [T, any width] over the ranks, for models whose own code adds the residual; may overwrite x."""
        ...

    def reduce_add_norm(
        self, partial: Tensor, residual: Tensor, norm: Any, step: Any, post_norm: Any = None
    ) -> tuple[Tensor, Tensor]:
        """residual + the sum of `partial` over the ranks; returns it and its RMSNorm. Both tensors may be overwritten.

        With `post_norm`, the RMSNorm of the sum is added in its place (Gemma).
        """
        ...

    def logits(self, hidden: Tensor, head: Any, step: Any, softcap: float = 0.0) -> Tensor:
        """[n, hidden], whose rows are the step's, to this rank's part of the vocabulary, float32 [n, part].

        With `softcap`, a logit x becomes softcap * tanh(x / softcap).
        """
        ...
