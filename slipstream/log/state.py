"""What a replica holds: columns by slot, pages, orders and the running digest, without the rules that change them.

No I/O, no clock, no iteration over sets; two states that went through the same log are equal.

Tokens of a slot:
    [0, launched)          their keys and values are computed or queued
    [launched, target)     known, or in flight, and not yet queued
    [0, committed)         their ids are settled
A row that reaches `target` samples the token at position `target`, which then moves up by one.
"""

from collections import deque
from hashlib import blake2b
from typing import NamedTuple, Self

import numpy as np

from slipstream.log.batch import DeviceOp
from slipstream.log.grammar import Matcher
from slipstream.log.pages import Pages
from slipstream.log.request import Request

I32 = np.dtype("<i4")
_COPIED = {np.ndarray, list, dict, deque, Pages}  # types of fields that a copy must not share

FREE, RUNNING, PREEMPTED, ENDED = 0, 1, 2, 3  # states of a slot


class Limits(NamedTuple):
    """What a group agreed to hold: the minimum over its ranks."""

    pages: int
    slots: int
    max_len: int  # tokens of one request, prompt and answer
    page_size: int = 16  # tokens of a page
    caching: bool = True  # whether pages can be found again by content
    host_pages: int = 0  # pages in host memory for requests that are preempted, numbered from 0


class InFlightStep(NamedTuple):
    """A launched step that is not settled yet: its sampling rows."""

    seq: int
    slots: np.ndarray  # intp [sampling rows]
    epochs: np.ndarray  # int32 [sampling rows]
    scored: tuple[tuple[int, int], ...]  # (slot, request id) of chunks that return prompt log probabilities


class Ended(NamedTuple):
    """A request that a settle ended; its slot waits for the drop."""

    slot: int
    id: int
    reason: str
    error: str = ""


class ReplicaState:
    """All that a rank knows of its group's requests. The rules that change it are `Replica`'s and `settle`'s."""

    def __init__(self, limits: Limits):
        self.limits = limits
        slots = limits.slots
        self.width = -(-limits.max_len // limits.page_size)  # columns of a block table
        self.pages = Pages(limits.pages)
        self.free_slots = list(range(slots - 1, -1, -1))  # popped from the end
        self.requests: dict[int, Request] = {}  # slot -> request
        self.keys: dict[int, list[bytes]] = {}  # slot -> content keys of its full pages so far
        self.phase = np.zeros(slots, np.int8)
        self.epoch = np.zeros(slots, np.int32)  # grows when the slot is handed out and when it is freed
        self.ids = np.full(slots, -1, np.int64)
        self.launched = np.zeros(slots, np.int32)
        self.target = np.zeros(slots, np.int32)
        self.committed = np.zeros(slots, np.int32)
        self.limit = np.zeros(slots, np.int32)
        self.held = np.zeros(slots, np.int32)  # pages in the block table
        self.last_row = np.full(slots, -1, np.int64)  # the entry of the slot's latest row
        self.tokens = np.zeros((slots, limits.max_len), I32)
        self.page_table = np.zeros((slots, self.width), I32)
        # slots with one row per step, in order of joining; replaced, never changed; intp, with which numpy indexes fastest
        self.decoding = np.zeros(0, np.intp)
        self._packed = (self.decoding, np.zeros(0, np.int32))  # `decoding` and the same as int32
        self.prefilling: list[int] = []  # slots with launched < target, in order of joining
        self.ended: list[Ended] = []  # in order of ending, not dropped yet
        self.flights: deque[InFlightStep] = deque()
        self.settled_to = -1  # entries through this one are settled
        self.fresh_pages: list[tuple[int, int, int]] = []  # (slot, column, page) not yet in a batch
        self.free_host = list(range(limits.host_pages - 1, -1, -1))  # popped from the end
        self.offloaded: dict[int, tuple[int, tuple[int, ...]]] = {}  # slot -> (tokens, host pages)
        self.calls: list[DeviceOp] = []  # asked of the device by commands, in order, not yet taken
        self.stop_ids: dict[int, int] = {}  # stop token -> how many slots name it
        self.matchers: dict[int, Matcher] = {}  # slot -> its grammar's state
        self.digest = bytes(8)
        self._ones, self._trues = np.ones(slots, np.int32), np.ones(slots, np.bool_)  # columns of decode rows
        self.changes: list[bytes] = []  # what this entry adds to the digest

    def pending(self, slot: int) -> bool:
        """Whether a token of the slot is in flight."""
        return bool(self.target[slot] > self.committed[slot])

    def leave(self, slot: int) -> None:
        """Takes the slot out of the sets that rows come from."""
        if slot in self.prefilling:
            self.prefilling.remove(slot)
        elif slot in self.decoding:
            self.decoding = self.decoding[self.decoding != slot]

    def seal(self) -> int:
        """Ends an entry: folds what it changed into the running digest and returns that as an unsigned 64-bit integer."""
        free = b"%d,%d" % (self.pages.available, len(self.decoding))
        self.digest = blake2b(b"".join((self.digest, *self.changes, free)), digest_size=8).digest()
        self.changes.clear()
        return int.from_bytes(self.digest, "little")

    def copy(self) -> Self:
        other = type(self).__new__(type(self))
        for name, value in self.__dict__.items():
            other.__dict__[name] = value.copy() if type(value) in _COPIED else value
        other.keys = {slot: keys.copy() for slot, keys in self.keys.items()}
        other.matchers = {slot: matcher.copy() for slot, matcher in self.matchers.items()}
        return other

    def state(self) -> tuple[object, ...]:
        """A hashable value that two equal states share. What the columns still hold of freed slots is left out."""
        live: list[tuple[object, ...]] = []
        for s in sorted(self.requests):
            numbers = (self.launched, self.target, self.committed, self.held, self.last_row)
            known = self.tokens[s, : self.committed[s]].tobytes()
            table = self.page_table[s, : self.held[s]].tobytes()
            live.append((s, self.requests[s].id, int(self.phase[s]), *(int(c[s]) for c in numbers), known, table))
        return (
            tuple(live),
            self.epoch.tobytes(),
            self.decoding.tobytes(),
            self.pages.state(),
            tuple(len(keys) for keys in self.keys.values()),
            tuple(self.prefilling),
            tuple(self.ended),
            tuple((f.seq, f.slots.tobytes(), f.epochs.tobytes()) for f in self.flights),
            tuple(self.fresh_pages),
            tuple(self.free_slots),
            tuple(self.free_host),
            tuple(self.offloaded.items()),
            self.settled_to,
        )
