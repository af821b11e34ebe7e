"""A group under virtual time: production machines, channels that delay, and one device stream that all ranks share.

A step runs when every rank has queued it (its collectives match), one after the other, and each rank sees the outcome a little
later. The leader's machine gets the virtual time; nothing here reads a clock.
"""

import random
from typing import TYPE_CHECKING, assert_never

from slipstream.log.batch import Batch, InitSlot, Offload, Outcome, Restore, SetState
from slipstream.log.entries import Entry, Forget, Prepared, Reply, RequestBody
from slipstream.rank.effects import Interpreter
from slipstream.rank.events import (
    Arrived,
    DeviceEffect,
    Launch,
    LaunchForward,
    LaunchSample,
    Poison,
    Prepare,
    ResourcesReady,
    Send,
    SendReply,
    SendToFront,
    Span,
    Tick,
    Wake,
)
from slipstream.rank.leader import MAX_UNANSWERED_ENTRIES, Leader
from slipstream.rank.loop import Rank
from slipstream.schedule.budget import Budget
from slipstream.verify.common.memory import Violation
from slipstream.verify.common.toy import ToyMatcher
from slipstream.verify.simulate.scenario import Fault, Scenario
from slipstream.verify.simulate.stream import Stream

if TYPE_CHECKING:
    from slipstream.verify.simulate.run import Run

STEP, TOKEN = 1e-3, 2e-6  # seconds of a step, and of each of its tokens
MAX_UNSETTLED_STEPS = 3  # launched steps that may be unsettled
STEP_TIMEOUT_S = 2.0  # without progress until the supervisor ends the group


class Raised(Exception):
    """The exception of an injected fault in a rank."""


