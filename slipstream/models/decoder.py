"""What an executor needs of a decoder, whatever its family."""

from typing import Protocol

from torch import Tensor

from slipstream.log.caches import CacheLayout
from slipstream.ops.interface import Attention, ForwardStep, Step


class Decoder(Protocol):
    """One rank's part of a model. It holds no data of a request."""

    vocab: int  # of all ranks
    hidden: int  # width of what `forward` returns
    max_len: int  # tokens of a request at most
    caches: tuple[CacheLayout, ...]  # what this rank keeps of a request, to which the layers refer by index
    attentions: tuple[Attention, ...]  # of all layers that attend, in order

    def forward(self, step: ForwardStep) -> Tensor:
        """[T, hidden] after the last norm; writes what the step's tokens leave in the caches."""
        ...

    def logits(self, hidden: Tensor, step: Step) -> Tensor:
        """[n, hidden], whose rows are the step's, to float32 [n, this rank's part of the vocabulary]."""
        ...
