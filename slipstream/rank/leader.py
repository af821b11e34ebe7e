"""The leader's machine: a rank that also writes the log.

The leader settles an outcome when it arrives and names it in its next entry. So `settled_to` names no outcome that has not
arrived. The leader plans when the device can take one more step: in serial scheduling when no step is in flight, in
asynchronous scheduling when at most one is. It then plans as late as the device allows, so that a request that arrives
meanwhile joins the very next step.
"""

from collections import Counter, deque
from collections.abc import Iterator
from typing import NamedTuple

from slipstream.log.batch import Batch, Outcome
from slipstream.log.entries import ORDERS, Drop, Entry, Forget, Prepared, Reply, RequestBody
from slipstream.log.replica import Replica
from slipstream.log.request import Request
from slipstream.log.settling import Settled
from slipstream.log.state import Ended
from slipstream.process.protocol import Abort, Finished, PromptLogprobs, Refused, Started, Submit, Tokens
from slipstream.rank.events import (
    Arrived,
    Effect,
    Event,
    Poison,
    ResourcesReady,
    Send,
    SendReply,
    SendToFront,
    Span,
    Wake,
)
from slipstream.rank.loop import Rank
from slipstream.schedule.budget import StepLoad
from slipstream.schedule.planner import Plan, Planner

MAX_UNANSWERED_ENTRIES = 64  # entries that may lack a reply
MAX_GRAMMAR_BYTES = 1 << 20  # a message must fit into the channel
HEARTBEAT_S = 1.0  # after so long, an idle leader writes an empty entry
LEAD_SHARE = 0.25  # a step is planned when this share of the running one is left, and `lead_s` before that
MIN_LEAD_S = 0.001  # `lead_s` at first and at least; it doubles when a step comes too late for the device ...
LEAD_DECAY_FACTOR = 0.99  # ... and falls by this factor with each step that comes in time
MAX_LEAD_S = 0.1


class StepTiming(NamedTuple):
    """A launched step whose time the leader measures."""

    seq: int
    at: float  # time of the launch, seconds
    load: StepLoad
    rows: int  # of decoding requests ...
    width: int  # ... and the most tokens that each could give


def load_of(batch: Batch) -> StepLoad:
    d = batch.decodes
    decode_tokens = int(batch.counts[:d].sum()) if batch.width > 1 else d
    prompt_tokens = batch.tokens - decode_tokens
    context = float(batch.starts[d:].astype(float) @ batch.counts[d:]) / prompt_tokens if prompt_tokens else 0.0
    return StepLoad(decode_tokens, prompt_tokens, context)


