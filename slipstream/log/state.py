"""The state of a replica: columns by slot, the cache, orders and the running digest, without the rules that change them.

No I/O, no clock, no iteration over sets. Two states after the same log are equal.

Tokens of a slot:
    [0, computed)          their cache entries are computed or queued
    [0, committed)         their ids are settled
    [0, sure)              the least that the device knows when every queued row has run: each row gives at least one token
    [0, bound)             the most that it can know then: each row gives as many tokens as its width
A prompt is known as a whole, so committed, sure and bound are its length until its last chunk is queued. From then on
computed is bound - 1. Where every row gives one token, sure and bound are one column.
"""

from collections import deque
from hashlib import blake2b
from typing import NamedTuple, Self

import numpy as np

from slipstream.log.batch import DeviceOp
from slipstream.log.caches import Limits
from slipstream.log.grammar import Matcher
from slipstream.log.request import Request
from slipstream.log.tables import I32, Cache

_COPIED = {np.ndarray, list, dict, deque, Cache}  # types of fields that a copy must not share

FREE, RUNNING, PREEMPTED, ENDED = 0, 1, 2, 3  # states of a slot


class InFlightStep(NamedTuple):
    """A launched step that is not settled yet: its judged rows."""

    seq: int
    slots: np.ndarray  # intp [judged rows]
    epochs: np.ndarray  # int32 [judged rows]
    sampled: np.ndarray  # int32 [judged rows]: the most tokens that each can give
    scored: tuple[tuple[int, int], ...]  # (slot, request id) of chunks that return prompt log probabilities


class Body(NamedTuple):
    """A request that came ahead of its Admit, with the content keys of its prompt's pages if they are hashed."""

    request: Request
    keys: list[bytes] | None


class Offloaded(NamedTuple):
    """The pages that a preemption copied to the host: for each table, columns [first, first + len(host))."""

    tokens: int  # computed or queued at that time
    tables: tuple[tuple[int, tuple[int, ...]], ...]  # (first column, host pages)


class Ended(NamedTuple):
    """A request that a settle ended; its slot waits for the drop."""

    slot: int
    id: int
    reason: str
    error: str = ""


