"""Requests that wait for a slot. Only the leader has them; the replica does not.

A request of priority p that arrives at second t stands at t + PRIORITY_LEVEL_S * p; the smallest value goes first. Within a
priority, the first request is served first. No request waits for ever behind later, more urgent ones.
"""

import heapq
import itertools
from collections import deque
from dataclasses import dataclass, field, replace

from slipstream.log.request import Request

PRIORITY_LEVEL_S = 10.0  # waiting time that outweighs one level of priority

Item = tuple[tuple[float, ...], int]  # (order, or priority and order, request id)


@dataclass(eq=False)
class Waiting:
    """One waiting request."""

    request: Request
    arrival: tuple[float, int]
    short: bool  # whether it may pass long prompts
    keys: list[bytes] | None = None  # content keys of its prompt's pages, once the planner has looked at it
    passed: int = 0  # how often a later request was admitted before it
    # (request that computes a common prefix, key of the prefix's last page, own tokens to compute)
    awaits: tuple[int, bytes, int] | None = None


@dataclass
class Queue:
    """A priority queue with removal by id. One heap has all requests by order; one has short prompts by priority, then order.

    The work of a step is O(log n). A request that is removed, or is no longer short, leaves its item in the heap. The item
    goes when it reaches the head, or in a sweep when such items outnumber the waiting requests. The leader enforces `limit`,
    because it also counts the requests whose grammar is being compiled.
    """

    limit: int
    _heaps: tuple[list[Item], list[Item]] = field(default_factory=lambda: ([], []))  # all requests; short prompts
    _by_id: dict[int, Waiting] = field(default_factory=dict[int, Waiting])
    _long: deque[int] = field(default_factory=deque[int])  # ids of long prompts, in the order of their next check
    unchecked: int = 0  # how many of them were not checked since `recheck_all`
    _ticket: "itertools.count[int]" = field(default_factory=lambda: itertools.count())

    def __len__(self) -> int:
        return len(self._by_id)

    def push(self, request: Request, now: float, short: bool = False) -> Waiting:
        waiting = Waiting(request, (now + PRIORITY_LEVEL_S * request.priority, next(self._ticket)), short)
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
        """Removes a request, wherever it stands; returns None if it is not waiting."""
        waiting = self._by_id.pop(id, None)
        most = 2 * len(self._by_id) + 64
        for short, heap in enumerate(self._heaps):
            if len(heap) > most:
                heap[:] = [item for item in heap if self._is_here(item, bool(short))]
                heapq.heapify(heap)
        if len(self._long) > most:
            self._long = deque(dict.fromkeys(id for id in self._long if id in self._by_id))
        return waiting

    def recheck_all(self) -> None:
        """Marks every long prompt to be checked again: it may have become short."""
        self.unchecked = len(self._long)

    def next_long(self) -> Waiting | None:
        """The next long prompt to check, in a cycle over all of them; None where no prompt is long."""
        while self._long:
            waiting = self._by_id.get(self._long.popleft())
            self.unchecked = max(0, self.unchecked - 1)
            if waiting is not None and not waiting.short:
                self._long.append(waiting.request.id)
                return waiting
        self.unchecked = 0
        return None

    def set_short(self, waiting: Waiting, short: bool) -> None:
        """Moves a waiting request to the short prompts or away from them."""
        if waiting.short != short:
            waiting.short = short
            self._add(waiting)

    def first(self, count: int, short: bool = False) -> list[Waiting]:
        """The first `count` waiting requests in order; with `short`, the first short prompts, the most urgent first."""
        heap = self._heaps[short]
        taken: list[Item] = []
        while heap and len(taken) < count:
            item = heapq.heappop(heap)
            # a request that became long and then short again is there twice
            if self._is_here(item, short) and (not taken or taken[-1] != item):
                taken.append(item)
        for item in taken:
            heapq.heappush(heap, item)
        return [self._by_id[id] for _, id in taken]

    def all(self) -> list[Waiting]:
        """All waiting requests in order; this costs a sort."""
        return sorted(self._by_id.values(), key=lambda w: w.arrival)

    def state(self) -> tuple[object, ...]:
        """A hashable value. Queues with equal values behave alike; clocks and cached keys are left out."""
        return tuple((w.request.id, w.short, w.passed, w.awaits) for w in self.all()), tuple(self._long), self.unchecked

    def copy(self) -> "Queue":
        other = Queue(
            self.limit, (self._heaps[0].copy(), self._heaps[1].copy()), {}, self._long.copy(), self.unchecked, self._ticket
        )
        other._by_id = {id: replace(w) for id, w in self._by_id.items()}
        return other
