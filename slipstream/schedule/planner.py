"""The planner: which requests join, which rows run, who yields its pages. The leader's alone.

Order of a plan: drop what has ended or gone, return preempted requests, admit waiting ones, make room for the decoding rows,
cut chunks of prompts into what is left of the budget. It changes the leader's replica through the replica's own methods and
records each call as a command, so that followers do the same.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from slipstream.log.entries import LATE_SAMPLE, NO_OVERLAP, OVERLAP, Admit, Command, Drop, Preempt, Step
from slipstream.log.grammar import Matcher
from slipstream.log.replica import Replica
from slipstream.log.request import Request
from slipstream.log.state import ENDED, PREEMPTED, Ended
from slipstream.schedule.budget import Budget
from slipstream.schedule.queue import Queue, Waiting
from slipstream.schedule.turns import Prompt, Turns

LOOKAHEAD = 8  # waiting requests that are looked at, the head included, for one that fits
BYPASSES = 64  # how often a head may be passed before everybody waits for it
SHORT = 1024  # tokens to compute of a prompt that need not wait for long ones
LONG_UNDER_WAY = 8  # long prompts that are computed at a time, where a step has no room for all; with short ones twice as many
HASHED = 2048  # pages of prompts after which a plan hashes no other prompt: a burst must not stop the loop
ASKED = 64  # waiting long prompts that a look asks whether the cache has made them short


@dataclass
class Plan:
    """What an entry will hold, already applied to the leader's replica but for the step."""

    commands: list[Command] = field(default_factory=list[Command])
    admitted: list[Request] = field(default_factory=list[Request])  # for the first time
    started: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])  # (request id, cached tokens)
    dropped: list[Ended] = field(default_factory=list[Ended])  # one per Drop, in order
    step: Step | None = None


