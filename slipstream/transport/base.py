"""What carries tensors from one process to others: integer ids in messages, bytes elsewhere.

A transport moves bytes; who may read what, and when, is decided above it. `arena` is shared memory of one machine; CUDA IPC,
NIXL and Mooncake fit the same four calls. Imports numpy only.
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from slipstream.errors import SlipstreamError


class TransportError(SlipstreamError):
    """A tensor that cannot be carried, or an id that no longer (or never) named one."""


class TransportFull(TransportError):
    """No room now. The message says how much was asked for and what holds the rest."""


class Transport(Protocol):
    """One process's end. `peer` is this process's number among those that share the transport, from 0.

    Calls are batched: each takes many tensors and costs the same per tensor however many there are. A call that raises has
    changed nothing.
    """

    peer: int

    def put(self, arrays: Sequence[np.ndarray], readers: Sequence[int], wait: float = 0.0) -> list[int]:
        """Copies arrays in and gives each reader one reference on each. Returns ids (positive, below 2**63).

        Waits up to `wait` seconds for room, then raises TransportFull. Raises TransportError for what can never fit.
        """
        ...

    def get(self, ids: Sequence[int]) -> list[np.ndarray]:
        """Read-only arrays, valid until this process releases the ids. Raises TransportError for a stale id."""
        ...

    def retain(self, ids: Sequence[int]) -> None:
        """One more reference of this process on each id."""
        ...

    def release(self, ids: Sequence[int]) -> None:
        """Gives one reference of this process back. The last one of all readers returns the memory to its owner."""
        ...

    def forget(self, peer: int) -> None:
        """That process is gone: its references on this process's tensors are released."""
        ...
