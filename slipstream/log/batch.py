"""What the replica asks of a device and what comes back: calls, one step's rows as columns, and its outcome."""

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from slipstream.log.request import Request, TokenLogprobs


class InitSlot(NamedTuple):
    """Queue the writing of a slot's tables."""

    slot: int
    request: Request


class Offload(NamedTuple):
    """Queue the copy of device pages to host pages, one to one."""

    pages: tuple[int, ...]
    host: tuple[int, ...]


class Restore(NamedTuple):
    """Queue the copy of host pages to device pages, one to one."""

    host: tuple[int, ...]
    pages: tuple[int, ...]


DeviceOp = InitSlot | Offload | Restore


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


PromptRows = tuple[int, list[TokenLogprobs]]  # position of the first row, rows


@dataclass(frozen=True, eq=False)
class Outcome:
    """What one step returned; the same bytes on every rank of the group, but for `seconds`."""

    seq: int
    tokens: np.ndarray  # int32 [number of sampling rows], in row order; -1 marks a dead end (see `errors`)
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict[int, TokenLogprobs])  # by index into `tokens`
    prompt_logprobs: dict[int, PromptRows] = field(default_factory=dict[int, PromptRows])  # by slot
    errors: dict[int, str] = field(default_factory=dict[int, str])  # by index into `tokens`
    seconds: float = 0.0  # how long the step had this rank's device, for the leader's budget alone; 0: not measured
