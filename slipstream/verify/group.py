"""A group under virtual time: production machines, channels that delay, and one device stream that all ranks share.

A step runs when every rank has queued it (its collectives match), one after the other, and each rank sees the outcome a little
later. The leader's machine is told the virtual time; nothing here reads a clock.
"""

import random
from collections import deque
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import numpy as np

from slipstream.log.batch import Batch, Offload, Outcome, Restore, Seat
from slipstream.log.entries import Body, Entry, Forget, Prepared, Reply
from slipstream.log.replica import Limits
from slipstream.rank.events import (
    Answer,
    Arrived,
    Compiled,
    Effect,
    Launch,
    LaunchForward,
    LaunchSample,
    Poison,
    Prepare,
    Send,
    Tell,
    Tick,
    Wake,
)
from slipstream.rank.leader import WINDOW, Leader
from slipstream.rank.loop import Rank
from slipstream.schedule.budget import Budget
from slipstream.verify.memory import Memory, Violation
from slipstream.verify.scenario import Fault, Scenario
from slipstream.verify.toy import DEAD_END, Draws, ToyMatcher, choose

if TYPE_CHECKING:
    from slipstream.verify.run import Run

STEP, TOKEN = 1e-3, 2e-6  # seconds of a step, and of each of its tokens
RING = 3  # steps that may lack their settling
STEP_TIMEOUT = 2.0  # seconds without progress after which the supervisor gives a group up


class Raised(Exception):
    """What an injected fault raises in a rank."""


Operation = Batch | Seat | Offload | Restore


class Queued:
    """One operation on the device stream: what the first rank queued, and how many ranks have queued the same."""

    __slots__ = ("what", "columns", "masks", "over", "queued", "sampled")

    def __init__(self, what: "Operation", columns: tuple[object, ...]):
        self.what = what
        self.columns = columns  # to compare other ranks' operations with
        self.masks: dict[int, np.ndarray] | None = None
        self.over: frozenset[int] = frozenset()
        self.queued = self.sampled = 0


