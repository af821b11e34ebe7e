"""The slot tables of the CPU device: loop-carried data of requests, indexed by slot, written and read by queued work only."""

from typing import NamedTuple

import numpy as np

from slipstream.log.batch import Batch
from slipstream.log.caches import Limits
from slipstream.log.request import Request, SamplingParams

_NOTHING = np.zeros(0, np.int32)
_NOBODY = SamplingParams(temperature=0.0)


class PlacedRows(NamedTuple):
    """A batch's rows as the device runs them, int [R] each: where they begin, their tokens, how many of these are judged."""

    starts: np.ndarray
    counts: np.ndarray
    sampled: np.ndarray


class SlotTables:
    """Tokens, pages and drafts of every slot. Only the device's thread may touch it after `start`."""

    def __init__(self, limits: Limits, most_drafts: int = 0):
        """`most_drafts`: drafts that a row verifies at most."""
        slots = limits.slots
        self.tokens = np.zeros((slots, limits.max_len + 1), np.int32)
        self.pages = np.zeros((len(limits.tables), slots, limits.columns + 1), np.int32)  # 0: the null page
        self.sampling = [_NOBODY] * slots
        self.prompt_len = np.zeros(slots, np.int64)
        self.greedy = np.zeros(slots, bool)  # needs no more than its best raw logit
        self.length = np.zeros(slots, np.int64)  # known tokens: the truth where drafts are in flight; never beyond the limit
        self.limit = np.zeros(slots, np.int64)
        self.speculates = most_drafts > 0
        self.most_drafts = np.full(slots, most_drafts)
        self._most_drafts = most_drafts
        self.drafts = np.zeros((slots, most_drafts), np.int32)  # for the slot's next row ...
        self.drafted = np.zeros(slots, np.int64)  # ... and how many there are
        self.prediction = [_NOTHING] * slots
        self.bound = np.zeros(slots, bool)  # to a grammar

    def init_slot(self, slot: int, request: Request) -> None:
        """Forgets the slot's last owner and writes the new one's prompt and parameters."""
        self.pages[:, slot] = 0
        self.tokens[slot] = 0
        self.tokens[slot, : request.prompt_len] = np.frombuffer(request.prompt, "<i4")
        self.prompt_len[slot] = request.prompt_len
        self.sampling[slot] = request.sampling
        self.greedy[slot] = request.sampling.plain and request.sampling.temperature == 0.0
        self.length[slot] = request.prompt_len
        self.limit[slot] = request.prompt_len + request.max_tokens
        most = request.most_drafts
        self.most_drafts[slot] = self._most_drafts if most < 0 else min(most, self._most_drafts)
        self.drafted[slot] = 0
        self.prediction[slot] = np.frombuffer(request.prediction, "<i4")
        self.bound[slot] = bool(request.grammar)

    def place(self, batch: Batch) -> PlacedRows:
        """The batch's rows as they run. Writes each row's drafts into the token table, behind the known tokens.

        A decode row begins at the slot's own length and has as many drafts as were made for it, never beyond the limit.
        """
        if not self.speculates:
            return PlacedRows(batch.starts, batch.counts, batch.sampled)
        d = batch.decodes
        starts, counts, sampled = batch.starts.copy(), batch.counts.copy(), batch.sampled.copy()
        slots = batch.slots[:d]
        known = self.length[slots]
        starts[:d] = known - 1
        widths = np.minimum(np.minimum(sampled[:d], 1 + self.drafted[slots]), self.limit[slots] - known)
        counts[:d] = sampled[:d] = np.maximum(widths, 1)
        for i in np.flatnonzero(widths > 1).tolist():
            slot, first, drafts = int(slots[i]), int(known[i]), int(widths[i]) - 1
            self.tokens[slot, first : first + drafts] = self.drafts[slot, :drafts]
        return PlacedRows(starts, counts, sampled)

    def commit(self, slots: np.ndarray, firsts: np.ndarray, tokens: np.ndarray, accepted: np.ndarray) -> None:
        """Writes the first accepted[i] of tokens [rows, width] that row i gave, from position firsts[i] on."""
        places = np.arange(tokens.shape[1])
        taken = places < accepted[:, None]
        self.tokens[np.repeat(slots, accepted), (firsts[:, None] + places)[taken]] = np.maximum(tokens[taken], 0)
        self.length[slots] = np.minimum(firsts + accepted, self.limit[slots])

    def write_pages(self, places: np.ndarray) -> None:
        """int32 [n, 4]: (table, slot, column, page)."""
        if len(places):
            self.pages[places[:, 0], places[:, 1], places[:, 2]] = places[:, 3]

    def ids(self, slots: np.ndarray, starts: np.ndarray, counts: np.ndarray) -> np.ndarray:
        """int32 [sum of counts]: the rows' tokens, one row after another."""
        of_row = np.repeat(np.arange(len(slots)), counts)
        firsts = np.cumsum(counts) - counts
        return self.tokens[slots[of_row], np.arange(len(of_row)) - firsts[of_row] + starts[of_row]]
