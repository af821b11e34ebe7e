"""The checking device: what pages and tables hold, as tags in place of keys and values.

The tag of a position is a function of the request's salt and of all its tokens up to there, as its keys and values would be.
Each row must find, at every position it reads, the tag of its own tokens; a page that was handed out too early, shared wrongly,
hit before it was computed or written by two rows holds another one.
"""

import numpy as np

from slipstream.device.sim import SimTokens
from slipstream.log.batch import Batch, DeviceOp, InitSlot, Offload, Outcome, Restore, SetState
from slipstream.log.caches import Limits
from slipstream.log.request import Request

MAX_LEN = 4096
with np.errstate(over="ignore"):
    POWERS = np.cumprod(np.full(MAX_LEN, 0x9E3779B97F4A7C15, np.uint64))


class Violation(Exception):
    """A run has broken what must hold in every run."""


def tags_of(request: Request) -> np.ndarray:
    """uint64 [prompt tokens]: the tags of the prompt's positions."""
    tokens = np.frombuffer(request.prompt, "<i4").astype(np.uint64)
    base = np.uint64(int.from_bytes(request.salt[:7], "little") + 1)
    return np.cumsum((tokens + np.uint64(1)) * POWERS[: len(tokens)], dtype=np.uint64) + base


class Memory:
    """Pages [pages + 1, page_size] of each table, page tables by slot, states and snapshots.

    One serves all ranks that run the same steps.

    `tokens` is the device's own count and choice of tokens, by slot.
    """

    def __init__(self, limits: Limits, tokens: SimTokens):
        self.limits, self.tokens = limits, tokens
        self.page_size = limits.page_size
        places = limits.columns * limits.page_size
        self.content = [np.zeros((t.pages + 1, limits.page_size), np.uint64) for t in limits.tables]
        self.host = [np.zeros((t.host_pages, limits.page_size), np.uint64) for t in limits.tables]
        self.page_tables = np.zeros((len(limits.tables), limits.slots, limits.columns), np.int32)
        self.tags = np.zeros((limits.slots, places + limits.width), np.uint64)
        self.state = np.zeros(limits.slots, np.uint64)
        self.snapshots = np.zeros(limits.snapshots + 1, np.uint64)
        self._columns = np.arange(places)

    def queue(self, op: DeviceOp) -> None:
        """Carries out what a command asks for, in stream order."""
        match op:
            case InitSlot(slot, request):
                tags = tags_of(request)
                self.tags[slot, : len(tags)] = tags
                self.state[slot] = 0
            case SetState(slot, snapshot):
                self.state[slot] = self.snapshots[snapshot]
            case Offload(t, pages, host):
                self.host[t][list(host)] = self.content[t][list(pages)]
            case Restore(t, host, pages):
                self.content[t][list(pages)] = self.host[t][list(host)]

    def run(self, batch: Batch) -> None:
        """Carries out one step's forward. Raises Violation where a row reads what its own tokens did not write."""
        pages = batch.pages
        if len(pages):
            self.page_tables[pages[:, 0], pages[:, 1], pages[:, 2]] = pages[:, 3]
        slots, starts = batch.slots.astype(np.intp), batch.starts.astype(np.intp)
        d = batch.decodes
        if self.limits.width > 1:
            starts[:d] = self.tokens.length[slots[:d]] - 1  # the entry names the most that it can be
        self._read(batch, slots, starts)  # before this step's writes: a hit within one step would find nothing
        if batch.width > 1:
            self._draft(slots[:d], starts[:d], batch.counts[:d])
        if self.limits.snapshot_tokens:
            self._compute_states(batch, slots, starts)
        if d < len(slots) or batch.width > 1:
            slots, starts = self._positions(slots, starts, batch.counts)
            within = starts < self.tokens.limit[slots]  # beyond a request's limit a device writes to the null page
            slots, starts = slots[within], starts[within]
        for t in range(len(self.limits.tables)):
            self._write(batch.seq, t, slots, starts)

    def _write(self, seq: int, t: int, slots: np.ndarray, positions: np.ndarray) -> None:
        content, offset, tags = self.content[t], positions % self.page_size, self.tags[slots, positions]
        page = self.page_tables[t, slots, positions // self.page_size]
        if np.count_nonzero(page) < len(page):
            raise Violation(f"entry {seq}: a row writes to the null page")
        content[page, offset] = tags
        if np.count_nonzero(content[page, offset] == tags) < len(tags):
            raise Violation(f"entry {seq}: two rows write to the same place of a page")

    @staticmethod
    def _positions(slots: np.ndarray, starts: np.ndarray, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The slot and the position of each token of a step's rows."""
        where = [np.arange(a, a + n) for a, n in zip(starts.tolist(), counts.tolist(), strict=True)]
        return slots.repeat(counts), np.concatenate(where)

    def _draft(self, slots: np.ndarray, starts: np.ndarray, counts: np.ndarray) -> None:
        """Gives the positions of drafts their tags, as if each were right."""
        for j in range(1, int(counts.max(initial=0))):
            rows = counts > j
            at = starts[rows] + j
            self._extend(slots[rows], at, self.tokens.drafts(slots[rows], at))

    def _extend(self, slots: np.ndarray, at: np.ndarray, tokens: np.ndarray) -> None:
        self.tags[slots, at] = self.tags[slots, at - 1] + (tokens.astype(np.uint64) + np.uint64(1)) * POWERS[at]

    def _compute_states(self, batch: Batch, slots: np.ndarray, starts: np.ndarray) -> None:
        """Each row's state must be that of the tokens before it; a chunk moves it to its end, a decode row by one token.

        What accepted drafts add is known when the row is sampled.
        """
        before = np.where(starts > 0, self.tags[slots, starts - 1], np.uint64(0))
        if (self.state[slots] != before).any():
            row = int(np.flatnonzero(self.state[slots] != before)[0])
            raise Violation(f"entry {batch.seq}: slot {slots[row]} has not the state of its first {starts[row]} tokens")
        ends = np.where(np.arange(len(slots)) < batch.decodes, starts + 1, starts + batch.counts)
        self.state[slots] = self.tags[slots, ends - 1]

    def _read(self, batch: Batch, slots: np.ndarray, ends: np.ndarray) -> None:
        n = -(-max(ends.tolist()) // self.page_size) * self.page_size
        for t, table in enumerate(self.limits.tables):
            got = self.content[t][self.page_tables[t, slots, : n // self.page_size]].reshape(len(slots), n)
            bad = (got != self.tags[slots, :n]) & (self._columns[:n] < ends[:, None])
            if table.window:
                bad &= self._columns[:n] > (ends - table.window)[:, None]
            if np.count_nonzero(bad):
                row, at = (int(x[0]) for x in np.nonzero(bad))
                page = int(self.page_tables[t, slots[row], at // self.page_size])
                where = f"the row of slot {slots[row]} reads position {at} in page {page} of table {t}"
                raise Violation(f"entry {batch.seq}: {where}, which holds something else")

    def sampled(self, batch: Batch, first: np.ndarray, outcome: Outcome) -> None:
        """The tokens that judged rows have written, from positions `first` on; states follow what was accepted."""
        slots = batch.slots[batch.judged].astype(np.intp)
        accepted = np.minimum(outcome.accepted, self.tokens.limit[slots] - first)
        for j in range(int(accepted.max(initial=0))):
            rows = accepted > j
            self._extend(slots[rows], first[rows] + j, outcome.tokens[rows, j])
        if self.limits.snapshot_tokens:
            further = accepted > 1
            self.state[slots[further]] = self.tags[slots[further], (first + accepted - 2)[further]]
            for slot, snapshot in batch.saves:
                self.snapshots[snapshot] = self.state[slot]
