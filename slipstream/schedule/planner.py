"""The planner: which requests join, which rows run, who yields its pages. The leader's alone.

Order of a plan: drop what has ended or gone, return preempted requests, admit waiting ones, make room for the decoding rows,
cut chunks of prompts into what is left of the budget. It changes the leader's replica through the replica's own methods and
records each call as a command, so that followers do the same.
"""

from dataclasses import dataclass, field

import numpy as np

from slipstream.log.entries import LATE_SAMPLE, NO_OVERLAP, OVERLAP, Admit, Command, Drop, Preempt, Step
from slipstream.log.grammar import Matcher
from slipstream.log.replica import Replica
from slipstream.log.request import Request
from slipstream.log.state import ENDED, PREEMPTED, Ended
from slipstream.schedule.budget import Budget
from slipstream.schedule.queue import AGEING, Queue, Waiting

LOOKAHEAD = 8  # waiting requests that are looked at, the head included, for one that fits
BYPASSES = 64  # how often a head may be passed before everybody waits for it
PREFILLING = 8  # long prompts under way at which only short ones join, up to twice as many, unless a step has room for all


@dataclass
class Plan:
    """What an entry will hold, already applied to the leader's replica but for the step."""

    commands: list[Command] = field(default_factory=list[Command])
    admitted: list[Request] = field(default_factory=list[Request])  # for the first time
    started: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])  # (request id, cached tokens)
    dropped: list[Ended] = field(default_factory=list[Ended])  # one per Drop, in order
    step: Step | None = None


@dataclass
class Counters:
    """Since the start; the first two in tokens of prompts that joined."""

    prefix_queries: int = 0
    prefix_hits: int = 0
    preemptions: int = 0


