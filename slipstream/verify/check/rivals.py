"""Other protocols for the same problem. Each is the production machine with one rule changed.

Two gate a step: it is written ahead, as in the log, but a rank queues it only when the gate opens.
"""

from collections.abc import Iterator

import msgspec

from slipstream.log.entries import Drop, Entry, Reply, RequestBody
from slipstream.log.replica import Replica
from slipstream.log.state import Ended
from slipstream.rank.events import Effect, Event, Send, SendReply
from slipstream.rank.leader import Leader
from slipstream.rank.loop import Rank
from slipstream.schedule.planner import Plan, Planner
from slipstream.verify.check.leases import EarlyLeader, EarlyRank, LeaseLeader, LeasePlanner, LeaseRank, LeaseReplica
from slipstream.verify.check.world import Expire, Protocol

# --- run-ahead with cancel


class Retract(msgspec.Struct, frozen=True, array_like=True, tag=110):
    """The leader takes entry `seq` back."""

    seq: int


class CancelRank(Rank):
    """Drops a retracted entry that it has not run."""

    def take(self, event: Event | Retract) -> Iterator[Effect]:
        if isinstance(event, Retract):
            if self.entries and self.entries[-1].seq == event.seq:
                self.entries.pop()
        else:
            yield from super().take(event)

    def receive(self, entry: Entry) -> None:
        """An entry that was taken back comes again, with something else in it."""
        self.entries.append(entry)


class CancelLeader(Leader):
    """Publishes the next step and holds its own launch back: where the running step ends a request, it takes the entry back."""

    held: tuple[Entry, Plan, Replica, Planner] | None = None  # and what replica and planner were before

    before: tuple[Replica, Planner] | None = None

    @property
    def launches_whole(self) -> bool:
        if self.held is not None or not super().launches_whole:
            return False
        if self.replica.flights:
            replica = self.replica.copy()
            self.before = (replica, self.planner.copy(replica))
        return True

    def write(self, plan: Plan) -> Iterator[Effect]:
        if not self.replica.flights or plan.step is None:
            yield from super().write(plan)
            return
        assert self.before is not None
        entry = Entry(self.next, self.replica.settled_to, tuple(plan.commands), plan.step)
        for request in plan.admitted:
            yield Send(RequestBody(request))
        yield Send(entry)
        self.next += 1
        self.held = (entry, plan, *self.before)

    def settle_arrived(self) -> Iterator[Effect]:
        if self.held is not None and self.outcomes:
            entry, plan, replica, planner = self.held
            self.held = None
            if replica.copy().settle(self.outcomes[0]).ended:
                self.replica, self.planner = replica, planner
                self.next = entry.seq
                yield Send(Retract(entry.seq))  # type: ignore[arg-type]
            else:
                yield from self.go(entry, plan)
        yield from super().settle_arrived()

    def check_reply(self, reply: Reply) -> Iterator[Effect]:
        if reply.seq < self.next:  # else it answers an entry that was taken back
            yield from super().check_reply(reply)

    def go(self, entry: Entry, plan: Plan) -> Iterator[Effect]:
        """The rest of `write`."""
        self.marked = entry.settled_to
        yield from self.device_ops()
        self.ending.extend((entry.seq, ended) for ended in plan.dropped)
        yield from self.launch(entry, tuple(True for c in plan.commands if isinstance(c, Drop)))

    def copy(self):
        other = super().copy()
        assert isinstance(other, CancelLeader)
        if self.held is not None:
            replica = self.held[2].copy()
            other.held = (*self.held[:2], replica, self.held[3].copy(replica))
        return other

    def state(self) -> tuple[object, ...]:
        return (self.held and (self.held[0], self.held[2].state()), *super().state())


# --- per-rank verdict with local clocks


TIMED_OUT = -2  # in place of the count of kept tokens


class ClockRank(Rank):
    """Ends a request when its own clock says so."""

    def take(self, event: Event | Expire) -> Iterator[Effect]:
        if isinstance(event, Expire):
            for slot in [s for s, r in self.replica.requests.items() if r.id == event.id]:
                self.replica.apply(Drop(slot, event.id))
        else:
            yield from super().take(event)


class ClockPlanner(Planner):
    """Does not write a drop for a request whose time is over: every rank sees that by its own clock."""

    def _drop_one(self, plan: Plan, ended: Ended, kept: int) -> None:
        super()._drop_one(plan, ended, kept)
        if kept == TIMED_OUT:
            plan.commands.pop()


class ClockLeader(Leader):
    def take(self, event: Event | Expire) -> Iterator[Effect]:
        if isinstance(event, Expire):
            self.planner.abort(event.id, TIMED_OUT)
        else:
            yield from super().take(event)


