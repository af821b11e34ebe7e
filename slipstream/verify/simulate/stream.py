"""The device that all ranks of a simulated group share: an operation of its one stream runs when every rank has queued it."""

from collections import deque
from collections.abc import Callable

import numpy as np

from slipstream.device.sim import NO_MASKS, SimTokens
from slipstream.log.batch import Batch, DeviceOp, InitSlot, Outcome
from slipstream.log.caches import Limits
from slipstream.verify.common.memory import Memory
from slipstream.verify.common.toy import VOCAB

Operation = Batch | DeviceOp


class Queued:
    """One operation on the device stream: what the first rank queued, and how many ranks have queued the same."""

    __slots__ = ("what", "columns", "masks", "over", "queued", "sampled")

    def __init__(self, what: "Operation", columns: tuple[object, ...]):
        self.what = what
        self.columns = columns  # to compare other ranks' operations with
        self.masks: dict[int, np.ndarray] | None = None
        self.over: frozenset[int] = frozenset()
        self.queued = self.sampled = 0


class Stream:
    """`differs` is called where ranks queue different operations; `ran` gets each step that has started, with its outcome."""

    def __init__(self, size: int, limits: Limits, differs: Callable[[str], None], ran: Callable[[Batch, Outcome], None]):
        self.size = size
        self.tokens = SimTokens(limits.slots, VOCAB, limits.width - 1)
        self.memory = Memory(limits, self.tokens)
        self.waiting: deque[Queued] = deque()  # what some rank has queued and not all, in order
        self.differs, self.ran = differs, ran
        self._done = 0  # operations that have run
        self._place = [0] * size  # operations that each rank has queued

    def queue(self, rank: int, what: "Operation", columns: tuple[object, ...]) -> None:
        """Every rank's n-th operation must be the first one's; the device waits until all have queued it."""
        n = self._place[rank] - self._done
        self._place[rank] += 1
        if n == len(self.waiting):
            self.waiting.append(Queued(what, columns))
        queued = self.waiting[n]
        if queued.columns != columns:
            return self.differs(f"rank {rank} differs: it queues {words(what)} where another queued {words(queued.what)}")
        queued.queued += 1
        if queued.queued == self.size:
            self._work()

    def sample(self, rank: int, seq: int, masks: dict[int, np.ndarray] | None, over: frozenset[int]) -> None:
        queued = self.waiting[self._place[rank] - 1 - self._done]
        if queued.sampled == 0:
            queued.masks, queued.over = masks, over
        elif (masks or queued.masks) and not same_masks(queued, masks or {}, over):
            return self.differs(f"rank {rank} samples entry {seq} under other masks than another rank")
        queued.sampled += 1
        if queued.sampled == self.size:
            self._work()

    def _work(self) -> None:
        """Carries out what all ranks have queued, in order."""
        waiting = self.waiting
        while waiting and waiting[0].queued == self.size:
            queued = waiting[0]
            what = queued.what
            if not isinstance(what, Batch):
                self.memory.queue(what)
                if isinstance(what, InitSlot):
                    self.tokens.init_slot(what.slot, what.request)
            elif queued.sampled == self.size:
                self.memory.run(what)
                self.ran(what, self._outcome(queued, what))
            else:
                return
            waiting.popleft()
            self._done += 1

    def _outcome(self, queued: Queued, batch: Batch) -> Outcome:
        first = self.tokens.length[batch.slots[batch.judged]]
        outcome = self.tokens.sample(batch, queued.masks or NO_MASKS)
        self.memory.sampled(batch, first, outcome)
        return outcome


def same_masks(queued: Queued, masks: dict[int, np.ndarray], over: frozenset[int]) -> bool:
    own = queued.masks or {}
    return over == queued.over and own.keys() == masks.keys() and all(np.array_equal(own[s], masks[s]) for s in own)


def words(what: Operation) -> str:
    """An operation of the device in a few words."""
    if isinstance(what, Batch):
        rows = zip(what.slots.tolist(), what.starts.tolist(), what.counts.tolist(), strict=True)
        shown = " ".join(f"{slot}:[{start},{start + count})" for slot, start, count in rows)
        return f"entry {what.seq} with rows {shown} and pages {what.pages.tolist()}"
    if isinstance(what, InitSlot):
        return f"request {what.request.id} in slot {what.slot}"
    return repr(what)