class Planner:
    def __init__(self, replica: Replica, budget: Budget, max_queue: int, copy_seconds: float = 0.0):
        """`copy_seconds`: how long one page takes to the host and back, measured at start."""
        self.replica = replica
        self.budget = budget
        self.queue = Queue(max_queue)
        self.copy_seconds = copy_seconds
        self.compiled: dict[int, Matcher] = {}  # the leader's: matchers of waiting requests that have a grammar, by request id
        self.counters = Counters()
        self.gone: dict[int, int] = {}  # request id -> kept tokens, of clients that left
        self.slot_of: dict[int, int] = {}  # request id -> slot
        self.order: dict[int, tuple[float, int]] = {}  # slot -> place in the queue it came from
        self.preempted: list[int] = []  # slots, in the order they return
        self._context = 0.0  # tokens before a prompt token of the last step, on the average
        self._first = -1  # the request whose prompt was cut first the last time
        self._full_at: tuple[int, int] | None = None  # (available pages, free slots) when nothing could be admitted

    # --- what comes in

    def submit(self, request: Request, now: float) -> None:
        self.queue.push(request, now)
        self._full_at = None

    def abort(self, id: int, kept: int) -> bool:
        """Marks a request as gone. True when it was only waiting: then nothing of it is in the log."""
        if self.queue.remove(id) is not None:
            return True
        if id in self.slot_of:
            self.gone[id] = kept
        return False

    # --- the plan

    def plan(self, depth: int) -> Plan:
        """The next entry. `depth`: steps in flight that are not settled."""
        plan = Plan()
        self._drop(plan)
        decoding = self._decode_rows()
        self._return_preempted(plan)
        before = len(plan.commands)
        room, rows = self._share(decoding)
        self._admit(plan, room)
        decoding = self._make_room(plan, decoding)
        if len(plan.commands) > before:
            _, rows = self._share(decoding)
        if len(decoding) or rows:
            plan.step = self._step(decoding, rows, depth)
        return plan

    def _droppable(self, slot: int) -> bool:
        return int(self.replica.last_row[slot]) <= self.replica.settled_to

    def _drop(self, plan: Plan) -> None:
        replica = self.replica
        for id, kept in self.gone.items():
            if id in self.slot_of:  # an end that a settle found first is dropped here too: the client is gone
                self._drop_one(plan, Ended(self.slot_of[id], id, "abort"), kept)
        self.gone.clear()
        for ended in [e for e in replica.ended if self._droppable(e.slot)]:
            self._drop_one(plan, ended, -1)

    def _drop_one(self, plan: Plan, ended: Ended, kept: int) -> None:
        slot, id = ended.slot, ended.id
        existed = self.replica.drop(slot, id, kept)
        assert existed, f"request {id} is not in slot {slot}"
        plan.commands.append(Drop(slot, id, kept))
        plan.dropped.append(ended)
        self._full_at = None
        del self.slot_of[id], self.order[slot]
        if slot in self.preempted:
            self.preempted.remove(slot)

    def _decode_rows(self) -> np.ndarray:
        """Decoding slots that get a row: all, or the longest idle ones when they exceed the budget."""
        decoding = self.replica.decoding
        if len(decoding) <= self.budget.cap:
            return decoding
        oldest = np.argsort(self.replica.last_row[decoding], kind="stable")[: self.budget.cap]
        return decoding[np.sort(oldest)]

    # --- joining

    def _return_preempted(self, plan: Plan) -> None:
        replica = self.replica
        for slot in list(self.preempted):
            if replica.phase[slot] != PREEMPTED:  # it ended by the token that was in flight
                self.preempted.remove(slot)
            elif replica.committed[slot] == replica.target[slot]:
                if not self._fits(replica.requests[slot], int(replica.target[slot]), replica.keys[slot]):
                    break
                self.preempted.remove(slot)
                self._seat(plan, slot, replica.requests[slot], [])
            else:
                break

    def _admit(self, plan: Plan, room: int) -> None:
        """Seats waiting requests. What a plan seats is bounded, so that it takes the host no longer than a step the device."""
        replica = self.replica
        joined = 0
        while len(self.queue) and replica.free_slots and joined < 2 * self.budget.cap:
            at = (replica.pages.available, len(replica.free_slots))
            if self._full_at is not None and at[0] <= self._full_at[0] and at[1] <= self._full_at[1]:
                return
            behind = self._prompt_tokens_left() >= room
            if behind and len(replica.prefilling) >= 2 * PREFILLING:
                return
            chosen = self._choose(short=behind and self._long_prompts() >= PREFILLING)
            if chosen is None:
                return
            self.queue.remove(chosen.request.id)
            slot = replica.free_slots[-1]
            plan.admitted.append(chosen.request)
            self.order[slot] = chosen.order
            self.slot_of[chosen.request.id] = slot
            cached = self._seat(plan, slot, chosen.request, self._keys(chosen))
            plan.started.append((chosen.request.id, cached))
            joined += chosen.request.prompt_len - cached + cached // 4
            self.counters.prefix_queries += chosen.request.prompt_len
            self.counters.prefix_hits += cached

    def _choose(self, short: bool) -> Waiting | None:
        """The first waiting request that fits, unless the head has been passed too often. None: nothing can join now.

        Who was preempted goes before all that come after it. With `short`, only short prompts may join.
        """
        last = self.order[self.preempted[0]] if self.preempted else None
        head: Waiting | None = None
        deferred = False
        for waiting in self.queue.first(LOOKAHEAD, short):
            if last is not None and waiting.order > last:
                return None
            keys = self._keys(waiting)
            if self._computed_soon(waiting):
                deferred = True
                continue
            if self._fits(waiting.request, waiting.request.prompt_len, keys):
                if head is not None:
                    head.passed += 1
                return waiting
            if head is None:
                head = waiting
                if head.passed >= BYPASSES:
                    break
        if not deferred and not short:  # a page that is published, not one that is freed, lets those in
            self._full_at = (self.replica.pages.available, len(self.replica.free_slots))
        return None

    def _keys(self, waiting: Waiting) -> list[bytes]:
        """The content keys of its prompt's pages, hashed when it is first looked at: a burst must not stop the loop."""
        if waiting.keys is None:
            waiting.keys = self.replica.prompt_keys(waiting.request)
        return waiting.keys

    def _computed_soon(self, waiting: Waiting) -> bool:
        """Whether a prompt that is being computed will soon hold pages that this one misses; it waits for the last of them.

        Once found, asking again costs two look-ups.
        """
        replica = self.replica
        if waiting.awaits is not None:
            id, key = waiting.awaits
            if self.slot_of.get(id) in replica.prefilling and key not in replica.pages.index:
                return True
            waiting.awaits = None
        keys = self._keys(waiting)[: (waiting.request.prompt_len - 1) // replica.limits.block]
        if not keys or not replica.prefilling or waiting.request.sampling.prompt_logprobs >= 0:
            return False
        missing = len(replica.pages.find(keys))
        for slot in replica.prefilling:
            own = replica.keys[slot][: int(replica.target[slot]) // replica.limits.block]
            if missing < min(len(own), len(keys)) and own[missing] == keys[missing]:
                common = next((i for i, (a, b) in enumerate(zip(own, keys, strict=False)) if a != b), min(len(own), len(keys)))
                waiting.awaits = (int(replica.ids[slot]), keys[common - 1])
                return True
        return False

    def _fits(self, request: Request, known: int, keys: list[bytes]) -> bool:
        """Whether `known` tokens get their pages now, and decoding rows keep some room to grow."""
        replica = self.replica
        pages, block = replica.pages, replica.limits.block
        cached = pages.find(keys[: (known - 1) // block]) if request.sampling.prompt_logprobs < 0 else []
        need = -(-known // block) - len(cached) + sum(pages.refs[p] == 0 for p in cached)
        running = len(replica.decoding) + len(replica.prefilling)
        return need + min(running, pages.total // 50 + 1) <= pages.available if running else need <= pages.available

    def _seat(self, plan: Plan, slot: int, request: Request, keys: list[bytes]) -> int:
        plan.commands.append(Admit(slot, request.id))
        return self.replica.admit(slot, request, keys, self.compiled.pop(request.id, None))

    def _long_prompts(self) -> int:
        """How many prompts under way are not short."""
        slots = np.array(self.replica.prefilling, np.intp)
        return int(np.count_nonzero(self.replica.target[slots] > self.queue.short))

    def _prompt_tokens_left(self) -> int:
        slots = np.array(self.replica.prefilling, np.intp)
        return int((self.replica.target[slots] - self.replica.launched[slots]).sum())

    # --- rows

    def _make_room(self, plan: Plan, decoding: np.ndarray) -> np.ndarray:
        """Sees to it that the decoding rows that begin a page get one.

        Short of pages, rows first wait for those that the next settles free; only then do others yield theirs, lowest
        priority and newest first.
        """
        replica = self.replica
        wants = replica.pages_wanted(decoding)
        short = int(np.count_nonzero(wants)) - replica.pages.available
        if short <= 0:
            return decoding
        if self._pages_are_coming():
            wanting = decoding[wants][: replica.pages.available]
            return decoding[~wants | np.isin(decoding, wanting)]
        while short > 0:
            running = [*replica.prefilling, *replica.decoding.tolist()]
            victim = max(running, key=lambda slot: self.order[slot])
            keep = self._copying_is_cheaper(victim)
            replica.preempt(victim, keep)
            plan.commands.append(Preempt(victim, keep))
            self.counters.preemptions += 1
            self.preempted.append(victim)
            self.preempted.sort(key=lambda slot: self.order[slot])
            decoding = decoding[decoding != victim]
            short = int(np.count_nonzero(replica.pages_wanted(decoding))) - replica.pages.available
        return decoding

    def _pages_are_coming(self) -> bool:
        """Whether a request that has had its last row, settled or in flight, still holds pages: its drop gives them back."""
        replica = self.replica
        slots = np.fromiter(replica.requests, np.intp, len(replica.requests))
        over = (replica.phase[slots] == ENDED) | (replica.target[slots] >= replica.limit[slots])
        return bool(replica.held[slots[over]].any())

    def _copying_is_cheaper(self, slot: int) -> bool:
        """Whether a victim's pages should go to the host rather than be computed again, by measured rates."""
        replica = self.replica
        tokens = int(replica.launched[slot])
        pages = -(-tokens // replica.limits.block)
        if not pages or pages > len(replica.free_host):
            return False
        return self.copy_seconds * pages < self.budget.cost(tokens / 2) * tokens

    def _share(self, decoding: np.ndarray) -> tuple[int, list[tuple[int, int, int]]]:
        """How many prompt tokens may join, and the chunks that take them.

        What a token costs depends on where in its prompt it is, so chunks are cut, priced and cut again. A room that grew may
        reach prompts of which the first cut saw nothing, so the second price can only lower it.
        """
        waiting = self._prompt_tokens_left()
        room = self.budget.prompt_tokens(len(decoding), self._context, waiting)
        rows = self._cut_prompts(room)
        for again in (False, True):
            tokens = sum(count for _, _, count in rows)
            if not tokens:
                break
            self._context = sum(start * count for _, start, count in rows) / tokens
            priced = self.budget.prompt_tokens(len(decoding), self._context, waiting)
            if priced == room or (again and priced > room):
                break
            room = priced
            rows = self._cut_prompts(room)
        return room, rows

    def _cut_prompts(self, room: int) -> list[tuple[int, int, int]]:
        """Chunks (slot, start, count). The first prompt goes on to its end unless more urgent work comes.

        A prompt's turn is as long after its arrival as the rest of it takes, half a level of priority at most: of those that
        came together the shortest is next, and none waits for what arrives when it could have ended. Prompts that have less
        than half as much left as the first overtake it with half of the room, the shortest first: they need not wait for it,
        while of two about equally long ones both would only end later, were they to share.
        """
        replica = self.replica
        left = {s: int(replica.target[s] - replica.launched[s]) for s in replica.prefilling}
        if not left or room <= 0:
            return []
        takes = {s: min(n * self.budget.cost(n / 2), AGEING / 2) for s, n in left.items() if replica.ids[s] != self._first}
        in_turn = sorted(left, key=lambda s: (self.order[s][0] + takes.get(s, 0.0), self.order[s][1]))
        first = in_turn[0]
        self._first = int(replica.ids[first])
        short = sorted((s for s in in_turn if 2 * left[s] < left[first]), key=lambda s: left[s])
        counts = {first: min(left[first], room - room // 2 if short else room)}
        room -= counts[first]
        for slot in (*short, *in_turn):
            more = min(left[slot] - counts.get(slot, 0), room)
            if more > 0:
                counts[slot] = counts.get(slot, 0) + more
                room -= more
        return [(s, int(replica.launched[s]), n) for s, n in counts.items()]

    def _step(self, decoding: np.ndarray, rows: list[tuple[int, int, int]], depth: int) -> Step:
        replica = self.replica
        whole = decoding is replica.decoding or len(decoding) == len(replica.decoding)
        if not whole:
            rows = [(int(s), int(replica.launched[s]), 1) for s in decoding] + rows
        order = OVERLAP if depth else NO_OVERLAP
        if depth and self._needs_masks(decoding):
            order = LATE_SAMPLE
        if not rows:
            return Step(order, True)
        columns = np.array(rows, "<i4").T
        return Step(order, whole, columns[0].tobytes(), columns[1].tobytes(), columns[2].tobytes())

    def _needs_masks(self, decoding: np.ndarray) -> bool:
        """Whether a row's mask depends on a token that is still in flight."""
        matchers = self.replica.matchers
        return bool(matchers) and any(s in matchers and self.replica.pending(s) for s in decoding.tolist())

    def copy(self, replica: Replica) -> "Planner":
        other = type(self).__new__(type(self))
        other.__dict__.update(self.__dict__)
        other.replica = replica
        other.queue = self.queue.copy()
        other.counters = Counters(**vars(self.counters))
        other.gone, other.slot_of, other.order = self.gone.copy(), self.slot_of.copy(), self.order.copy()
        other.preempted = self.preempted.copy()
        return other

    def state(self) -> tuple[object, ...]:
        """A hashable value that two equal planners of equal replicas share. Clocks, measured times and what only they give a
        meaning (`_context`, `_first`) are left out."""
        return (
            tuple((w.request.id, w.passed, w.awaits) for w in self.queue.all()),
            tuple(self.gone.items()),
            tuple(sorted(self.order, key=lambda slot: self.order[slot])),
            tuple(self.preempted),
            self._full_at,
        )
