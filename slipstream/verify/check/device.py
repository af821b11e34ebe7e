"""The checker's device: each slot's own count of tokens, and what a row samples there by the case's script.

Every rank has one. What it samples is a function of the operations queued before, so devices of equal ranks are equal.
"""

import numpy as np

from slipstream.log.batch import Batch, Outcome
from slipstream.log.replica import Replica
from slipstream.log.request import Request
from slipstream.verify.check.cases import STOP, Case
from slipstream.verify.common.toy import DEAD_END, choose


class Device:
    """`length`: the device's own count, by slot; the truth where a row's accepted count has not come home."""

    def __init__(self, case: Case, known: list[list[int]]):
        """`known[i]`: the prompt of request i and the answer that it would get alone, continued by the script to its limit."""
        self.case, self.known = case, known
        self.owner: dict[int, int] = {}  # slot -> request
        self.length: dict[int, int] = {}
        self.held: Batch | None = None  # its forward is queued, its sampling is not

    def copy(self) -> "Device":
        other = Device(self.case, self.known)
        other.owner, other.length, other.held = self.owner.copy(), self.length.copy(), self.held
        return other

    def state(self) -> tuple[object, ...]:
        return tuple(self.owner.items()), tuple(self.length.items())

    def init_slot(self, slot: int, request: Request) -> None:
        self.owner[slot], self.length[slot] = request.id, request.prompt_len

    def forget(self, replica: Replica) -> None:
        """Leaves out slots without an owner, so that worlds that differ in them alone are one."""
        self.owner = {slot: self.owner[slot] for slot in sorted(self.owner) if slot in replica.requests}
        self.length = {slot: self.length[slot] for slot in self.owner}

    def starts(self, batch: Batch) -> list[int]:
        """Where rows begin: a decode row computes the latest token that the device knows; a chunk begins where it says."""
        rows = enumerate(zip(batch.slots.tolist(), batch.starts.tolist(), strict=True))
        return [self.length[slot] - 1 if i < batch.decodes else start for i, (slot, start) in rows]

    def draft(self, id: int, position: int) -> int:
        """What the device proposes there. A wrong draft is one that a toy grammar allows, or, at odd places, may forbid."""
        if position >= len(self.known[id]):
            return 0
        token, place = self.known[id][position], position - self.case.requests[id].prompt_len
        return token + (1 if place % 2 else 6) if self.case.is_wrong(id, place) else token

    def text(self, id: int, length: int, end: int) -> tuple[int, ...]:
        """The tokens of positions [0, end), where `length` are known and drafts follow."""
        return (*self.known[id][: min(length, end)], *(self.draft(id, p) for p in range(length, end)))

    def sample(self, masks: dict[int, np.ndarray]) -> Outcome:
        """The outcome of the step whose forward was queued last."""
        batch = self.held
        assert batch is not None
        self.held = None
        judged = batch.judged
        slots, sampled = batch.slots[judged].tolist(), batch.sampled[judged].tolist()
        tokens = np.full((len(slots), max(batch.width, 1)), STOP, np.int32)  # what was not accepted may be anything
        accepted = np.ones(len(slots), np.int32)
        for row, (slot, most) in enumerate(zip(slots, sampled, strict=True)):
            given = self._verify(slot, most, masks.get(slot))
            tokens[row, : len(given)], accepted[row] = given, len(given)
            self.length[slot] = min(self.length[slot] + len(given), len(self.known[self.owner[slot]]))
        errors = {row: DEAD_END for row in np.flatnonzero(tokens[:, 0] < 0).tolist()}
        return Outcome(batch.seq, tokens, accepted, errors=errors, drafts=self._sent_home(slots))

    def _verify(self, slot: int, most: int, masks: np.ndarray | None) -> list[int]:
        """What one row gives: drafts as long as they are right, then one token; none after the request's limit."""
        id, first = self.owner[slot], self.length[slot]
        given: list[int] = []
        for place in range(most):
            drawn = self.case.drawn(id, first + place)
            token = drawn if masks is None else choose(drawn, masks[place])
            if given and token < 0:
                break  # the next row begins at the dead end
            given.append(token)
            if token != self.draft(id, first + place) or first + place + 1 >= len(self.known[id]):
                break
        return given

    def _sent_home(self, slots: list[int]) -> dict[int, tuple[int, ...]]:
        """Drafts of slots with a grammar, for their next rows."""
        ahead = range(self.case.limits.width - 1)
        bound = [s for s in slots if ahead and self.case.requests[self.owner[s]].grammar]
        return {s: tuple(self.draft(self.owner[s], self.length[s] + k) for k in ahead) for s in bound}
