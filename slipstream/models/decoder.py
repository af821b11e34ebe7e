"""The interface of a decoder that an executor needs, for every family."""

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from slipstream.log.caches import CacheLayout
from slipstream.ops.interface import ForwardStep, Step
from slipstream.ops.layers import Attention, LatentAttention


class Decoder(Protocol):
    """One rank's part of a model. It holds no data of a request."""

    vocab: int  # of all ranks
    hidden: int  # width of the result of `forward`
    max_len: int  # tokens of a request at most
    caches: tuple[CacheLayout, ...]  # this rank's cache layouts; layers refer to them by index

    @property
    def attentions(self) -> Sequence[Attention | LatentAttention]:
        """Of all layers that attend, in order."""
        ...

    def forward(self, step: ForwardStep) -> Tensor:
        """[T, hidden] after the last norm; writes the step's keys, values and states into the caches."""
        ...

    def logits(self, hidden: Tensor, step: Step) -> Tensor:
        """[n, hidden], whose rows are the step's, to float32 [n, this rank's part of the vocabulary]."""
        ...
