"""The leader's driver: front ends, followers' replies, the load, and the clock that the machine does not have."""

import select
import socket
import time
from dataclasses import dataclass

import numpy as np

from slipstream.errors import Diverged
from slipstream.log.batch import Offload, Restore
from slipstream.process.channel import LeaderEnd
from slipstream.process.protocol import Abort, Finished, Load, Refused, Submit, Tokens
from slipstream.rank.driver import IDLE_TIMEOUT_S, Driver, Parts
from slipstream.rank.events import DeviceEffect, Event, Poison, Send, SendToFront, Tick, Wake
from slipstream.rank.front_link import FrontLink
from slipstream.rank.leader import HEARTBEAT_S, Leader
from slipstream.system.say import say

LOAD_INTERVAL_S = 0.1  # between two messages about the load
SLOW_FRONT_BYTES = 8 << 20  # if a front end leaves more than this unread, the group waits for it ...
SLOW_FRONT_PAUSE_S = 0.05  # ... at most this long a turn, so that other requests and the heartbeat go on


@dataclass
class Choices:
    """The requests that came in one message. The record lives until the last of them has ended."""

    link: FrontLink  # to the front end that sent them
    weight: int  # bytes that they take together
    left: int  # requests that have not ended

    @classmethod
    def of(cls, link: FrontLink, message: Submit) -> "Choices":
        """The weight counts the Python objects of the fields that a client can make large. A bias is a tuple of two numbers."""
        request, sampling, count = message.request, message.request.sampling, 1 + len(message.more)
        words = sum(64 + 40 * len(word) for word in sampling.bad_words)
        shared = len(request.prompt) + len(request.prediction) + len(request.grammar) + 160 * len(sampling.logit_bias) + words
        return cls(link, shared + 2048 * count, count)


