"""The machine of a rank: plan, launch, settle.

No I/O, threads, clocks or sockets live here. `on(event, now)` yields effects, and each is carried out before the machine goes
on. All waiting is explicit in `entries`, `outcomes` and `late`, so the checker can copy, compare and explore a machine.

The leader writes entries, and followers apply them. One step passes three phases:

    plan     choose the rows (leader) and move the replica past them (every rank)
    launch   queue the device work; queued work is never cancelled
    settle   apply the outcome: on the leader when it arrives, on a follower at the mark (`settled_to`) that names it

Serial and asynchronous scheduling differ only in how many steps may be in flight when the next one is planned.
"""

from collections import deque
from collections.abc import Iterator

from slipstream.errors import BadEntry, Diverged
from slipstream.log.batch import Batch, Outcome
from slipstream.log.entries import LATE_SAMPLE, Drop, Entry, Forget, Prepared, Reply, RequestBody
from slipstream.log.grammar import masks
from slipstream.log.replica import Replica
from slipstream.log.request import Request
from slipstream.log.settling import Settled
from slipstream.log.state import ENDED
from slipstream.rank.events import (
    Arrived,
    Effect,
    Event,
    Launch,
    LaunchForward,
    LaunchSample,
    Prepare,
    ResourcesReady,
    SendReply,
    Span,
)


