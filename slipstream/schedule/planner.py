"""The planner: which requests join, which rows run, and which requests give up their pages. Only the leader plans.

Order of a plan: drop ended and aborted requests, return preempted ones, admit waiting ones, make room for the decoding rows,
and cut chunks of prompts that fit the rest of the budget. The planner applies each command to the leader's replica at once.
Followers apply the same command when they read it.
"""

from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from slipstream.log.entries import LATE_SAMPLE, NO_OVERLAP, OVERLAP, Admit, Command, Drop, Preempt, Step, named
from slipstream.log.replica import Replica
from slipstream.log.request import Request
from slipstream.log.state import ENDED, PREEMPTED, Ended
from slipstream.schedule.admission import Admission
from slipstream.schedule.budget import Budget
from slipstream.schedule.prefill_order import PendingPrefill, PrefillOrder
from slipstream.schedule.queue import Queue, Waiting
from slipstream.schedule.speculation import AutoWidth, DraftCounts


@dataclass
class Plan:
    """The content of the next entry. All but the step is already applied to the leader's replica."""

    commands: list[Command] = field(default_factory=list[Command])
    admitted: list[Request] = field(default_factory=list[Request])  # for the first time
    started: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])  # (request id, cached tokens)
    dropped: list[Ended] = field(default_factory=list[Ended])  # one per Drop, in order
    step: Step | None = None


class PrefillShare(NamedTuple):
    """The prompt tokens of a step."""

    room: int  # prompt tokens that may join
    rows: list[tuple[int, int, int]]  # the chunks: (slot, start, count)
    first: int  # the request whose prompt goes on until it ends; -1: none
    context: float  # mean number of tokens before a prompt token


@dataclass
class Counters:
    """Counts since the start; the first two are tokens of prompts that joined."""

    prefix_queries: int = 0
    prefix_hits: int = 0
    preemptions: int = 0
    drafts: DraftCounts = field(default_factory=DraftCounts)