class LeaderDriver(Driver):
    machine: Leader

    def __init__(self, machine: Leader, parts: Parts, channel: LeaderEnd, queue_bytes: int):
        """`queue_bytes`: bytes that the waiting and running requests may take."""
        super().__init__(machine, parts)
        self.channel = channel
        self.fronts: dict[int, FrontLink] = {}
        self.owner: dict[int, Choices] = {}  # by request id
        self.queue_bytes, self.held_bytes = queue_bytes, 0
        self.wake_at: float | None = None
        self.news = False  # whether an event came since the last plan
        self.seconds: dict[str, float] = dict.fromkeys(("plan", "publish", "launch", "settle"), 0.0)
        self.pages_copied = {"offload": 0, "restore": 0}
        self._load: Load | None = None
        self._load_at = 0.0
        self._due: tuple[int, int] | None = None  # (rank, entry) of the next answer that is missing
        self._due_since = 0.0
        for fd in channel.descriptors():
            self._poll.register(fd, select.POLLIN)

    def timeout(self) -> float:
        if self._falls_idle():
            return 0.0
        if self.wake_at is None:
            return IDLE_TIMEOUT_S
        return min(max(self.wake_at - time.monotonic(), 0.0), IDLE_TIMEOUT_S)

    def waiting_for(self) -> int | None:
        machine = self.machine
        late = [rank for rank, seq in machine.replied.items() if seq < machine.applied]
        return min(late, key=lambda rank: machine.replied[rank]) if late else None

    def report_wait(self, now: float) -> None:
        """Raises Diverged for a follower whose loop runs but does not answer. On the board it looks like an idle one."""
        super().report_wait(now)
        rank = self.waiting_for()
        due = None if rank is None else (rank, self.machine.replied[rank] + 1)
        if due != self._due:
            self._due, self._due_since = due, now
        elif due is not None and now - self._due_since > self.channel.patience:
            raise Diverged(f"rank {due[0]} has not answered entry {due[1]} for {self.channel.patience:g} s", *due)

    def on_control(self) -> bool:
        got = self.control.receive()
        if got is None:
            return False
        link = FrontLink(socket.socket(fileno=got[1][0]))
        self.fronts[link.fileno()] = link
        self._poll.register(link.fileno(), select.POLLIN)
        self._load = None
        return True

    def turn(self, ready: set[int], now: float) -> None:
        """Drains every inbox, removes closed links, publishes the load, and then admits and plans once.

        Outcomes and grammars were taken before this. An earlier plan would miss requests that arrive at the same moment.
        """
        machine = self.machine
        for reply in self.channel.receive():
            self.take(reply, now)
        for fd in ready & self.fronts.keys():
            self.drain(self.fronts[fd], now)
        self.publish_load(now)
        if (self.wake_at is not None and self.wake_at <= now) or now - machine.written_at >= HEARTBEAT_S:
            self.wake_at = None
            self.take(Tick(), now)
        if self.news:
            self.news = False
            self.perform(machine.advance())
        self.ease()
        for link in list(self.fronts.values()):
            self.push(link, now)

    def take(self, event: Event, now: float) -> None:
        """Records the event. The turn plans when all inboxes are drained."""
        self.news = True
        self.machine.now = now
        self.perform(self.machine.take(event))

    def ease(self) -> None:
        """Waits a moment for front ends that read more slowly than the group generates, so that they need not be cut off."""
        end = time.monotonic() + SLOW_FRONT_PAUSE_S
        while behind := [link for link in self.fronts.values() if link.unsent > SLOW_FRONT_BYTES and not link.closed]:
            left = end - time.monotonic()
            if left <= 0 or not select.select([], behind, [], left)[1]:
                return
            for link in behind:
                link.flush()

    def drain(self, link: FrontLink, now: float) -> None:
        fd = link.fileno()
        for message in link.receive():
            if isinstance(message, Submit):
                self.submit(Choices.of(link, message), message, now)
            else:
                self.take(message, now)
        if link.closed:
            self.forget(fd, link, now)

    def submit(self, choices: Choices, message: Submit, now: float) -> None:
        if self.held_bytes + choices.weight > self.queue_bytes:
            text = f"the requests that wait and run take {self.held_bytes >> 20} MiB (--queue-memory-bytes); try again later"
            for id in (message.request.id, *message.more):
                choices.link.queue(Refused(id, 429, text))
            return
        self.held_bytes += choices.weight
        for id in (message.request.id, *message.more):
            self.owner[id] = choices
        self.take(message, now)

    def disown(self, id: int) -> FrontLink | None:
        """Forgets a request that has ended; returns its front end's link."""
        choices = self.owner.pop(id, None)
        if choices is None:
            return None
        choices.left -= 1
        if not choices.left:
            self.held_bytes -= choices.weight
        return choices.link

    def link_of(self, id: int) -> FrontLink | None:
        choices = self.owner.get(id)
        return choices and choices.link

    def push(self, link: FrontLink, now: float) -> None:
        fd = link.fileno()
        link.flush()
        if link.closed:
            self.forget(fd, link, now)
        else:
            self._poll.modify(fd, select.POLLIN | (select.POLLOUT if link.unsent else 0))

    def forget(self, fd: int, link: FrontLink, now: float) -> None:
        """Ends the requests of a front end whose link is closed. If the front end still runs, its socket reports the end."""
        say(f"the leader has lost a front end: {link.closed}")
        self._poll.unregister(fd)
        del self.fronts[fd]
        for id in [id for id, choices in self.owner.items() if choices.link is link]:
            self.disown(id)
            self.take(Abort(id), now)

    def _falls_idle(self) -> bool:
        """Whether the last request has ended and the front ends do not know it yet."""
        return bool(self._load and self._load.running and not self.machine.replica.requests)

    def publish_load(self, now: float) -> None:
        if now - self._load_at < LOAD_INTERVAL_S and not self._falls_idle():
            return
        machine, replica = self.machine, self.machine.replica
        counters = machine.planner.counters
        load = Load(
            running=len(replica.requests),
            waiting=machine.waiting,
            pages_used=replica.cache.held,
            pages_total=replica.cache.total,
            steps=dict(machine.steps),
            host_seconds=dict(self.seconds),
            step_tokens=machine.step_tokens,
            prefix_queries=counters.prefix_queries,
            prefix_hits=counters.prefix_hits,
            preemptions=counters.preemptions,
            eager_steps=dict(self.executor.eager_steps),
            pages_copied=dict(self.pages_copied),
            drafts={"rows": counters.drafts.rows, "drafts": counters.drafts.drafts, "accepted": counters.drafts.accepted},
            drafts_accepted_at=dict(enumerate(counters.drafts.accepted_at)),
        )
        self._load_at = now
        if load != self._load:
            self._load = load
            machine.step_tokens = []
            for link in self.fronts.values():
                link.queue(load)

    def device(self, effect: DeviceEffect) -> None:
        super().device(effect)
        if isinstance(effect, Offload):
            self.pages_copied["offload"] += len(effect.pages)
        elif isinstance(effect, Restore):
            self.pages_copied["restore"] += len(effect.pages)

    def count(self, phase: str, nanoseconds: int) -> None:
        self.seconds[phase] += nanoseconds * 1e-9

    def send(self, effect: Send) -> None:
        self.channel.send(effect.message)

    def wake(self, effect: Wake) -> None:
        self.wake_at = effect.at

    def poison(self, effect: Poison) -> None:
        raise Diverged(effect.reason, effect.rank, effect.entry)

    def send_to_front(self, effect: SendToFront) -> None:
        message = effect.message
        if isinstance(message, Tokens):
            self.send_tokens(message)
        elif not isinstance(message, Load):
            last = isinstance(message, Finished | Refused)
            link = self.disown(message.id) if last else self.link_of(message.id)
            if link is not None and not link.closed:
                link.queue(message)

    def send_tokens(self, message: Tokens) -> None:
        """Sends each front end one message with the columns of its own requests."""
        links = list(self.fronts.values())
        if len(links) == 1:
            links[0].queue(message)
            return
        ids = np.frombuffer(message.ids, "<i8")
        tokens = np.frombuffer(message.tokens, "<i4")
        owners = [self.link_of(id) for id in ids.tolist()]
        for link in links:
            own = [i for i, owner in enumerate(owners) if owner is link]
            if own:
                logprobs = message.logprobs and {k: message.logprobs[i] for k, i in enumerate(own) if i in message.logprobs}
                drafts = message.drafts and {id: n for id, n in message.drafts.items() if self.link_of(id) is link}
                link.queue(Tokens(ids[own].tobytes(), tokens[own].tobytes(), logprobs or None, drafts or None))