class Rank:
    """A follower, and the base of the leader."""

    def __init__(self, rank: int, replica: Replica):
        self.rank = rank
        self.replica = replica
        self.entries: deque[Entry] = deque()  # received, not applied yet
        self.outcomes: deque[Outcome] = deque()  # arrived, not settled yet
        # a step whose forward is queued while its sampling waits for its masks
        self.late: tuple[Entry, Batch, tuple[bool, ...]] | None = None
        self.applied = -1
        self.received = -1  # the last entry that arrived
        self.side_messages = 0  # messages of other kinds since the last entry: received by a follower, sent by the leader

    def on(self, event: Event, now: float = 0.0) -> Iterator[Effect]:
        """Takes one event and yields its effects. Only a leader uses `now` (seconds)."""
        yield from self.take(event)
        yield from self.advance()

    def take(self, event: Event) -> Iterator[Effect]:
        """Records an event. Entries and outcomes wait for `advance`."""
        if isinstance(event, Entry):
            self.receive(event)
        elif isinstance(event, RequestBody):
            self.side_messages += 1
            yield from self.receive_request(event.request)
        elif isinstance(event, ResourcesReady):
            yield from self.prepared(event)
        elif isinstance(event, Forget):
            self.side_messages += 1
            self.replica.forget(event.id)
        elif isinstance(event, Arrived):
            self.outcomes.append(event.outcome)

    def receive_request(self, request: Request) -> Iterator[Effect]:
        """Receives a request ahead of its Admit and prepares its resources."""
        self.replica.receive(request)
        if request.resources:
            yield Prepare(request.id, request.resources)

    def receive(self, entry: Entry) -> None:
        """Receives an entry. Raises Diverged if a message before it is missing.

        Some missing messages change no digest, so no other check would find them.
        """
        if entry.seq != self.received + 1:
            text = f"rank {self.rank} was sent entry {entry.seq} where {self.received + 1} was due"
            raise Diverged(text, self.rank, entry.seq)
        if entry.side_messages != self.side_messages:
            sent = f"{entry.side_messages} bodies and forgets were sent before entry {entry.seq}"
            text = f"{sent}; rank {self.rank} received {self.side_messages} of them"
            raise Diverged(text, self.rank, entry.seq)
        self.entries.append(entry)
        self.received, self.side_messages = entry.seq, 0

    def advance(self) -> Iterator[Effect]:
        """Applies entries in order, as far as the outcomes that they name have arrived."""
        while True:
            if self.late is not None:
                if not (yield from self.settle_while(lambda: len(self.replica.flights) > 1)):
                    return
                yield from self.finish_late()
            if not self.entries:
                return
            entry = self.entries[0]
            if not (yield from self.settle_while(lambda mark=entry.settled_to: self._unsettled_through(mark))):
                return
            self.entries.popleft()
            existed = yield from self.apply(entry)
            yield Span("plan", entry.seq)
            yield from self.launch(entry, existed)

    def _unsettled_through(self, mark: int) -> bool:
        flights = self.replica.flights
        return bool(flights) and flights[0].seq <= mark

    # --- settle

    def settle_while(self, wanted) -> Iterator[Effect]:
        """Settles the oldest step while `wanted()`; returns False where its outcome has not arrived yet."""
        while wanted():
            if not self.outcomes:
                return False
            outcome = self.outcomes.popleft()
            try:
                settled = self.replica.settle(outcome)
            except BadEntry as e:
                raise self.refusal(outcome.seq, e) from e
            yield from self.committed(outcome, settled)
            yield Span("settle", outcome.seq)
        return True

    def committed(self, outcome: Outcome, settled: Settled) -> Iterator[Effect]:
        """Yields the effects of a settle outside the replica. A follower has none."""
        return iter(())

    def refusal(self, entry: int, why: BadEntry) -> Diverged:
        """The error of an entry that does not fit the replica. Digests cannot show an error that all ranks share."""
        return Diverged(f"rank {self.rank} refuses entry {entry}: {why}", self.rank, entry)

    # --- plan: the commands of a written entry

    def apply(self, entry: Entry) -> Iterator[Effect]:
        """Applies an entry's commands; returns, for each drop, whether the request was there."""
        existed: list[bool] = []
        for command in entry.commands:
            try:
                result = self.replica.apply(command)
            except BadEntry as e:
                raise self.refusal(entry.seq, e) from e
            if isinstance(command, Drop):
                existed.append(bool(result))
        yield from self.device_ops()
        return tuple(existed)

    def device_ops(self) -> Iterator[Effect]:
        """The device operations of the commands, in order."""
        ops, self.replica.ops = self.replica.ops, []
        yield from ops

    def prepared(self, event: ResourcesReady) -> Iterator[Effect]:
        """Reports that a request's resources are made. The leader admits the request when every rank has reported."""
        if event.id in self.replica.bodies:
            self.replica.prepare(event.id, event.made)
            yield SendReply(Prepared(self.rank, event.id, event.error))

    # --- launch

    def launch(self, entry: Entry, existed: tuple[bool, ...]) -> Iterator[Effect]:
        """Queues the entry's step, if it has one, and answers."""
        if entry.step is not None:
            try:
                batch = self.replica.launch(entry.seq, entry.step)
            except BadEntry as e:
                raise self.refusal(entry.seq, e) from e
            self.launched(entry, batch)
            if not self.replica.masked(batch):
                yield Launch(batch)
            else:
                yield LaunchForward(batch)
                if entry.step.order == LATE_SAMPLE:
                    self.late = (entry, batch, existed)
                    yield Span("launch", entry.seq)
                    return
                yield self.sampling(batch)
        yield from self.answer(entry, existed)
        if entry.step is not None:
            yield Span("launch", entry.seq)

    def launched(self, entry: Entry, batch: Batch) -> None:
        """Records a launch. A follower records nothing."""

    def finish_late(self) -> Iterator[Effect]:
        """Samples the late step. Every token that its masks depend on is settled now."""
        assert self.late is not None
        entry, batch, existed = self.late
        self.late = None
        yield self.sampling(batch)
        yield from self.answer(entry, existed)
        yield Span("launch", entry.seq)

    def sampling(self, batch: Batch) -> LaunchSample:
        replica = self.replica
        judged = batch.judged
        rows = list(zip(batch.slots[judged].tolist(), batch.sampled[judged].tolist(), strict=True))
        over = frozenset(s for s, _ in rows if replica.phase[s] == ENDED)
        bound = [(s, sampled) for s, sampled in rows if s in replica.matchers and s not in over]
        found = {s: masks(replica.matchers[s], replica.drafts.get(s, ()), sampled) for s, sampled in bound}
        return LaunchSample(batch.seq, found, over)

    def answer(self, entry: Entry, existed: tuple[bool, ...]) -> Iterator[Effect]:
        self.applied = entry.seq
        yield SendReply(Reply(self.rank, entry.seq, self.replica.seal(), existed))

    # --- copies for the checker

    def copy(self) -> "Rank":
        other = type(self).__new__(type(self))
        other.__dict__.update(self.__dict__)
        other.replica = self.replica.copy()
        other.entries, other.outcomes = self.entries.copy(), self.outcomes.copy()
        return other

    def state(self) -> tuple[object, ...]:
        """A hashable value that two equal machines share."""
        return (
            self.replica.state(),
            tuple(self.entries),
            tuple((o.seq, o.tokens.tobytes(), o.accepted.tobytes()) for o in self.outcomes),
            tuple(self.replica.bodies),
            tuple(self.replica.prepared),
            self.late and (self.late[0], self.late[2]),
            self.applied,
            self.side_messages,
        )
