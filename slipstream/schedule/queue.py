"""Requests that wait for a slot. The leader's alone; no part of the replica.

Order: a request of priority p that arrives at second t goes before all whose t + AGEING * p is larger, so within a priority
the first come is the first served, and nothing waits for ever behind later, more urgent work.
"""

import heapq
import itertools
from dataclasses import dataclass, field, replace

from slipstream.log.request import Request

AGEING = 10.0  # seconds of waiting that outweigh one level of priority
SHORT = 1024  # tokens of a prompt that need not wait for long ones to be computed


@dataclass
class Waiting:
    """One waiting request."""

    request: Request
    order: tuple[float, int]
    keys: list[bytes] | None = None  # content keys of its prompt's pages, once the planner has looked at it
    passed: int = 0  # how often a later one was admitted before it
    awaits: tuple[int, bytes] | None = None  # (request that computes a common beginning, key of its last page)


@dataclass
class Queue:
    """A priority queue with removal by id. What a step does with it is O(log n): who is removed leaves the heap at its head.

    `limit` is kept by the leader, which also counts those whose grammar is being compiled.
    """

    limit: int
    short: int = SHORT
    _heap: list[tuple[tuple[float, int], int]] = field(default_factory=list[tuple[tuple[float, int], int]])
    _short: list[tuple[tuple[float, int], int]] = field(default_factory=list[tuple[tuple[float, int], int]])
    _by_id: dict[int, Waiting] = field(default_factory=dict[int, Waiting])
    _ticket: "itertools.count[int]" = field(default_factory=lambda: itertools.count())

    def __len__(self) -> int:
        return len(self._by_id)

    def push(self, request: Request, now: float) -> Waiting:
        waiting = Waiting(request, (now + AGEING * request.priority, next(self._ticket)))
        self._by_id[request.id] = waiting
        heapq.heappush(self._heap, (waiting.order, request.id))
        if request.prompt_len <= self.short:
            heapq.heappush(self._short, (waiting.order, request.id))
            if len(self._short) > 2 * len(self._by_id) + 64:  # it is seldom looked at, so those that have left are still there
                self._short = sorted(item for item in self._short if self._waits(item))
        return waiting

    def _waits(self, item: tuple[tuple[float, int], int]) -> bool:
        waiting = self._by_id.get(item[1])
        return waiting is not None and waiting.order == item[0]

    def remove(self, id: int) -> Waiting | None:
        """Takes a request out wherever it stands; None if it is not waiting."""
        return self._by_id.pop(id, None)

    def first(self, count: int, short: bool = False) -> list[Waiting]:
        """The first `count` waiting requests, in order; with `short`, of those whose prompts are."""
        heap = self._short if short else self._heap
        taken: list[tuple[tuple[float, int], int]] = []
        while heap and len(taken) < count:
            item = heapq.heappop(heap)
            if self._waits(item):
                taken.append(item)
        for item in taken:
            heapq.heappush(heap, item)
        return [self._by_id[id] for _, id in taken]

    def all(self) -> list[Waiting]:
        """Everyone, in order; for the checker, it costs a sort."""
        return sorted(self._by_id.values(), key=lambda w: w.order)

    def copy(self) -> "Queue":
        other = Queue(self.limit, self.short, self._heap.copy(), self._short.copy(), {}, self._ticket)
        other._by_id = {id: replace(w) for id, w in self._by_id.items()}
        return other
