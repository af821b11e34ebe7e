"""State of a fixed size by slot, and its snapshots: the same tensors on every device, copied in the order of its stream."""

from math import prod

import torch
from torch import Tensor

from slipstream.log.caches import ITEM_BYTES, STATE_ALIGN_BYTES, CacheLayout, PerSlot


class SlotState:
    """Arrays [slots + 1, ...] of each layer that has state, and [snapshots + 1] copies of all of them.

    The state of a slot lies in one piece, so that it is set or saved by one copy, whatever the number of layers; the arrays are
    views into it, contiguous but for their first dimension.
    Row `slots` belongs to no request: padding rows write there. Snapshot 0 holds zeros, the state before the first token.
    """

    def __init__(self, layouts: tuple[CacheLayout, ...], slots: int, snapshots: int, device: torch.device):
        places: list[tuple[int, str, tuple[int, ...], int, int]] = []  # (layout, dtype, shape, first byte, end)
        size = 0
        for i, layout in enumerate(layouts):
            for array in layout.arrays if isinstance(layout, PerSlot) else ():
                end = size + prod(array.shape) * ITEM_BYTES[array.dtype]
                places.append((i, array.dtype, array.shape, size, end))
                size = -(-end // STATE_ALIGN_BYTES) * STATE_ALIGN_BYTES
        self._slots, self._saved = (
            torch.zeros((rows + 1, size), dtype=torch.uint8, device=device) for rows in (slots, snapshots)
        )  # fmt: skip
        self.arrays: dict[int, tuple[Tensor, ...]] = {}  # by the layout's index
        for i, dtype, shape, first, end in places:
            if end > first:
                array = self._slots[:, first:end].view(getattr(torch, dtype)).view(slots + 1, *shape)
            else:  # of a rank without heads
                array = torch.zeros((slots + 1, *shape), dtype=getattr(torch, dtype), device=device)
            self.arrays[i] = (*self.arrays.get(i, ()), array)

    def set(self, slot: int, snapshot: int) -> None:
        """Queues the copy of a snapshot to a slot."""
        if self.arrays:
            self._slots[slot].copy_(self._saved[snapshot])

    def save(self, pairs: tuple[tuple[int, int], ...]) -> None:
        """Queues the copy of slots to snapshots, for each (slot, snapshot)."""
        for slot, snapshot in pairs:
            assert snapshot, "snapshot 0 is the state before the first token"
            self._saved[snapshot].copy_(self._slots[slot])