class Leader(Rank):
    def __init__(self, replica: Replica, planner: Planner, size: int, asynchronous: bool):
        super().__init__(0, replica)
        self.planner = planner
        self.depth = 2 if asynchronous else 1  # steps in flight at most
        self.now = 0.0
        self.next = 0  # the entry to write next
        self.marked = -1  # `settled_to` of the last entry
        self.written_at = 0.0
        self.poisoned = False
        self.sealed: dict[int, tuple[int, tuple[bool, ...]]] = {}  # own digest and drops of entries that not all have answered
        self.replied = dict.fromkeys(range(1, size), -1)  # follower -> last entry it answered
        self.preparing: dict[int, tuple[Request, set[int]]] = {}  # id -> (request, ranks that have not compiled its grammar)
        self.early: dict[int, list[Reply]] = {}  # replies to entries that the leader itself has not sealed
        self.ending: deque[tuple[int, Ended]] = deque()  # (entry of the drop, request), until all ranks have answered it
        self.step_timings: deque[StepTiming] = deque()
        self.lead_s = MIN_LEAD_S
        self.arrived_at = 0.0
        self.steps: Counter[str] = Counter(dict.fromkeys(ORDERS, 0))
        self.step_tokens: list[int] = []  # tokens of each step since the reader last took them

    @property
    def acknowledged(self) -> int:
        """The last entry that every rank has answered with the same digest."""
        return min(self.applied, *self.replied.values()) if self.replied else self.applied

    @property
    def waiting(self) -> int:
        """Requests that wait for a slot, including those whose grammar is being compiled."""
        return len(self.planner.queue) + len(self.preparing)

    def on(self, event: Event, now: float = 0.0) -> Iterator[Effect]:
        if not self.poisoned:
            self.now = now
            yield from super().on(event, now)

    def take(self, event: Event) -> Iterator[Effect]:
        """Handles the messages of front ends and followers, without planning. Other events are the same on every rank."""
        if isinstance(event, Submit):
            for request in event.requests():
                yield from self.submit(request)
        elif isinstance(event, Abort):
            yield from self.abort(event)
        elif isinstance(event, Reply):
            yield from self.check_reply(event)
        elif isinstance(event, Prepared):
            yield from self.peer_prepared(event)
        else:
            if isinstance(event, Arrived):
                self.record_step_time(event.outcome)
            yield from super().take(event)

    def advance(self) -> Iterator[Effect]:
        """Settles the outcomes that have arrived, then writes entries. A follower reads them instead."""
        yield from self.settle_arrived()
        yield from self.write_entries()

    # --- requests

    def submit(self, request: Request) -> Iterator[Effect]:
        """Queues a request, or refuses it and changes nothing."""
        limits = self.replica.limits
        length = request.prompt_len + request.max_tokens
        if length > limits.max_len:
            text = f"prompt and max_tokens together are {length} tokens; at most {limits.max_len} fit"
            yield SendToFront(Refused(request.id, 400, text, "max_tokens"))
        elif limits.pages_of(length) > limits.pages:
            text = f"{length} tokens need {limits.pages_of(length)} pages; the whole cache has {limits.pages}"
            yield SendToFront(Refused(request.id, 400, text, "prompt"))
        elif self.waiting >= self.planner.queue.limit:
            yield SendToFront(Refused(request.id, 429, f"{self.waiting} requests are waiting already; try again later"))
        elif len(request.grammar) > MAX_GRAMMAR_BYTES:
            text = f"the grammar has {len(request.grammar)} bytes; at most {MAX_GRAMMAR_BYTES} are taken"
            yield SendToFront(Refused(request.id, 400, text, "response_format"))
        elif request.resources:
            self.preparing[request.id] = (request, {0, *self.replied})
            yield self.send_aside(RequestBody(request))
            yield from self.receive_request(request)
        else:
            self.planner.submit(request, self.now)

    def peer_prepared(self, message: Prepared) -> Iterator[Effect]:
        """Notes that a rank has made a request's resources. When all have, the request is queued. If one cannot, it ends."""
        request, missing = self.preparing.get(message.id, (None, set()))
        if request is None:
            return
        missing.discard(message.rank)
        if message.error:
            yield from self.unprepare(request.id)
            yield SendToFront(Refused(request.id, 400, f"the grammar cannot be used: {message.error}", "response_format"))
        elif not missing:
            del self.preparing[request.id]
            self.planner.submit(request, self.now)

    def unprepare(self, id: int) -> Iterator[Effect]:
        del self.preparing[id]
        self.replica.forget(id)
        yield self.send_aside(Forget(id))

    def prepared(self, event: ResourcesReady) -> Iterator[Effect]:
        for effect in super().prepared(event):
            assert isinstance(effect, SendReply) and isinstance(effect.reply, Prepared)
            yield from self.peer_prepared(effect.reply)

    def abort(self, event: Abort) -> Iterator[Effect]:
        if event.id in self.preparing:
            yield from self.unprepare(event.id)
        elif not self.planner.abort(event.id, event.kept):
            return  # the request is in the log, so its drop ends it; or it has ended already
        elif event.id in self.replica.bodies:
            self.replica.forget(event.id)
            yield self.send_aside(Forget(event.id))
        yield SendToFront(Finished(event.id, "abort"))

    def send_aside(self, message: RequestBody | Forget) -> Send:
        """Sends a message that is not an entry; the next entry counts it."""
        self.side_messages += 1
        return Send(message)

    # --- settle

    def settle_arrived(self) -> Iterator[Effect]:
        yield from self.settle_while(lambda: bool(self.outcomes))
        if self.late is not None and len(self.replica.flights) == 1:
            yield from self.finish_late()

    def committed(self, outcome: Outcome, settled: Settled) -> Iterator[Effect]:
        """Sends what a settle committed. Ends wait for their drop to be acknowledged."""
        if outcome.prompt_logprobs:
            for slot, id in settled.scored:
                start, rows = outcome.prompt_logprobs.get(slot, (0, []))
                if rows:
                    yield SendToFront(PromptLogprobs(id, start, rows))
        if len(settled.tokens):
            logprobs = outcome.logprobs
            found = {i: logprobs[at] for i, at in enumerate(settled.places()) if at in logprobs} if logprobs else None
            drafts = self.planner.counters.drafts.add(outcome, settled)
            yield SendToFront(Tokens(settled.ids.tobytes(), settled.tokens.tobytes(), found or None, drafts or None))

    def record_step_time(self, outcome: Outcome) -> None:
        """Learns how long the step took, from the device's report or from the times of launches and outcomes."""
        step_timings = self.step_timings.popleft()
        seconds = outcome.seconds or self.now - max(step_timings.at, self.arrived_at)
        self.arrived_at = self.now
        self.planner.budget.observe(step_timings.load, seconds)
        if self.planner.auto is not None and step_timings.rows and not step_timings.load.prompt_tokens:
            self.planner.auto.observe(step_timings.rows, step_timings.width, int(outcome.accepted.sum()), seconds)
        if self.step_timings:
            self.lead_s = max(self.lead_s * LEAD_DECAY_FACTOR, MIN_LEAD_S)
        elif self.depth > 1 and (len(self.replica.decoding) or self.replica.prefilling):
            self.lead_s = min(self.lead_s * 2, MAX_LEAD_S)  # the device has run dry: this host wakes later than it asked for

    # --- plan

    def write_entries(self) -> Iterator[Effect]:
        """Writes entries while there is something to write and the device can take it."""
        while self.launches_whole and not self.poisoned:
            depth = len(self.replica.flights)
            if depth >= self.depth or self.next - self.acknowledged > MAX_UNANSWERED_ENTRIES:
                return
            at = self.plan_at() if depth else 0.0
            if at > self.now:
                yield Wake(at)
                return
            plan = self.planner.plan(depth)
            yield Span("plan", self.next)
            if plan.step is None and not plan.commands:
                unmarked = self.replica.settled_to > self.marked and not depth
                if not unmarked and self.now - self.written_at < HEARTBEAT_S:
                    return
            yield from self.write(plan)
            if plan.step is None:
                return

    @property
    def launches_whole(self) -> bool:
        """Whether every entry is launched as a whole: none waits for its late sampling."""
        return self.late is None

    def plan_at(self) -> float:
        """The time, in seconds, to plan the next step: late, so that new requests can join, but in time for the device.

        The lead is learned, because a busy machine wakes a sleeping process late.
        """
        running = self.step_timings[0]
        expected = self.planner.budget.expected(running.load)
        return max(running.at, self.arrived_at) + expected * (1 - LEAD_SHARE) - self.lead_s

    def write(self, plan: Plan) -> Iterator[Effect]:
        """Publishes the next entry and launches its step here. The planner has already applied its commands."""
        for request in plan.admitted:
            if not request.resources:  # else followers have received it already, to make its resources
                yield self.send_aside(RequestBody(request))
        entry = Entry(self.next, self.replica.settled_to, tuple(plan.commands), plan.step, self.side_messages)
        self.next += 1
        self.side_messages = 0
        self.marked = entry.settled_to
        self.written_at = self.now
        yield Send(entry)
        yield Span("publish", entry.seq)
        yield from self.device_ops()
        for id, cached in plan.started:
            yield SendToFront(Started(id, cached))
        self.ending.extend((entry.seq, ended) for ended in plan.dropped)
        yield from self.launch(entry, tuple(True for c in plan.commands if isinstance(c, Drop)))

    def launched(self, entry: Entry, batch: Batch) -> None:
        assert entry.step is not None
        load = load_of(batch)
        self.step_timings.append(StepTiming(batch.seq, self.now, load, batch.decodes, batch.width))
        self.steps[ORDERS[entry.step.order]] += 1
        self.step_tokens.append(load.decodes + load.prompt_tokens)

    # --- replies

    def answer(self, entry: Entry, existed: tuple[bool, ...]) -> Iterator[Effect]:
        self.applied = entry.seq
        digest = self.replica.seal()
        self.sealed[entry.seq] = (digest, existed)
        yield SendReply(Reply(0, entry.seq, digest, existed))
        for reply in self.early.pop(entry.seq, ()):
            yield from self.compare(reply)
        yield from self.finish()

    def check_reply(self, reply: Reply) -> Iterator[Effect]:
        """Checks a follower's reply. Each follower answers each entry once, in order; anything else poisons the group."""
        due = self.replied.get(reply.rank)
        if due is None or reply.seq != due + 1 or reply.seq >= self.next:
            yield from self.poison(reply, f"answered entry {reply.seq} where {-1 if due is None else due + 1} was due")
        elif reply.seq not in self.sealed:
            self.replied[reply.rank] = reply.seq
            self.early.setdefault(reply.seq, []).append(reply)
        else:
            self.replied[reply.rank] = reply.seq
            yield from self.compare(reply)
            yield from self.finish()

    def compare(self, reply: Reply) -> Iterator[Effect]:
        digest, existed = self.sealed[reply.seq]
        if reply.digest != digest:
            yield from self.poison(reply, f"its digest is {reply.digest:016x}, the leader's {digest:016x}")
        elif reply.existed != existed:
            yield from self.poison(reply, f"its drops found {list(reply.existed)}, the leader's {list(existed)}")

    def poison(self, reply: Reply, reason: str) -> Iterator[Effect]:
        self.poisoned = True
        yield Poison(reply.rank, reply.seq, f"rank {reply.rank} differs at entry {reply.seq}: {reason}")

    def finish(self) -> Iterator[Effect]:
        """Reports the ends of requests whose drops every rank has answered."""
        through = self.acknowledged
        while self.ending and self.ending[0][0] <= through and not self.poisoned:
            _, ended = self.ending.popleft()
            yield SendToFront(Finished(ended.id, ended.reason, ended.error))
        for seq in [s for s in self.sealed if s <= through]:
            del self.sealed[seq]

    # --- copies for the checker

    def copy(self) -> "Leader":
        other = super().copy()
        assert isinstance(other, Leader)
        other.planner = self.planner.copy(other.replica)
        for name in ("sealed", "replied", "ending", "step_timings", "steps", "step_tokens"):
            setattr(other, name, getattr(self, name).copy())
        other.preparing = {id: (request, missing.copy()) for id, (request, missing) in self.preparing.items()}
        other.early = {seq: replies.copy() for seq, replies in self.early.items()}
        return other

    def state(self) -> tuple[object, ...]:
        """Like a rank's value. The last two items are what the leader knows of each follower. Clocks are left out."""
        planner = self.planner
        return (
            super().state(),
            self.next,
            self.marked,
            self.poisoned,
            tuple(self.sealed.items()),
            tuple((id, tuple(sorted(missing))) for id, (_, missing) in self.preparing.items()),
            tuple(self.ending),
            len(self.step_timings),
            planner.state(),
            tuple(self.replied.items()),
            tuple((seq, tuple((r.rank, r.digest, r.existed) for r in replies)) for seq, replies in self.early.items()),
        )