class Planner:
    def __init__(
        self, replica: Replica, budget: Budget, max_queue: int, copy_seconds: float = 0.0, auto: AutoWidth | None = None
    ):
        """`copy_seconds`: time of one page's copy to the host and back, measured at the start.

        `auto` chooses the width of decode rows; None: always the most.
        """
        self.replica = replica
        self.budget = budget
        self.queue = Queue(max_queue)
        self.admission = Admission(replica, self.queue)
        self.copy_seconds = copy_seconds
        self.counters = Counters()
        self.aborted: dict[int, int] = {}  # request id -> kept tokens
        self.slot_of: dict[int, int] = {}  # request id -> slot
        self.arrival: dict[int, tuple[float, int]] = {}  # slot -> place in the queue it came from
        self.preempted: list[int] = []  # slots, in the order they return
        self._last = PrefillShare(0, [], -1, 0.0)  # the last step that had prompts
        self.auto = auto
        self._width = 1  # of this plan's decode rows

    # --- what comes in

    def submit(self, request: Request, now: float) -> None:
        self.admission.push(request, now)

    def abort(self, id: int, kept: int) -> bool:
        """Marks a request as aborted. True when it was waiting: then the log does not contain it."""
        if self.queue.remove(id) is not None:
            self.admission.reopen()  # the others may have waited for it
            return True
        if id in self.slot_of:
            self.aborted[id] = kept
        return False

    # --- the plan

    def plan(self, depth: int) -> Plan:
        """The next entry. `depth`: launched steps that are not settled."""
        plan = Plan()
        self._width = self.row_width()
        self.admission.begin()
        self._drop(plan)
        decoding = self._decode_rows()
        self._return_preempted(plan)
        before = len(plan.commands)
        prefills = self._turns()
        share = self._share(decoding, prefills)
        self._admit(plan, share.room, prefills)
        decoding = self._make_room(plan, decoding)
        if len(plan.commands) > before:
            share = self._share(decoding, self._turns())
        if share.rows:
            self._last = share
            if any(start + count == self.replica.bound[slot] for slot, start, count in share.rows):
                self.admission.reopen()  # requests with the same prefix need fewer pages now
        if len(decoding) or share.rows:
            plan.step = self._step(decoding, share.rows, depth)
        return plan

    def _apply(self, plan: Plan, command: Command) -> int:
        plan.commands.append(command)
        return self.replica.apply(command)

    def row_width(self) -> int:
        """Tokens that a decode row of the next step may give: one and the drafts that it verifies."""
        rows = len(self.replica.decoding)
        return self.auto.choose(rows) if self.auto is not None and rows else self.replica.limits.width

    def _droppable(self, slot: int) -> bool:
        return int(self.replica.last_row[slot]) <= self.replica.settled_to

    def _drop(self, plan: Plan) -> None:
        replica = self.replica
        for id, kept in self.aborted.items():
            if id in self.slot_of:  # also a request that a settle has just ended: its client does not wait for the reason
                self._drop_one(plan, Ended(self.slot_of[id], id, "abort"), kept)
        self.aborted.clear()
        for ended in [e for e in replica.ended if self._droppable(e.slot)]:
            self._drop_one(plan, ended, -1)

    def _drop_one(self, plan: Plan, ended: Ended, kept: int) -> None:
        slot, id = ended.slot, ended.id
        existed = self._apply(plan, Drop(slot, id, kept))
        assert existed, f"request {id} is not in slot {slot}"
        plan.dropped.append(ended)
        self.admission.reopen()
        del self.slot_of[id], self.arrival[slot]
        if slot in self.preempted:
            self.preempted.remove(slot)

    def _decode_rows(self) -> np.ndarray:
        """Decoding slots that get a row: all, or those whose latest row is oldest when they exceed the budget."""
        decoding = self.replica.decoding
        most = max(self.budget.cap_tokens // self._width, 1)
        if len(decoding) <= most:
            return decoding
        oldest = np.argsort(self.replica.last_row[decoding], kind="stable")[:most]
        return decoding[np.sort(oldest)]

    # --- joining

    def _return_preempted(self, plan: Plan) -> None:
        replica = self.replica
        for slot in list(self.preempted):
            if replica.phase[slot] != PREEMPTED:  # the token that was in flight ended it
                self.preempted.remove(slot)
            elif not replica.pending(slot):
                if not self.admission.fits(replica.requests[slot], int(replica.committed[slot]), replica.keys[slot]):
                    break
                self.preempted.remove(slot)
                self._apply(plan, Admit(slot, int(replica.ids[slot])))
            else:
                break

    def _admit(self, plan: Plan, room: int, prefills: PrefillOrder) -> None:
        """Admits waiting requests up to a bound, so that planning takes less time than the device needs for a step."""
        admission, most = self.admission, 2 * self.admission.max_long_prefills
        before = self.arrival[self.preempted[0]] if self.preempted else None
        tokens, long = prefills.left, prefills.longer_than(admission.short)
        joined = 0
        while not admission.closed and joined < 2 * self.budget.cap_tokens:
            behind = tokens >= room
            if behind and len(self.replica.prefilling) >= most:
                return
            chosen = admission.choose(prefills, behind and long >= admission.max_long_prefills, before)
            if chosen is None:
                return
            cached = self._join(plan, chosen, prefills)
            left = chosen.request.prompt_len - cached
            tokens, long = tokens + left, long + (left > admission.short)
            joined += left + cached // 4

    def _join(self, plan: Plan, chosen: Waiting, prefills: PrefillOrder) -> int:
        """Admits a waiting request; returns how many tokens of its prompt the cache holds."""
        request = chosen.request
        self.queue.remove(request.id)
        slot = self.replica.free_slots[-1]
        plan.admitted.append(request)
        self.arrival[slot] = chosen.arrival
        self.slot_of[request.id] = slot
        self.replica.receive(request, self.admission.keys(chosen))
        cached = self._apply(plan, Admit(slot, request.id))
        prefills.add(PendingPrefill(slot, request.id, request.prompt_len - cached, chosen.arrival, request.priority))
        plan.started.append((request.id, cached))
        self.counters.prefix_queries += request.prompt_len
        self.counters.prefix_hits += cached
        return cached

    def _turns(self) -> PrefillOrder:
        """The order of the prompts under way."""
        replica = self.replica
        prompts = [
            PendingPrefill(
                slot,
                int(replica.ids[slot]),
                int(replica.bound[slot] - replica.computed[slot]),
                self.arrival[slot],
                replica.requests[slot].priority,
            )
            for slot in replica.prefilling
        ]
        return PrefillOrder(prompts, self._last.first, self.budget.cost)

    # --- rows

    def _make_room(self, plan: Plan, decoding: np.ndarray) -> np.ndarray:
        """Makes sure that there are pages for the decoding rows that begin a new one; returns the rows that run.

        Where pages run short, rows first wait for pages that the next settles free. If none will come, requests are
        preempted, the lowest priority and the newest first.
        """
        replica = self.replica
        wanted = replica.columns_wanted(decoding, self._width)
        if not wanted or wanted <= replica.cache.available:
            return decoding
        lacking = wanted - replica.cache.available
        if self._pages_are_coming():
            return self._rows_that_fit(decoding)
        while lacking > 0:
            running = [*replica.prefilling, *replica.decoding.tolist()]
            victim = max(running, key=lambda slot: self.arrival[slot])
            self._apply(plan, Preempt(victim, self._copying_is_cheaper(victim)))
            self.counters.preemptions += 1
            self.preempted.append(victim)
            self.preempted.sort(key=lambda slot: self.arrival[slot])
            decoding = decoding[decoding != victim]
            lacking = replica.columns_wanted(decoding, self._width) - replica.cache.available
        return decoding

    def _rows_that_fit(self, decoding: np.ndarray) -> np.ndarray:
        """The rows that need no new page, and as many of the others as there are pages for."""
        left = self.replica.cache.available
        fit = ~self.replica.wants_pages(decoding, self._width)
        for i in np.flatnonzero(~fit).tolist():
            left -= self.replica.columns_wanted(decoding[i : i + 1], self._width)
            if left < 0:
                break
            fit[i] = True
        return decoding[fit]

    def _pages_are_coming(self) -> bool:
        """Whether a request whose last row is launched still holds pages: its drop gives them back."""
        replica = self.replica
        slots = np.fromiter(replica.requests, np.intp, len(replica.requests))
        over = (replica.phase[slots] == ENDED) | (replica.sure[slots] >= replica.limit[slots])
        return bool(replica.held[slots[over]].any())

    def _copying_is_cheaper(self, slot: int) -> bool:
        """Whether copying a preempted request's pages to the host costs less, by measured rates, than computing them again."""
        replica = self.replica
        tokens = int(replica.computed[slot])
        pages = replica.limits.pages_of(tokens)
        if not pages or not replica.host_fits(slot):
            return False
        return self.copy_seconds * pages < self.budget.cost(tokens / 2) * tokens

    def _share(self, decoding: np.ndarray, prefills: PrefillOrder) -> PrefillShare:
        """The chunks of prompts that join the decoding rows.

        The cost of a token depends on its place in the prompt, so chunks are cut, priced and cut again. A larger room may reach
        prompts that the first cut did not include. So the second price may only lower the room.
        """
        waiting = prefills.left
        context = self._last.context
        decode_tokens = len(decoding) * self._width
        room = self.budget.prompt_tokens(decode_tokens, context, waiting)
        rows = self._cut(prefills, room)
        for again in (False, True):
            tokens = sum(count for _, _, count in rows)
            if not tokens:
                break
            context = sum(start * count for _, start, count in rows) / tokens
            priced = self.budget.prompt_tokens(decode_tokens, context, waiting)
            if priced == room or (again and priced > room):
                break
            room = priced
            rows = self._cut(prefills, room)
        return PrefillShare(room, rows, prefills.first.id if prefills.first else -1, context)

    def _cut(self, prefills: PrefillOrder, room: int) -> list[tuple[int, int, int]]:
        cut = ((slot, int(self.replica.computed[slot]), count) for slot, count in prefills.cut(room).items())
        return [(slot, start, self._to_snapshot(start, count)) for slot, start, count in cut]

    def _to_snapshot(self, start: int, count: int) -> int:
        """A chunk's tokens, cut to end at the last boundary inside it where per-slot state is saved, if there is one."""
        every = self.replica.limits.snapshot_tokens
        last = (start + count) // every * every if every and self.replica.limits.snapshots else 0
        return last - start if last > start else count

    def _step(self, decoding: np.ndarray, rows: list[tuple[int, int, int]], depth: int) -> Step:
        replica = self.replica
        whole = decoding is replica.decoding or len(decoding) == len(replica.decoding)
        width = self._width
        known = [(s, start, count, int(start + count == replica.bound[s])) for s, start, count in rows]
        if not whole:
            known = [(s, int(replica.computed[s]), width, width) for s in decoding.tolist()] + known
        order = OVERLAP if depth else NO_OVERLAP
        if depth and self._needs_masks(decoding):
            order = LATE_SAMPLE
        return Step(order, width if whole and len(decoding) else 0, named(known) if known else b"")

    def _needs_masks(self, decoding: np.ndarray) -> bool:
        """Whether a row's mask depends on a token that is still in flight."""
        matchers = self.replica.matchers
        return bool(matchers) and any(s in matchers and self.replica.pending(s) for s in decoding.tolist())

    def copy(self, replica: Replica) -> "Planner":
        other = type(self).__new__(type(self))
        other.__dict__.update(self.__dict__)
        other.replica = replica
        other.queue = self.queue.copy()
        other.admission = self.admission.copy(replica, other.queue)
        other.counters = replace(self.counters, drafts=self.counters.drafts.copy())
        other.aborted, other.slot_of, other.arrival = self.aborted.copy(), self.slot_of.copy(), self.arrival.copy()
        other.preempted = self.preempted.copy()
        return other

    def state(self) -> tuple[object, ...]:
        """A hashable value that equal planners of equal replicas share. Clocks and measurements are left out."""
        return (
            self.admission.state(),
            self._last.first,
            tuple(self.aborted.items()),
            tuple(sorted(self.arrival, key=lambda slot: self.arrival[slot])),
            tuple(self.preempted),
        )
