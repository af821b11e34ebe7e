"""The checking device: what pages and tables hold, as tags in place of keys and values.

The tag of a position is a function of the request's salt and of all its tokens up to there, as its keys and values would be.
Each row must find, at every position it reads, the tag of its own tokens; a page that was handed out too early, shared wrongly,
hit before it was computed or written by two rows holds another one.
"""

import numpy as np

from slipstream.log.batch import Batch
from slipstream.log.request import Request
from slipstream.log.state import Limits

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
    """Pages [pages + 1, block] and tables by slot, of one rank or of all ranks that launch the same steps."""

    def __init__(self, limits: Limits):
        self.page_size = limits.page_size
        width = -(-limits.max_len // limits.page_size)
        self.content = np.zeros((limits.pages + 1, limits.page_size), np.uint64)
        self.host = np.zeros((limits.host_pages, limits.page_size), np.uint64)
        self.page_table = np.zeros((limits.slots, width), np.int32)
        self.tags = np.zeros((limits.slots, width * limits.page_size), np.uint64)
        self._columns = np.arange(width * limits.page_size)

    def seat(self, slot: int, request: Request) -> None:
        tags = tags_of(request)
        self.tags[slot, : len(tags)] = tags

    def run(self, batch: Batch) -> None:
        """Carries out one step in stream order. Raises Violation where a row reads what its own tokens did not write."""
        pages = batch.pages
        if len(pages):
            self.page_table[pages[:, 0], pages[:, 1]] = pages[:, 2]
        slots, starts = batch.slots.astype(np.intp), batch.starts.astype(np.intp)
        self._read(batch, slots, starts)  # before this step's writes: a hit within one step would find nothing
        d = batch.decodes
        if d < len(slots):
            slots, starts = self._positions(slots, starts, batch.counts, d)
        page, offset, tags = self.page_table[slots, starts // self.page_size], starts % self.page_size, self.tags[slots, starts]
        if np.count_nonzero(page) < len(page):
            raise Violation(f"entry {batch.seq}: a row writes to the null page")
        self.content[page, offset] = tags
        if np.count_nonzero(self.content[page, offset] == tags) < len(tags):
            raise Violation(f"entry {batch.seq}: two rows write to the same place of a page")

    @staticmethod
    def _positions(slots: np.ndarray, starts: np.ndarray, counts: np.ndarray, decodes: int) -> tuple[np.ndarray, np.ndarray]:
        """The slot and the position of each token of a step's rows."""
        where = [starts[:decodes]]
        where += [np.arange(a, a + n) for a, n in zip(starts[decodes:].tolist(), counts[decodes:].tolist(), strict=True)]
        return slots.repeat(counts), np.concatenate(where)

    def offload(self, pages: tuple[int, ...], host: tuple[int, ...]) -> None:
        self.host[list(host)] = self.content[list(pages)]

    def restore(self, host: tuple[int, ...], pages: tuple[int, ...]) -> None:
        self.content[list(pages)] = self.host[list(host)]

    def _read(self, batch: Batch, slots: np.ndarray, ends: np.ndarray) -> None:
        width = -(-max(ends.tolist()) // self.page_size)
        n = width * self.page_size
        got = self.content[self.page_table[slots, :width]].reshape(len(slots), n)
        bad = (got != self.tags[slots, :n]) & (self._columns[:n] < ends[:, None])
        if np.count_nonzero(bad):
            row, at = (int(x[0]) for x in np.nonzero(bad))
            page = int(self.page_table[slots[row], at // self.page_size])
            where = f"the row of slot {slots[row]} reads position {at} in page {page}"
            raise Violation(f"entry {batch.seq}: {where}, which holds something else")

    def sampled(self, slots: np.ndarray, ends: np.ndarray, tokens: np.ndarray) -> None:
        """The tokens that rows have written at positions `ends` of their slots' token tables."""
        self.tags[slots, ends] = self.tags[slots, ends - 1] + (tokens.astype(np.uint64) + np.uint64(1)) * POWERS[ends]