class ReplicaState:
    """All that a rank knows of its group's requests. `Replica` and `settle` have the rules that change it."""

    def __init__(self, limits: Limits):
        self.limits = limits
        slots = limits.slots
        self.cache = Cache(limits)
        self.free_slots = list(range(slots - 1, -1, -1))  # popped from the end
        self.bodies: dict[int, Body] = {}  # by request id; requests that came ahead of their Admit
        self.prepared: dict[int, Matcher] = {}  # their grammars, by request id
        self.requests: dict[int, Request] = {}  # slot -> request
        self.keys: dict[int, list[bytes]] = {}  # slot -> content keys of its full pages so far
        self.phase = np.zeros(slots, np.int8)
        self.epoch = np.zeros(slots, np.int32)  # grows when the slot is handed out and when it is freed
        self.ids = np.full(slots, -1, np.int64)
        self.computed = np.zeros(slots, np.int32)
        self.committed = np.zeros(slots, np.int32)
        self.bound = np.zeros(slots, np.int32)
        self.sure = self.bound if limits.width == 1 else np.zeros(slots, np.int32)
        self.limit = np.zeros(slots, np.int32)
        self.held = np.zeros(slots, np.int32)  # columns [0, held) of its page tables have been given pages
        self.last_row = np.full(slots, -1, np.int64)  # the entry of the slot's latest row
        self.tokens = np.zeros((slots, limits.max_len), I32)
        # slots with one row per step, in order of joining; the array is replaced, never changed; numpy indexes fastest by intp
        self.decoding = np.zeros(0, np.intp)
        self._packed = (self.decoding, np.zeros(0, np.int32))  # `decoding` and the same as int32
        self.prefilling: list[int] = []  # slots whose prompt is not queued whole, in order of joining
        self.ended: list[Ended] = []  # in order of ending, not dropped yet
        self.flights: deque[InFlightStep] = deque()
        self.settled_to = -1  # entries through this one are settled
        self.fresh_pages: list[tuple[int, int, int, int]] = []  # (table, slot, column, page) not yet in a batch
        self.offloaded: dict[int, Offloaded] = {}  # by slot
        self.unpublished: dict[int, list[tuple[int, int]]] = {}  # slot -> (column, snapshot) of tokens not yet committed
        self.drafts: dict[int, tuple[int, ...]] = {}  # slot with a grammar -> the drafts that its next row verifies
        self.ops: list[DeviceOp] = []  # device operations of commands, in order, not yet taken
        self.stop_ids: dict[int, int] = {}  # stop token -> how many slots name it
        self.matchers: dict[int, Matcher] = {}  # slot -> its grammar's state
        self.digest = bytes(8)
        self._widths = np.ones((limits.width + 1, slots), np.int32)  # row w: the columns `counts` and `sampled` of decode rows
        self._widths *= np.arange(limits.width + 1, dtype=np.int32)[:, None]
        self.changes: list[bytes] = []  # the bytes that this entry adds to the digest

    def pending(self, slot: int) -> bool:
        """Whether a token of the slot is in flight."""
        return bool(self.bound[slot] > self.committed[slot])

    def publish(self, slot: int, columns: range) -> None:
        """Makes the pages of full columns findable, in every table where the slot still holds them."""
        keys, held = self.keys[slot], int(self.held[slot])
        for table in self.cache.tables:
            first = int(table.first[slot]) if table.window else 0
            for column in columns:
                if not first <= column < held:
                    continue
                page = int(table.rows[slot, column])
                if page not in table.pages.keys:
                    table.pages.publish(page, keys[column])

    def leave(self, slot: int) -> None:
        """Takes the slot out of the sets that rows come from."""
        if slot in self.prefilling:
            self.prefilling.remove(slot)
        elif slot in self.decoding:
            self.decoding = self.decoding[self.decoding != slot]

    def seal(self) -> int:
        """Ends an entry: adds its changes to the running digest and returns the digest as an unsigned 64-bit integer."""
        free = b"%d,%d" % (self.cache.available, len(self.decoding))
        self.digest = blake2b(b"".join((self.digest, *self.changes, free)), digest_size=8).digest()
        self.changes.clear()
        return int.from_bytes(self.digest, "little")

    def copy(self) -> Self:
        other = type(self).__new__(type(self))
        for name, value in self.__dict__.items():
            other.__dict__[name] = value.copy() if type(value) in _COPIED else value
        if self.sure is self.bound:
            other.sure = other.bound
        other.keys = {slot: keys.copy() for slot, keys in self.keys.items()}
        other.unpublished = {slot: saved.copy() for slot, saved in self.unpublished.items()}
        other.matchers = {slot: matcher.copy() for slot, matcher in self.matchers.items()}
        other.prepared = {id: matcher.copy() for id, matcher in self.prepared.items()}
        return other

    def state(self) -> tuple[object, ...]:
        """A hashable value that equal states share. Messages ahead of an entry and contents of freed slots are left out."""
        live: list[tuple[object, ...]] = []
        for s in sorted(self.requests):
            columns = (self.computed, self.committed, self.sure, self.bound, self.held, self.last_row)
            known = self.tokens[s, : self.committed[s]].tobytes()
            rows = tuple(t.rows[s, t.first[s] : self.held[s]].tobytes() for t in self.cache.tables)
            live.append((s, self.requests[s].id, int(self.phase[s]), *(int(c[s]) for c in columns), known, rows))
        return (
            tuple(live),
            self.epoch.tobytes(),
            self.decoding.tobytes(),
            self.cache.state(),
            tuple(len(keys) for keys in self.keys.values()),
            tuple(self.prefilling),
            tuple(self.ended),
            tuple((f.seq, f.slots.tobytes(), f.epochs.tobytes(), f.sampled.tobytes()) for f in self.flights),
            tuple(self.fresh_pages),
            tuple(self.free_slots),
            tuple(self.offloaded.items()),
            tuple((slot, tuple(saved)) for slot, saved in self.unpublished.items()),
            tuple(self.drafts.items()),
            self.settled_to,
        )