class Group:
    def __init__(self, run: "Run", scenario: Scenario, faults: tuple[Fault, ...]):
        self.run = run
        self.scenario = scenario
        self.size = scenario.size
        self.random = random.Random(scenario.noise + run.incarnations)
        self.limits = Limits(
            scenario.pages, scenario.slots, scenario.max_len, scenario.block, scenario.caching, scenario.host_pages
        )
        replica = run.make_replica(self.limits)
        planner = run.make_planner(replica, Budget(scenario.cap, scenario.target), scenario.max_queue)
        self.leader = Leader(replica, planner, self.size, scenario.asynchronous)
        self.ranks: list[Rank] = [self.leader, *(Rank(i, run.make_replica(self.limits)) for i in range(1, self.size))]
        self.memory = Memory(self.limits)
        self.tokens = Draws(scenario.slots)
        self.stream: deque[Queued] = deque()  # what some rank has queued and not all, in order
        self.done = 0  # operations that have left the stream
        self.place = [0] * self.size  # operations that each rank has queued
        self.device_free = 0.0
        self.digests: dict[int, tuple[int, int]] = {}  # entry -> (digest, how many ranks have answered it)
        self.last = [[0.0] * self.size for _ in range(3)]  # latest delivery to, reply from, outcome on each rank
        self.counts: dict[tuple[str, int], int] = {}
        self.faults = {(f.kind, f.rank): f for f in faults}
        self.broken = False  # a fault was injected that must poison the group
        self.frozen: dict[int, float] = {}  # rank -> until when it stands still
        self.dead = False
        self.reason = ""
        self.wake_at = 0.0
        self.progress: tuple[tuple[int, ...], float] = ((), 0.0)
        run_at, delay = run.at, self.random.random
        self.handlers: dict[type, Callable[[int, Any], None]] = {
            Launch: self.launch,
            Answer: lambda rank, e: self.answer(rank, e.reply),
            Tell: lambda rank, e: run.tell(e.message),
            Send: lambda rank, e: self.send(e.message),
            Seat: lambda rank, e: self.queue(rank, e, (e.slot, e.request.id)),
            LaunchForward: lambda rank, e: self.forward(rank, e.batch),
            LaunchSample: lambda rank, e: self.sample(rank, e.seq, e.masks, e.discarded),
            Offload: lambda rank, e: self.queue(rank, e, tuple(e)),
            Restore: lambda rank, e: self.queue(rank, e, tuple(e)),
            Prepare: lambda rank, e: run_at(run.now + STEP * delay(), self.compile, (rank, e)),
            Wake: lambda rank, e: self.wake(e.at),
            Poison: lambda rank, e: self.poison(e.reason),
        }

    # --- events

    def on(self, rank: int, event: object) -> None:
        """Feeds one event to a rank's machine, unless the rank stands still or is gone."""
        run = self.run
        if self.dead:
            return
        until = self.frozen.get(rank)
        if until is not None:
            if run.now < until:
                if until < 1e6:
                    run.at(until, self.resume, (rank, event))
                return
            del self.frozen[rank]
        try:
            self.perform(rank, self.ranks[rank].on(event, run.now))  # type: ignore[arg-type]
        except Violation:
            raise
        except Exception as e:
            if not self.broken:
                raise Violation(f"rank {rank} raised {type(e).__name__}: {e}") from e
            self.poison(f"rank {rank} raised {type(e).__name__}: {e}")

    def resume(self, held: tuple[int, object]) -> None:
        self.on(*held)

    def tick(self, at: float) -> None:
        if at == self.wake_at:
            self.on(0, Tick())

    def arrive(self, what: tuple[int, Outcome]) -> None:
        self.on(what[0], Arrived(what[1]))

    def delay(self, kind: int, rank: int) -> float:
        """When a message sent now gets there: in order, jittered, now and then very late."""
        s, r = self.scenario, self.random.random
        delay = s.jitter * r() * s.slow[rank]
        if s.spike and r() < s.spike:
            delay *= 100
        last = self.last[kind]
        at = max(last[rank], self.run.now + delay)
        last[rank] = at
        return at

    # --- effects

    def perform(self, rank: int, effects: Iterable[Effect]) -> None:
        handlers = self.handlers
        for effect in effects:
            handler = handlers.get(type(effect))
            if handler is not None:
                handler(rank, effect)

    def launch(self, rank: int, effect: Launch) -> None:
        self.forward(rank, effect.batch)
        self.sample(rank, effect.batch.seq, None, frozenset())

    def wake(self, at: float) -> None:
        self.wake_at = at
        self.run.at(at, self.tick, at)

    def send(self, message: Entry | Body | Forget) -> None:
        loss = ""
        if isinstance(message, Entry):
            self.run.wrote(message)
            loss = "lose_entry"
        elif isinstance(message, Body) and not message.request.grammar:
            loss = "lose_body"
        for i in range(1, self.size):
            if loss and self.faults and self.hits(loss, i):
                self.broken = True
                continue
            self.run.at(self.delay(0, i), self.deliver, (i, message))

    def deliver(self, what: tuple[int, Entry | Body | Forget]) -> None:
        self.on(*what)
        if len(self.ranks[what[0]].entries) > WINDOW + 1:
            raise Violation(f"rank {what[0]} holds {len(self.ranks[what[0]].entries)} entries")

    def hits(self, kind: str, rank: int) -> bool:
        """Whether the fault of this kind is due at this event of the rank."""
        fault = self.faults.get((kind, rank))
        if fault is None:
            return False
        n = self.counts[kind, rank] = self.counts.get((kind, rank), -1) + 1
        return n == fault.nth

    def compile(self, what: tuple[int, Prepare]) -> None:
        rank, effect = what
        try:
            self.on(rank, Compiled(effect.id, ToyMatcher(effect.grammar)))
        except ValueError as e:
            self.on(rank, Compiled(effect.id, None, str(e)))

    def forward(self, rank: int, batch: Batch) -> None:
        if self.faults and self.hits("raise", rank):
            self.broken = True
            raise Raised("an injected fault")
        if len(self.ranks[rank].replica.flights) > RING:
            raise Violation(f"rank {rank} has {len(self.ranks[rank].replica.flights)} steps in flight")
        b = batch
        self.queue(
            rank, b, (b.seq, b.slots.tobytes(), b.starts.tobytes(), b.counts.tobytes(), b.samples.tobytes(), b.pages.tobytes())
        )

    def queue(self, rank: int, what: "Operation", columns: tuple[object, ...]) -> None:
        """Every rank's n-th operation must be the first one's; the device waits until all have queued it."""
        n = self.place[rank] - self.done
        self.place[rank] += 1
        if n == len(self.stream):
            self.stream.append(Queued(what, columns))
        queued = self.stream[n]
        if queued.columns != columns:
            return self.differs(f"rank {rank} differs: it queues {words(what)} where another queued {words(queued.what)}")
        queued.queued += 1
        if queued.queued == self.size:
            self.work()

    def differs(self, text: str) -> None:
        """Ranks do unlike things: never, unless a fault was injected; then the device hangs until that is noticed."""
        if not self.broken:
            raise Violation(text)

    def sample(self, rank: int, seq: int, masks: dict[int, np.ndarray] | None, over: frozenset[int]) -> None:
        queued = self.stream[self.place[rank] - 1 - self.done]
        if queued.sampled == 0:
            queued.masks, queued.over = masks, over
        elif (masks or queued.masks) and not same_masks(queued, masks or {}, over):
            return self.differs(f"rank {rank} samples entry {seq} under other masks than another rank")
        queued.sampled += 1
        if queued.sampled == self.size:
            self.work()

    def work(self) -> None:
        """Carries out what all ranks have queued, in order."""
        stream = self.stream
        while stream and stream[0].queued == self.size:
            queued = stream[0]
            what = queued.what
            if isinstance(what, Seat):
                self.memory.seat(what.slot, what.request)
                self.tokens.admit(what.slot, what.request)
            elif isinstance(what, Offload):
                self.memory.offload(what.pages, what.host)
            elif isinstance(what, Restore):
                self.memory.restore(what.host, what.pages)
            elif queued.sampled == self.size:
                self.start(queued, what)
            else:
                return
            stream.popleft()
            self.done += 1

    def start(self, queued: Queued, batch: Batch) -> None:
        """All ranks have queued the step: it runs after the one before it."""
        self.memory.run(batch)
        outcome = self.outcome(queued, batch)
        begin = max(self.run.now, self.device_free)
        self.device_free = end = begin + STEP + TOKEN * batch.tokens
        for rank in range(self.size):
            late = max(self.last[2][rank], end + self.scenario.jitter * self.random.random() * self.scenario.slow[rank])
            self.last[2][rank] = late
            self.run.at(late, self.arrive, (rank, outcome))

    def outcome(self, queued: Queued, batch: Batch) -> Outcome:
        slots, ends = batch.slots.astype(np.intp), batch.starts + batch.counts
        if batch.decodes < len(slots):
            rows = batch.samples
            slots, ends = slots[rows], ends[rows]
        ends = ends.astype(np.intp)
        outcome = self.tokens.sample(batch, slots, ends)
        if queued.masks:
            for i, slot in enumerate(slots.tolist()):
                mask = queued.masks.get(slot)
                if mask is not None:
                    token = choose(int(outcome.tokens[i]), mask)
                    outcome.tokens[i] = token
                    if token < 0:
                        outcome.errors[i] = DEAD_END
        self.memory.sampled(slots, ends, outcome.tokens)
        return outcome

    def answer(self, rank: int, reply: Reply | Prepared) -> None:
        """Every rank's digest of an entry must be the first one's; then a follower's reply goes its way."""
        if isinstance(reply, Prepared):
            if rank:
                self.run.at(self.delay(1, rank), self.deliver_reply, reply)
            return
        seq = reply.seq
        first = self.digests.get(seq)
        if first is None:
            self.digests[seq] = (reply.digest, 1)
        elif first[0] != reply.digest:
            self.differs(f"rank {rank} has another digest at entry {seq} than another rank")
        elif first[1] + 1 == self.size:
            del self.digests[seq]
        else:
            self.digests[seq] = (first[0], first[1] + 1)
        if not all(reply.existed):
            self.differs(f"rank {rank} did not know a request that entry {seq} drops")
        if rank == 0:
            return
        if self.faults:
            if self.hits("lose_reply", rank):
                self.broken = True
                return
            if self.hits("wrong_digest", rank):
                self.broken = True
                reply = Reply(rank, seq, reply.digest ^ 1, reply.existed)
            if self.hits("double_reply", rank):
                self.broken = True
                self.run.at(self.delay(1, rank), self.deliver_reply, reply)
        self.run.at(self.delay(1, rank), self.deliver_reply, reply)

    def deliver_reply(self, reply: Reply | Prepared) -> None:
        self.on(0, reply)

    # --- the supervisor's part

    def poison(self, reason: str) -> None:
        self.dead = True
        self.reason = reason
        if not self.broken:
            raise Violation(f"the group was poisoned without a fault: {reason}")
        self.run.poisoned(self)

    def strike(self, fault: Fault) -> None:
        """A rank dies, which the supervisor sees soon, or stands still, which it sees when its loop has not turned for long."""
        if self.dead:
            return
        if fault.kind == "stop" and fault.seconds < STEP_TIMEOUT / 2:
            self.frozen[fault.rank] = self.run.now + fault.seconds
            return
        self.broken = True
        self.frozen[fault.rank] = 1e9
        self.run.at(self.run.now + (0.01 if fault.kind == "die" else STEP_TIMEOUT), self.bury, fault)

    def bury(self, fault: Fault) -> None:
        if not self.dead:
            self.poison(f"rank {fault.rank} " + ("ended by itself" if fault.kind == "die" else "makes no progress"))

    def beat(self) -> None:
        """What the driver and the supervisor do now and then: an idle leader's tick, and the look at the progress."""
        leader, now = self.leader, self.run.now
        self.bounds()
        if now - leader.written_at >= 1.0:
            self.on(0, Tick())
        if self.dead:
            return
        mark = (leader.applied, leader.acknowledged, leader.replica.settled_to, *(r.applied for r in self.ranks))
        busy = bool(leader.replica.flights) or leader.acknowledged < leader.applied
        if mark != self.progress[0] or not busy:
            self.progress = (mark, now)
        elif now - self.progress[1] > STEP_TIMEOUT:
            self.poison(f"no progress for {STEP_TIMEOUT:g} s, at {mark}")

    def bounds(self) -> None:
        leader = self.leader
        if leader.next - leader.acknowledged > WINDOW + 2 or len(leader.sealed) > WINDOW + 2:
            raise Violation(f"{leader.next - leader.acknowledged} entries are unanswered")
        waiting = len(leader.planner.queue) + len(leader.preparing)
        if waiting > self.scenario.max_queue:
            raise Violation(f"{waiting} requests wait where {self.scenario.max_queue} may")


def same_masks(queued: Queued, masks: dict[int, np.ndarray], over: frozenset[int]) -> bool:
    own = queued.masks or {}
    return over == queued.over and own.keys() == masks.keys() and all((own[s] == masks[s]).all() for s in own)


def words(what: Operation) -> str:
    """An operation of the device in a few words."""
    if isinstance(what, Batch):
        rows = zip(what.slots.tolist(), what.starts.tolist(), what.counts.tolist(), strict=True)
        shown = " ".join(f"{slot}:[{start},{start + count})" for slot, start, count in rows)
        return f"entry {what.seq} with rows {shown} and pages {what.pages.tolist()}"
    if isinstance(what, Seat):
        return f"request {what.request.id} in slot {what.slot}"
    return repr(what)
