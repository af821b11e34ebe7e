"""The interface that carries tensors between processes: integer ids travel in messages, bytes elsewhere.

A transport moves bytes. The rooms above decide which process may read which tensor, and when. `arena` is shared memory of one
machine; CUDA IPC, NIXL and Mooncake fit the same calls. Imports numpy only.
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from slipstream.errors import SlipstreamError


class TransportError(SlipstreamError):
    """A tensor that cannot be sent, or an id that does not name a live tensor."""


class TransportFull(TransportError):
    """No room now. The message gives the requested bytes and the tensors that hold the rest."""


class Transport(Protocol):
    """One process's end. `peer` is this process's number among those that share the transport, from 0.

    Calls are batched: each takes many tensors, and the cost per tensor does not depend on their number. A call that raises has
    changed nothing.
    """

    peer: int

    def put(self, arrays: Sequence[np.ndarray], readers: Sequence[int], wait: float = 0.0) -> list[int]:
        """Copies arrays in and gives each reader one reference on each. Returns ids (positive, below 2**63).

        Waits up to `wait` seconds for room, then raises TransportFull. Raises TransportError for tensors that can never fit.
        """
        ...

    def get(self, ids: Sequence[int]) -> list[np.ndarray]:
        """Read-only arrays, valid until this process releases the ids. Raises TransportError for a stale id."""
        ...

    def retain(self, ids: Sequence[int]) -> None:
        """One more reference of this process on each id."""
        ...

    def release(self, ids: Sequence[int]) -> None:
        """Gives back one reference of this process on each id. The last one of all readers returns the memory to its owner."""
        ...

    def forget(self, peer: int) -> None:
        """Process `peer` is gone: releases its references on this process's tensors."""
        ...
