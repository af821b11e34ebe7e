"""The slot tables of the CPU device: loop-carried data of requests, indexed by slot, written and read by queued work only."""

import numpy as np

from slipstream.log.caches import Limits
from slipstream.log.request import Request, SamplingParams

_NOBODY = SamplingParams(temperature=0.0)


class SlotTables:
    """Tokens and pages of every slot. Only the device's thread may touch it after `start`."""

    def __init__(self, limits: Limits):
        slots = limits.slots
        self.tokens = np.zeros((slots, limits.max_len + 1), np.int32)
        self.pages = np.zeros((len(limits.tables), slots, limits.columns + 1), np.int32)  # 0: the null page
        self.sampling = [_NOBODY] * slots
        self.prompt_len = np.zeros(slots, np.int64)
        self.greedy = np.zeros(slots, bool)  # needs no more than its best raw logit

    def init_slot(self, slot: int, request: Request) -> None:
        """Forgets the slot's last owner and writes the new one's prompt and parameters."""
        self.pages[:, slot] = 0
        self.tokens[slot] = 0
        self.tokens[slot, : request.prompt_len] = np.frombuffer(request.prompt, "<i4")
        self.prompt_len[slot] = request.prompt_len
        self.sampling[slot] = request.sampling
        self.greedy[slot] = request.sampling.plain and request.sampling.temperature == 0.0

    def write_pages(self, places: np.ndarray) -> None:
        """int32 [n, 4]: (table, slot, column, page)."""
        if len(places):
            self.pages[places[:, 0], places[:, 1], places[:, 2]] = places[:, 3]

    def ids(self, slots: np.ndarray, starts: np.ndarray, counts: np.ndarray) -> np.ndarray:
        """int32 [sum of counts]: the rows' tokens, one row after another."""
        of_row = np.repeat(np.arange(len(slots)), counts)
        firsts = np.cumsum(counts) - counts
        return self.tokens[slots[of_row], np.arange(len(of_row)) - firsts[of_row] + starts[of_row]]
