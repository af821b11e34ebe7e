"""The values between replica and device: device operations, one step's rows as columns, and its outcome."""

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from slipstream.log.request import Request, TokenLogprobs


class InitSlot(NamedTuple):
    """Queue the writing of a slot's tables for a new owner; all state of the slot begins at zero."""

    slot: int
    request: Request


class SetState(NamedTuple):
    """Queue the copy of a snapshot to a slot's state; snapshot 0 is the state before the first token: zeros."""

    slot: int
    snapshot: int


class Offload(NamedTuple):
    """Queue the copy of device pages of one table to its host pages, one to one."""

    table: int
    pages: tuple[int, ...]
    host: tuple[int, ...]


class Restore(NamedTuple):
    """Queue the copy of host pages of one table to its device pages, one to one."""

    table: int
    host: tuple[int, ...]
    pages: tuple[int, ...]


DeviceOp = InitSlot | SetState | Offload | Restore


@dataclass(frozen=True, eq=False)
class Batch:
    """The rows of one step, as columns. Rows [0, decodes) are decode rows; prompt chunks follow.

    Row i computes tokens [starts[i], starts[i] + counts[i]) of slots[i], reading their ids from the slot's token table; the
    last sampled[i] of them are judged: 0 for a chunk that does not end its prompt, 1 for plain decoding, 1 + K for K
    drafts.
    A row whose slot has drafts in flight begins at the length that the device knows; `starts` is then its upper bound.
    A judged row writes its tokens into that table, on the device, after the tokens that it computed, and never beyond the
    request's limit. While the rows stay the same, `slots` is the same array object as in the previous batch.
    """

    seq: int  # the entry that holds the step
    slots: np.ndarray  # int32 [R]
    starts: np.ndarray  # int32 [R]
    counts: np.ndarray  # int32 [R]
    sampled: np.ndarray  # int32 [R]
    width: int  # the largest of `sampled`
    decodes: int
    pages: np.ndarray  # int32 [N, 4]: (table, slot, column, page), written to the page tables before the forward
    saves: tuple[tuple[int, int], ...] = ()  # (slot, snapshot): states that are copied to snapshots after the forward

    @property
    def tokens(self) -> int:
        return int(self.counts.sum())

    @property
    def judged(self) -> np.ndarray:
        """Indexes of the rows that sample, intp [J]; the outcome's rows stand in this order."""
        return np.flatnonzero(self.sampled)


PromptRows = tuple[int, list[TokenLogprobs]]  # position of the first row, rows
Place = tuple[int, int]  # row and column of a token in `Outcome.tokens`


@dataclass(frozen=True, eq=False)
class Outcome:
    """The result of one step. All but `seconds` is the same on every rank of the group.

    `tokens` has one row for each judged row of the batch. Row r gave its first accepted[r] tokens: the drafts that were right
    and the token after them, unless a grammar allows none there. `drafts` are for the slot's next row; they are returned only
    where a grammar has to check them.
    """

    seq: int
    tokens: np.ndarray  # int32 [judged rows, width]; -1 first in a row marks a dead end (see `errors`)
    accepted: np.ndarray  # int32 [judged rows], each in 1..sampled
    logprobs: dict[Place, TokenLogprobs] = field(default_factory=dict[Place, TokenLogprobs])
    prompt_logprobs: dict[int, PromptRows] = field(default_factory=dict[int, PromptRows])  # by slot
    errors: dict[int, str] = field(default_factory=dict[int, str])  # by row of `tokens`
    drafts: dict[int, tuple[int, ...]] = field(default_factory=dict[int, tuple[int, ...]])  # by slot
    verified: np.ndarray | None = None  # int32 [judged rows]: drafts that each row had; None: no row had any
    seconds: float = 0.0  # how long the step had this rank's device; only the leader's budget reads it; 0: not measured
