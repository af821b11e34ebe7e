"""Requests that wait for a slot. The leader's alone; no part of the replica.

Order: a request of priority p that arrives at second t goes before all whose t + AGEING * p is larger, so within a priority
the first come is the first served, and nothing waits for ever behind later, more urgent work.
"""

import heapq
import itertools
from collections import deque
from dataclasses import dataclass, field, replace

from slipstream.log.request import Request

AGEING = 10.0  # seconds of waiting that outweigh one level of priority

Item = tuple[tuple[float, ...], int]  # (order, or priority and order, request id)


@dataclass(eq=False)
class Waiting:
    """One waiting request."""

    request: Request
    arrival: tuple[float, int]
    short: bool  # whether it may pass long prompts
    keys: list[bytes] | None = None  # content keys of its prompt's pages, once the planner has looked at it
    passed: int = 0  # how often a later one was admitted before it
    awaits: tuple[int, bytes, int] | None = None  # (who computes a common beginning, key of its last page, own tokens to go)


@dataclass
class Queue:
    """A priority queue with removal by id, in two heaps: all by their order; short ones by priority, then order.

    What a step does with it is O(log n): who is removed or no longer short leaves an item behind, which goes when it comes to
    the head, or in a sweep when there are more of these than of those that wait. `limit` is kept by the leader, which also
    counts those whose grammar is being compiled.
    """

    limit: int
    _heaps: tuple[list[Item], list[Item]] = field(default_factory=lambda: ([], []))  # of all; of short ones
    _by_id: dict[int, Waiting] = field(default_factory=dict[int, Waiting])
    _long: deque[int] = field(default_factory=deque[int])  # ids; the next to be asked whether it is short stands first
    unasked: int = 0  # how many of these were not asked since `ask_all`
    _ticket: "itertools.count[int]" = field(default_factory=lambda: itertools.count())

    def __len__(self) -> int:
        return len(self._by_id)

    def push(self, request: Request, now: float, short: bool = False) -> Waiting:
        waiting = Waiting(request, (now + AGEING * request.priority, next(self._ticket)), short)
        self._by_id[request.id] = waiting
        heapq.heappush(self._heaps[0], (waiting.arrival, request.id))
        self._add(waiting)
        return waiting

    def _add(self, waiting: Waiting) -> None:
        if waiting.short:
            heapq.heappush(self._heaps[1], (self._key(waiting, True), waiting.request.id))
        else:
            self._long.append(waiting.request.id)

    @staticmethod
    def _key(waiting: Waiting, short: bool) -> tuple[float, ...]:
        return (waiting.request.priority, *waiting.arrival) if short else waiting.arrival

    def _is_here(self, item: Item, short: bool) -> bool:
        waiting = self._by_id.get(item[1])
        return waiting is not None and self._key(waiting, short) == item[0] and (waiting.short or not short)

    def remove(self, id: int) -> Waiting | None:
        """Takes a request out wherever it stands; None if it is not waiting."""
        waiting = self._by_id.pop(id, None)
        most = 2 * len(self._by_id) + 64
        for short, heap in enumerate(self._heaps):
            if len(heap) > most:
                heap[:] = [item for item in heap if self._is_here(item, bool(short))]
                heapq.heapify(heap)
        if len(self._long) > most:
            self._long = deque(dict.fromkeys(id for id in self._long if id in self._by_id))
        return waiting

    def ask_all(self) -> None:
        """From now on every long prompt is to be asked again whether it is short."""
        self.unasked = len(self._long)

    def next_long(self) -> Waiting | None:
        """A long prompt; all are given out in turn, again and again. None: there is none."""
        while self._long:
            waiting = self._by_id.get(self._long.popleft())
            self.unasked = max(0, self.unasked - 1)
            if waiting is not None and not waiting.short:
                self._long.append(waiting.request.id)
                return waiting
        self.unasked = 0
        return None

    def set_short(self, waiting: Waiting, short: bool) -> None:
        """Moves a waiting request to where short prompts stand, or away from there."""
        if waiting.short != short:
            waiting.short = short
            self._add(waiting)

    def first(self, count: int, short: bool = False) -> list[Waiting]:
        """The first `count` waiting requests, in order; with `short`, of the short ones, the most urgent first."""
        heap = self._heaps[short]
        taken: list[Item] = []
        while heap and len(taken) < count:
            item = heapq.heappop(heap)
            if self._is_here(item, short) and (not taken or taken[-1] != item):  # who moved there and back stands there twice
                taken.append(item)
        for item in taken:
            heapq.heappush(heap, item)
        return [self._by_id[id] for _, id in taken]

    def all(self) -> list[Waiting]:
        """Everyone, in order; it costs a sort."""
        return sorted(self._by_id.values(), key=lambda w: w.arrival)

    def state(self) -> tuple[object, ...]:
        """A hashable value. Two queues that have it are looked at alike, clocks and what is hashed apart."""
        return tuple((w.request.id, w.short, w.passed, w.awaits) for w in self.all()), tuple(self._long), self.unasked

    def copy(self) -> "Queue":
        other = Queue(
            self.limit, (self._heaps[0].copy(), self._heaps[1].copy()), {}, self._long.copy(), self.unasked, self._ticket
        )
        other._by_id = {id: replace(w) for id, w in self._by_id.items()}
        return other
