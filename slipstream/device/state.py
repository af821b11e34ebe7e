"""State of a fixed size by slot, and its snapshots: the same tensor copies on every device, in the order of its stream."""

import torch
from torch import Tensor

from slipstream.log.caches import CacheLayout, PerSlot


class SlotState:
    """Arrays [slots + 1, ...] of each layer that has state, and [snapshots + 1, ...] of copies.

    Row `slots` belongs to no request: padding rows write there. Snapshot 0 holds zeros, the state before the first token.
    """

    def __init__(self, layouts: tuple[CacheLayout, ...], slots: int, snapshots: int, device: torch.device):
        self.arrays: dict[int, tuple[Tensor, ...]] = {}  # by the layout's index
        self._pairs: list[tuple[Tensor, Tensor]] = []
        for i, layout in enumerate(layouts):
            if isinstance(layout, PerSlot):
                made = [
                    tuple(
                        torch.zeros((rows + 1, *a.shape), dtype=getattr(torch, a.dtype), device=device)
                        for rows in (slots, snapshots)
                    )
                    for a in layout.arrays
                ]
                self.arrays[i] = tuple(state for state, _ in made)
                self._pairs += [(state, saved) for state, saved in made]

    def set(self, slot: int, snapshot: int) -> None:
        """Queues the copy of a snapshot to a slot."""
        for state, saved in self._pairs:
            state[slot].copy_(saved[snapshot])

    def save(self, pairs: tuple[tuple[int, int], ...]) -> None:
        """Queues the copy of slots to snapshots, for each (slot, snapshot)."""
        for slot, snapshot in pairs:
            assert snapshot, "snapshot 0 is the state before the first token"
            for state, saved in self._pairs:
                saved[snapshot].copy_(state[slot])