# --- gates


class GatedRank(Rank):
    """Holds the launch of a step back until its gate opens."""

    gate: tuple[Entry, tuple[bool, ...]] | None = None

    def advance(self) -> Iterator[Effect]:
        if self.gate is not None:
            yield from self.knock()
        if self.gate is None:
            yield from super().advance()

    def launch(self, entry: Entry, existed: tuple[bool, ...]) -> Iterator[Effect]:
        if entry.step is None:
            yield from super().launch(entry, existed)
            return
        self.gate = (entry, existed)
        yield from self.knock()

    def knock(self) -> Iterator[Effect]:
        """Looks whether the gate may open."""
        raise NotImplementedError

    def open(self) -> Iterator[Effect]:
        assert self.gate is not None
        entry, existed = self.gate
        self.gate = None
        yield from super().launch(entry, existed)

    @property
    def parents_here(self) -> bool:
        """Whether the outcomes of all steps before the gated one have arrived."""
        return len(self.outcomes) >= len(self.replica.flights)

    def state(self) -> tuple[object, ...]:
        return (self.gate, *super().state())


class GatedLeader(GatedRank, Leader):
    """A leader settles as its followers do: not while a step is gated, so that the replicas take the same way."""

    @property
    def launches_whole(self) -> bool:
        return self.gate is None and super().launches_whole


class VerdictRank(GatedRank):
    """Each rank looks at the parent's outcome: it submits the step, or clears it where that ended one of its requests."""

    def knock(self) -> Iterator[Effect]:
        if not self.parents_here:
            return
        assert self.gate is not None
        entry, existed = self.gate
        if self.cleared(entry):
            self.gate = (msgspec.structs.replace(entry, step=None), existed)
        yield from self.open()

    def cleared(self, entry: Entry) -> bool:
        flights, scratch = self.replica.flights, self.replica.copy()
        return bool(flights) and any(scratch.settle(outcome).ended for outcome in self.outcomes)


class VerdictLeader(VerdictRank, GatedLeader):
    def launched(self, entry: Entry, batch) -> None:
        Leader.launched(self, entry, batch)


class Ready(msgspec.Struct, frozen=True, array_like=True, tag=111):
    """A rank could launch entry `seq`: all before it has arrived."""

    rank: int
    seq: int


class Commit(msgspec.Struct, frozen=True, array_like=True, tag=112):
    """Every rank may launch entry `seq`."""

    seq: int


class CommitRank(GatedRank):
    """Says when it is ready, and waits for the leader's word."""

    said = -1

    def take(self, event: Event | Commit) -> Iterator[Effect]:
        if isinstance(event, Commit):
            yield from self.open()
        else:
            yield from super().take(event)

    def knock(self) -> Iterator[Effect]:
        assert self.gate is not None
        seq = self.gate[0].seq
        if self.parents_here and self.said < seq:
            self.said = seq
            yield SendReply(Ready(self.rank, seq))  # type: ignore[arg-type]

    def state(self) -> tuple[object, ...]:
        return (self.said, *super().state())


class CommitLeader(GatedLeader):
    def __init__(self, *args):
        super().__init__(*args)
        self.heard: dict[int, frozenset[int]] = {}  # entry -> followers that are ready

    def take(self, event: Event | Ready) -> Iterator[Effect]:
        if isinstance(event, Ready):
            self.heard[event.seq] = self.heard.get(event.seq, frozenset()) | {event.rank}
        else:
            yield from super().take(event)

    def knock(self) -> Iterator[Effect]:
        assert self.gate is not None
        seq = self.gate[0].seq
        if self.parents_here and len(self.heard.get(seq, ())) == len(self.replied):
            self.heard.pop(seq, None)
            yield Send(Commit(seq))  # type: ignore[arg-type]
            yield from self.open()

    def copy(self):
        other = super().copy()
        assert isinstance(other, CommitLeader)
        other.heard = dict(self.heard)
        return other

    def state(self) -> tuple[object, ...]:
        *core, early = super().state()
        return (*core, (early, tuple((seq, tuple(sorted(r))) for seq, r in self.heard.items())))


LOG = Protocol("the log", LeaseLeader, LeaseRank, LeasePlanner, LeaseReplica)

PROTOCOLS = (
    Protocol("run-ahead with cancel", CancelLeader, CancelRank, fails=True),
    Protocol("per-rank verdict with local clocks", ClockLeader, ClockRank, ClockPlanner, fails=True, clocks=True),
    Protocol("early free", EarlyLeader, EarlyRank, LeasePlanner, LeaseReplica, fails=True),
    Protocol("gated commit", CommitLeader, CommitRank),
    Protocol("verdict gate", VerdictLeader, VerdictRank),
    LOG,
)