class Share(NamedTuple):
    """The prompts' part of a step."""

    room: int  # prompt tokens that may join
    rows: list[tuple[int, int, int]]  # the chunks that take them: (slot, start, count)
    first: int  # the request whose prompt goes on until it ends; -1: none
    context: float  # tokens before a prompt token, on the average


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
        self.short = SHORT
        self.long_under_way = LONG_UNDER_WAY
        self._last = Share(0, [], -1, 0.0)  # of the last step that had prompts
        self._turns: Turns | None = None  # of this plan; None: somebody has joined since
        self._hashed = 0  # pages, by this plan
        self._full_at: tuple[int, int] | None = None  # (available pages, free slots) when nothing could be admitted

    # --- what comes in

    def submit(self, request: Request, now: float) -> None:
        self.queue.push(request, now, request.prompt_len <= self.short)
        self.reopen()

    def reopen(self) -> None:
        """Something has changed for those that could not be admitted, beside more pages or slots."""
        self._full_at = None
        self.queue.ask_all()

    def abort(self, id: int, kept: int) -> bool:
        """Marks a request as gone. True when it was only waiting: then nothing of it is in the log."""
        if self.queue.remove(id) is not None:
            self.reopen()  # the others may have waited for it
            return True
        if id in self.slot_of:
            self.gone[id] = kept
        return False

    # --- the plan

    def plan(self, depth: int) -> Plan:
        """The next entry. `depth`: steps in flight that are not settled."""
        plan = Plan()
        self._hashed = 0
        self._drop(plan)
        decoding = self._decode_rows()
        self._return_preempted(plan)
        before = len(plan.commands)
        share = self._share(decoding)
        self._admit(plan, share.room)
        decoding = self._make_room(plan, decoding)
        if len(plan.commands) > before:
            share = self._share(decoding)
        if share.rows:
            self._last = share
            if any(start + count == self.replica.target[slot] for slot, start, count in share.rows):
                self.reopen()  # who begins alike needs fewer pages now
        if len(decoding) or share.rows:
            plan.step = self._step(decoding, share.rows, depth)
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
        self.reopen()
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
        if not len(self.queue):
            return
        replica = self.replica
        turns = self._new_turns()
        tokens, long = turns.left, turns.longer_than(self.short)
        joined = 0
        while len(self.queue) and replica.free_slots and joined < 2 * self.budget.cap:
            at = (replica.pages.available, len(replica.free_slots))
            if self._full_at is not None and at[0] <= self._full_at[0] and at[1] <= self._full_at[1]:
                return
            behind = tokens >= room
            if behind and len(replica.prefilling) >= 2 * self.long_under_way:
                return
            chosen = self._choose(crowded=behind and long >= self.long_under_way)
            if chosen is None:
                return
            cached = self._join(plan, chosen)
            rest = chosen.request.prompt_len - cached
            tokens, long = tokens + rest, long + (rest > self.short)
            joined += rest + cached // 4

    def _join(self, plan: Plan, chosen: Waiting) -> int:
        """Seats a waiting request; how many tokens of its prompt the cache holds."""
        request = chosen.request
        self.queue.remove(request.id)
        slot = self.replica.free_slots[-1]
        plan.admitted.append(request)
        self.order[slot] = chosen.order
        self.slot_of[request.id] = slot
        cached = self._seat(plan, slot, request, self._keys(chosen))
        plan.started.append((request.id, cached))
        self.counters.prefix_queries += request.prompt_len
        self.counters.prefix_hits += cached
        return cached

    def _choose(self, crowded: bool) -> Waiting | None:
        """The first waiting request that fits, unless the head has been passed too often. None: nothing can join now.

        The head is the first that was looked at and does not fit. Who was preempted goes before all that come after it.
        `crowded`: only short prompts may join.
        """
        last = self.order[self.preempted[0]] if self.preempted else None
        head: Waiting | None = None
        for_pages = not crowded  # whether everybody waits for pages alone
        for waiting in self._candidates(crowded):
            if waiting.keys is None and self._hashed >= HASHED:
                for_pages = False
                break
            if (last is not None and waiting.order > last) or self._computed_soon(waiting):
                for_pages = False
                continue
            if self._fits(waiting.request, waiting.request.prompt_len, self._keys(waiting)):
                if head is not None:
                    head.passed += 1
                return waiting
            head = head or waiting
            if head.passed >= BYPASSES:
                break
        if for_pages and not self.queue.unasked:
            self._full_at = (self.replica.pages.available, len(self.replica.free_slots))
        return None

    def _candidates(self, crowded: bool) -> Iterator[Waiting]:
        """Who is looked at: the first in the queue, unless `crowded`; then short ones, as urgent as the very first.

        Before these are looked at, some long prompts are asked whether they have become short, and short ones whether they
        still are.
        """
        queue = self.queue
        first = queue.first(LOOKAHEAD)
        if not crowded:
            yield from first
        for _ in range(ASKED):
            asked = queue.next_long() if queue.unasked and self._hashed < HASHED else None
            if asked is None:
                break
            queue.set_short(asked, self._is_short(asked))
        for waiting in queue.first(LOOKAHEAD, short=True):
            if not self._is_short(waiting):
                queue.set_short(waiting, False)
            elif waiting.request.priority <= first[0].request.priority and (crowded or waiting not in first):
                yield waiting

    def _is_short(self, waiting: Waiting) -> bool:
        """Whether at most `short` tokens of the prompt have to be computed: the page before these is in the cache.

        So the next turn of a chat is short. Pages before that one are evicted after it.
        """
        request = waiting.request
        if request.prompt_len <= self.short:
            return True
        page = -(-(request.prompt_len - self.short) // self.replica.limits.block) - 1
        keys = self._keys(waiting) if request.sampling.prompt_logprobs < 0 else []
        return page < len(keys) and keys[page] in self.replica.pages.index

    def _keys(self, waiting: Waiting) -> list[bytes]:
        """The content keys of its prompt's pages, hashed when it is first looked at."""
        if waiting.keys is None:
            waiting.keys = self.replica.prompt_keys(waiting.request)
            self._hashed += len(waiting.keys)
        return waiting.keys

    def _cached(self, request: Request, known: int, keys: list[bytes]) -> list[int]:
        """The pages in the cache that it may read of its first `known` tokens, of which one is always computed."""
        if request.sampling.prompt_logprobs >= 0:
            return []
        return self.replica.pages.find(keys[: (known - 1) // self.replica.limits.block])

    def _computed_soon(self, waiting: Waiting) -> bool:
        """Whether pages that this prompt misses are computed for another one, before this one's turn would come.

        It waits for the last of them. Once found, asking again costs two look-ups.
        """
        replica, request = self.replica, waiting.request
        if waiting.awaits is not None:
            id, key, left = waiting.awaits
            slot = self.slot_of.get(id, -1)
            if slot in replica.prefilling and key not in replica.pages.index and self._goes_before(slot, waiting, left):
                return True
            waiting.awaits = None
        if not replica.prefilling:
            return False
        block = replica.limits.block
        keys = self._keys(waiting)[: (request.prompt_len - 1) // block]
        found = len(self._cached(request, request.prompt_len, keys))
        if found == len(keys) or request.sampling.prompt_logprobs >= 0:
            return False
        for slot in replica.prefilling:
            own = replica.keys[slot]
            most = min(int(replica.target[slot]) // block, len(own), len(keys))
            if int(replica.launched[slot]) // block <= found < most and own[found] == keys[found]:
                common = next((i for i in range(found, most) if own[i] != keys[i]), most)
                # what both have counts twice: were this one to go first, both would compute it
                left = request.prompt_len + (common - 2 * found) * block
                if self._goes_before(slot, waiting, left):
                    waiting.awaits = (int(replica.ids[slot]), keys[common - 1], left)
                    return True
        return False

    def _goes_before(self, slot: int, waiting: Waiting, left: int) -> bool:
        """Whether the prompt under way in `slot` is computed before the waiting one would be, which has `left` tokens to go."""
        if self._turns is None:
            self._turns = self._new_turns()
        return self._turns.goes_before(slot, Prompt(-1, waiting.request.id, left, waiting.order, waiting.request.priority))

    def _fits(self, request: Request, known: int, keys: list[bytes]) -> bool:
        """Whether `known` tokens get their pages now, and decoding rows keep some room to grow."""
        replica = self.replica
        pages = replica.pages
        cached = self._cached(request, known, keys)
        need = -(-known // replica.limits.block) - len(cached) + sum(pages.refs[p] == 0 for p in cached)
        running = len(replica.decoding) + len(replica.prefilling)
        return need + min(running, pages.total // 50 + 1) <= pages.available if running else need <= pages.available

    def _seat(self, plan: Plan, slot: int, request: Request, keys: list[bytes]) -> int:
        self._turns = None
        plan.commands.append(Admit(slot, request.id))
        return self.replica.admit(slot, request, keys, self.compiled.pop(request.id, None))

    def _new_turns(self) -> Turns:
        """Of the prompts under way."""
        replica = self.replica
        prompts = [
            Prompt(
                slot,
                int(replica.ids[slot]),
                int(replica.target[slot] - replica.launched[slot]),
                self.order[slot],
                replica.requests[slot].priority,
            )
            for slot in replica.prefilling
        ]
        return Turns(prompts, self._last.first, self.budget.cost)

    # --- rows

    def _make_room(self, plan: Plan, decoding: np.ndarray) -> np.ndarray:
        """Sees to it that the decoding rows that begin a page get one.

        Short of pages, rows first wait for those that the next settles free; only then do others yield theirs, lowest
        priority and newest first.
        """
        replica = self.replica
        wants = replica.pages_wanted(decoding)
        lacking = int(np.count_nonzero(wants)) - replica.pages.available
        if lacking <= 0:
            return decoding
        if self._pages_are_coming():
            wanting = decoding[wants][: replica.pages.available]
            return decoding[~wants | np.isin(decoding, wanting)]
        while lacking > 0:
            running = [*replica.prefilling, *replica.decoding.tolist()]
            victim = max(running, key=lambda slot: self.order[slot])
            keep = self._copying_is_cheaper(victim)
            replica.preempt(victim, keep)
            plan.commands.append(Preempt(victim, keep))
            self.counters.preemptions += 1
            self.preempted.append(victim)
            self.preempted.sort(key=lambda slot: self.order[slot])
            decoding = decoding[decoding != victim]
            lacking = int(np.count_nonzero(replica.pages_wanted(decoding))) - replica.pages.available
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

    def _share(self, decoding: np.ndarray) -> Share:
        """The chunks of prompts that join the decoding rows.

        What a token costs depends on where in its prompt it is, so chunks are cut, priced and cut again. A room that grew may
        reach prompts of which the first cut saw nothing, so the second price can only lower it.
        """
        turns = self._turns = self._new_turns()
        waiting = turns.left
        context = self._last.context
        room = self.budget.prompt_tokens(len(decoding), context, waiting)
        rows = self._cut(turns, room)
        for again in (False, True):
            tokens = sum(count for _, _, count in rows)
            if not tokens:
                break
            context = sum(start * count for _, start, count in rows) / tokens
            priced = self.budget.prompt_tokens(len(decoding), context, waiting)
            if priced == room or (again and priced > room):
                break
            room = priced
            rows = self._cut(turns, room)
        return Share(room, rows, turns.first.id if turns.first else -1, context)

    def _cut(self, turns: Turns, room: int) -> list[tuple[int, int, int]]:
        return [(slot, int(self.replica.launched[slot]), count) for slot, count in turns.cut(room).items()]

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
        """A hashable value that two equal planners of equal replicas share. Clocks and what was measured are left out."""
        return (
            self.queue.state(),
            self._last.first,
            tuple(self.gone.items()),
            tuple(sorted(self.order, key=lambda slot: self.order[slot])),
            tuple(self.preempted),
            self._full_at,
        )
