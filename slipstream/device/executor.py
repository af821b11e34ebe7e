"""The one interface between a rank's machine and its device.

A device is one in-order stream: what is queued runs in the order of the calls, and nothing queued is ever cancelled.
All calls return without waiting for the device.
"""

from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from slipstream.log.request import Request, TokenLogprobs


@dataclass(frozen=True)
class Capacity:
    """What one rank can hold. The group uses the minimum over its ranks."""

    pages: int  # usable pages, the null page 0 not counted: ids are 1..pages
    slots: int
    max_len: int  # tokens per request
    weight_bytes: int


@dataclass(frozen=True, eq=False)
class Batch:
    """The rows of one step, as columns. Rows [0, decodes) have count 1 and sample; prompt chunks follow.

    Row i computes tokens [starts[i], starts[i] + counts[i]) of slots[i], reading their ids from the slot's token table.
    A row that samples writes its token at position starts[i] + counts[i] of that table, on the device.
    `slots` is the same array object as in the batch before while the rows stay the same ones.
    """

    seq: int  # the entry that holds the step
    slots: np.ndarray  # int32 [R]
    starts: np.ndarray  # int32 [R]
    counts: np.ndarray  # int32 [R]
    samples: np.ndarray  # bool [R]
    decodes: int
    pages: np.ndarray  # int32 [N, 3]: (slot, column, page), written to the block tables before the forward

    @property
    def tokens(self) -> int:
        return int(self.counts.sum())


@dataclass(frozen=True, eq=False)
class Outcome:
    """What one step returned; the same bytes on every rank of the group."""

    seq: int
    tokens: np.ndarray  # int32 [number of sampling rows], in row order; -1 marks a dead end (see `errors`)
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)  # by index into `tokens`
    prompt_logprobs: dict[int, tuple[int, list[TokenLogprobs]]] = field(default_factory=dict)  # slot -> (start, rows)
    errors: dict[int, str] = field(default_factory=dict)  # by index into `tokens`


class StepFailed(Exception):
    """Raised by `outcomes()` when a queued step raised on the device thread. Poisons the group."""


class Executor(Protocol):
    def capacity(self) -> Capacity: ...

    def start(self, pages: int, slots: int, max_len: int) -> None:
        """Allocates pages 1..pages and slot tables, then warms up (compiles, captures). Called once, before any other call."""
        ...

    def admit(self, slot: int, request: Request) -> None:
        """Queues the writing of a slot's tables: prompt ids, sampling parameters, counters. Resets all loop-carried state."""
        ...

    def launch(self, batch: Batch) -> None:
        """Queues one step: block-table writes, forward, sampling, and the copy of its outcome."""
        ...

    def launch_forward(self, batch: Batch) -> None:
        """Queues a step up to its logits (phase order `late_sample`); `launch_sample` must follow before the next launch."""
        ...

    def launch_sample(self, seq: int, masks: dict[int, np.ndarray], discarded: frozenset[int]) -> None:
        """Queues the sampling of that step. masks: slot -> uint32 bit mask [ceil(vocab / 32)] of allowed ids."""
        ...

    def outcomes(self) -> list[Outcome]:
        """Outcomes that have arrived since the last call, in order. Raises StepFailed."""
        ...

    def fileno(self) -> int | None:
        """A descriptor that is readable while outcomes wait, or None where the driver must poll."""
        ...

    def close(self) -> None: ...