class SimulatedGroup(Interpreter):
    def __init__(self, run: "Run", scenario: Scenario, faults: tuple[Fault, ...]):
        self.run = run
        self.scenario = scenario
        self.size = scenario.size
        self.random = random.Random(scenario.noise + run.incarnations)
        self.widths = random.Random(scenario.noise)
        self.limits = scenario.limits
        replica = run.make_replica(self.limits)
        planner = run.make_planner(replica, Budget(scenario.cap, scenario.target), scenario.max_queue)
        planner.row_width = self.draw_width
        planner.admission.short, planner.admission.max_long_prefills = scenario.short, scenario.max_long_prefills
        self.leader = Leader(replica, planner, self.size, scenario.asynchronous)
        self.ranks: list[Rank] = [self.leader, *(Rank(i, run.make_replica(self.limits)) for i in range(1, self.size))]
        self.stream = Stream(self.size, self.limits, self.differs, self.ran)
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
        self.acting = 0  # the rank whose effects are carried out

    def draw_width(self) -> int:
        """Any width that the limits allow, in place of the planner's own choice."""
        return self.widths.randint(1, self.limits.width) if self.limits.width > 1 else 1

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
            self.acting = rank
            self.perform(self.ranks[rank].on(event, run.now))  # type: ignore[arg-type]
        except Violation:
            raise
        except Exception as e:
            if not self.broken:
                raise Violation(f"rank {rank} raised {type(e).__name__}: {e}") from e
            self.give_up(f"rank {rank} raised {type(e).__name__}: {e}")

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

    def device(self, effect: DeviceEffect) -> None:
        rank, stream = self.acting, self.stream
        match effect:
            case Launch():
                self.forward(rank, effect.batch)
                stream.sample(rank, effect.batch.seq, None, frozenset())
            case LaunchForward():
                self.forward(rank, effect.batch)
            case LaunchSample():
                stream.sample(rank, effect.seq, effect.masks, effect.discarded)
            case InitSlot():
                stream.queue(rank, effect, (effect.slot, effect.request.id))
            case SetState() | Offload() | Restore():
                stream.queue(rank, effect, (type(effect), *effect))
            case _:
                assert_never(effect)

    def prepare(self, effect: Prepare) -> None:
        run = self.run
        run.at(run.now + STEP * self.random.random(), self.make, (self.acting, effect))

    def send_to_front(self, effect: SendToFront) -> None:
        self.run.tell(effect.message)

    def span(self, effect: Span) -> None:
        """Host times are not used here."""

    def wake(self, effect: Wake) -> None:
        self.wake_at = effect.at
        self.run.at(effect.at, self.tick, effect.at)

    def send(self, effect: Send) -> None:
        message = effect.message
        loss = ""
        if isinstance(message, Entry):
            self.run.wrote(message)
            loss = "lose_entry"
        elif isinstance(message, RequestBody):
            loss = "lose_body"
        for i in range(1, self.size):
            if loss and self.faults and self.hits(loss, i):
                self.broken = True
                continue
            self.run.at(self.delay(0, i), self.deliver, (i, message))

    def deliver(self, what: tuple[int, Entry | RequestBody | Forget]) -> None:
        self.on(*what)
        if len(self.ranks[what[0]].entries) > MAX_UNANSWERED_ENTRIES + 1:
            raise Violation(f"rank {what[0]} holds {len(self.ranks[what[0]].entries)} entries")

    def hits(self, kind: str, rank: int) -> bool:
        """Whether the fault of this kind is due at this event of the rank."""
        fault = self.faults.get((kind, rank))
        if fault is None:
            return False
        n = self.counts[kind, rank] = self.counts.get((kind, rank), -1) + 1
        return n == fault.nth

    def make(self, what: tuple[int, Prepare]) -> None:
        rank, effect = what
        try:
            ready = ResourcesReady(effect.id, {each.kind: ToyMatcher(each.spec) for each in effect.resources})
        except ValueError as e:
            ready = ResourcesReady(effect.id, {}, str(e))
        self.on(rank, ready)

    def forward(self, rank: int, batch: Batch) -> None:
        if self.faults and self.hits("raise", rank):
            self.broken = True
            raise Raised("an injected fault")
        if len(self.ranks[rank].replica.flights) > MAX_UNSETTLED_STEPS:
            raise Violation(f"rank {rank} has {len(self.ranks[rank].replica.flights)} steps in flight")
        columns = (batch.slots, batch.starts, batch.counts, batch.sampled, batch.pages)
        self.stream.queue(rank, batch, (batch.seq, *(c.tobytes() for c in columns), batch.saves))

    def differs(self, text: str) -> None:
        """Ranks queue different operations. Without an injected fault this is a violation; with one, the device hangs."""
        if not self.broken:
            raise Violation(text)

    def ran(self, batch: Batch, outcome: Outcome) -> None:
        """A step starts, after the one before it; each rank will see its outcome."""
        begin = max(self.run.now, self.device_free)
        self.device_free = end = begin + STEP + TOKEN * batch.tokens
        for rank in range(self.size):
            late = max(self.last[2][rank], end + self.scenario.jitter * self.random.random() * self.scenario.slow[rank])
            self.last[2][rank] = late
            self.run.at(late, self.arrive, (rank, outcome))

    def reply(self, effect: SendReply) -> None:
        """Every rank's digest of an entry must be the first one's; then a follower's reply goes its way."""
        rank, reply = self.acting, effect.reply
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

    def poison(self, effect: Poison) -> None:
        self.give_up(effect.reason)

    def give_up(self, reason: str) -> None:
        self.dead = True
        self.reason = reason
        if not self.broken:
            raise Violation(f"the group was poisoned without a fault: {reason}")
        self.run.poisoned(self)

    def strike(self, fault: Fault) -> None:
        """A rank dies, which the supervisor sees soon, or stops, which it sees after the step timeout."""
        if self.dead:
            return
        if fault.kind == "stop" and fault.seconds < STEP_TIMEOUT_S / 2:
            self.frozen[fault.rank] = self.run.now + fault.seconds
            return
        self.broken = True
        self.frozen[fault.rank] = 1e9
        self.run.at(self.run.now + (0.01 if fault.kind == "die" else STEP_TIMEOUT_S), self.bury, fault)

    def bury(self, fault: Fault) -> None:
        if not self.dead:
            self.give_up(f"rank {fault.rank} " + ("ended by itself" if fault.kind == "die" else "makes no progress"))

    def beat(self) -> None:
        """The regular work of driver and supervisor: an idle leader's tick, and the check of the progress."""
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
        elif now - self.progress[1] > STEP_TIMEOUT_S:
            self.give_up(f"no progress for {STEP_TIMEOUT_S:g} s, at {mark}")

    def bounds(self) -> None:
        leader = self.leader
        if leader.next - leader.acknowledged > MAX_UNANSWERED_ENTRIES + 2 or len(leader.sealed) > MAX_UNANSWERED_ENTRIES + 2:
            raise Violation(f"{leader.next - leader.acknowledged} entries are unanswered")
        waiting = len(leader.planner.queue) + len(leader.preparing)
        if waiting > self.scenario.max_queue:
            raise Violation(f"{waiting} requests wait where {self.scenario.max_queue} may")
