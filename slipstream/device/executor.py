"""The one interface between a rank's machine and its device.

A device is one in-order stream. Queued work runs in the order of the calls and is never cancelled. All calls but `capacity` and
`start` return without waiting for the device, and all come from one thread.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from slipstream.log.batch import Batch, Outcome
from slipstream.log.caches import Limits
from slipstream.log.request import Request

__all__ = ["Batch", "Capacity", "DeviceProgress", "Executor", "Outcome", "StepFailed"]


class DeviceProgress(Protocol):
    """Where a device reports its progress: the rank's block of the board, except in tests."""

    def set(self, field: str, value: int, /) -> None:
        """Sets one word of this rank's block."""
        ...

    def device_span(self, start: int, end: int, entry: int, collective: int = 0, /) -> None:
        """The device ran the step of `entry` from `start` to `end` (nanoseconds of the monotonic clock)."""
        ...


@dataclass(frozen=True)
class Capacity:
    """The capacity of one rank. The group uses the minimum over its ranks (`log.caches.least`)."""

    limits: Limits  # of this rank; `caching` as configured
    weight_bytes: int


class StepFailed(Exception):
    """Raised by `outcomes()` when a queued step raised on the device thread. Poisons the group."""


class Executor(Protocol):
    """One rank's device, with its part of the model loaded. Its calls come in this order: capacity, start, all others."""

    copy_seconds: float  # how long a page takes to the host and back; known after `start`
    eager_steps: dict[Any, int]  # outside captured work, by reason (a step may have several); empty where nothing is captured

    def capacity(self) -> Capacity:
        """The pages and slots that fit into memory besides the weights and the largest step."""
        ...

    def start(self, limits: Limits) -> None:
        """Allocates pages 1..pages of each table, slot tables, state and snapshots as the group agreed; then warms up."""
        ...

    def init_slot(self, slot: int, request: Request) -> None:
        """Queues the writing of a slot's tables: prompt ids, sampling parameters, counters. Zeros all loop-carried state."""
        ...

    def set_state(self, slot: int, snapshot: int) -> None:
        """Queues the copy of a snapshot to the slot's state, in the stream's order; snapshot 0 is zeros."""
        ...

    def offload(self, table: int, pages: tuple[int, ...], host: tuple[int, ...]) -> None:
        """Queues the copy of pages of a table to its host pages, in the stream's order."""
        ...

    def restore(self, table: int, host: tuple[int, ...], pages: tuple[int, ...]) -> None:
        """Queues the copy of host pages of a table to its pages, in the stream's order."""
        ...

    def launch(self, batch: Batch) -> None:
        """Queues one step: page-table writes, forward, state snapshots, sampling, and the copy of its outcome."""
        ...

    def launch_forward(self, batch: Batch) -> None:
        """Queues a step up to its logits (phase order `late_sample`); `launch_sample` must follow before the next launch."""
        ...

    def launch_sample(self, seq: int, masks: dict[int, np.ndarray], discarded: frozenset[int]) -> None:
        """Queues the sampling of that step. masks: slot -> uint32 bit masks [sampled, ceil(vocab / 32)] of allowed ids.

        discarded: slots whose requests have ended meanwhile; tokens of their rows are ignored.
        """
        ...

    def outcomes(self) -> list[Outcome]:
        """Outcomes that have arrived since the last call, in order. Raises StepFailed."""
        ...

    def fileno(self) -> int | None:
        """A descriptor that is readable while outcomes wait, or None where the driver must poll."""
        ...

    def close(self) -> None:
        """Ends the device's use. Nothing may be called after it."""
        ...
