"""The leader's driver: front ends, followers' replies, the load, and the clock that the machine does not have."""

import select
import socket
import sys
import time

import numpy as np

from slipstream.errors import Diverged
from slipstream.process.channel import LeaderEnd
from slipstream.process.protocol import Finished, Load, Refused, Submit, ToFront, Tokens
from slipstream.rank.driver import IDLE, Driver, Parts
from slipstream.rank.events import Aborted, Effect, Poison, Send, SendReply, SendToFront, Submitted, Tick, Wake
from slipstream.rank.front_link import FrontLink
from slipstream.rank.leader import HEARTBEAT, Leader

LOAD_EVERY = 0.1  # seconds
BEHIND_BYTES = 8 << 20  # unread by a front end, above which the group slows down for it ...
BEHIND_SECONDS = 0.05  # ... by so much a turn at most: what it serves others, and the beat that the supervisor sees, go on


class LeaderDriver(Driver):
    machine: Leader

    def __init__(self, machine: Leader, parts: Parts, channel: LeaderEnd):
        super().__init__(machine, parts)
        self.channel = channel
        self.fronts: dict[int, FrontLink] = {}
        self.owner: dict[int, FrontLink] = {}  # request id -> who asked
        self.wake_at: float | None = None
        self.seconds: dict[str, float] = dict.fromkeys(("plan", "publish", "launch", "settle"), 0.0)
        self._load: Load | None = None
        self._load_at = 0.0
        self._due: tuple[int, int] | None = None  # (rank, entry) of the answer that is waited for
        self._due_since = 0.0
        for fd in channel.descriptors():
            self._poll.register(fd, select.POLLIN)

    def timeout(self) -> float:
        if self.wake_at is None:
            return IDLE
        return min(max(self.wake_at - time.monotonic(), 0.0), IDLE)

    def waiting_for(self) -> int | None:
        machine = self.machine
        late = [rank for rank, seq in machine.replied.items() if seq < machine.applied]
        return min(late, key=lambda rank: machine.replied[rank]) if late else None

    def complain(self, now: float) -> None:
        """A follower that turns its loop but does not answer is found here: the board cannot tell it from an idle one."""
        super().complain(now)
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
        """Drain the inbox, prune what is gone, publish the load; the machine admits and plans at each event."""
        machine = self.machine
        for reply in self.channel.receive():
            self.perform(machine.on(reply, now))
        for fd in ready & self.fronts.keys():
            self.drain(self.fronts[fd], now)
        if (self.wake_at is not None and self.wake_at <= now) or now - machine.written_at >= HEARTBEAT:
            self.wake_at = None
            self.perform(machine.on(Tick(), now))
        self.publish_load(now)
        self.ease()
        for link in list(self.fronts.values()):
            self.push(link, now)

    def ease(self) -> None:
        """Waits a moment for front ends that read more slowly than the group generates, rather than cut them off for it."""
        end = time.monotonic() + BEHIND_SECONDS
        while behind := [link for link in self.fronts.values() if link.unsent > BEHIND_BYTES and not link.closed]:
            left = end - time.monotonic()
            if left <= 0 or not select.select([], behind, [], left)[1]:
                return
            for link in behind:
                link.flush()

    def drain(self, link: FrontLink, now: float) -> None:
        fd = link.fileno()
        for message in link.receive():
            if isinstance(message, Submit):
                self.owner[message.request.id] = link
                self.perform(self.machine.on(Submitted(message.request), now))
            else:
                self.perform(self.machine.on(Aborted(message.id, message.kept), now))
        if link.closed:
            self.forget(fd, link, now)

    def push(self, link: FrontLink, now: float) -> None:
        fd = link.fileno()
        link.flush()
        if link.closed:
            self.forget(fd, link, now)
        else:
            self._poll.modify(fd, select.POLLIN | (select.POLLOUT if link.unsent else 0))

    def forget(self, fd: int, link: FrontLink, now: float) -> None:
        """A front end is gone, or only its link is: it then hears so from the socket. Its clients' requests end here."""
        print(f"slipstream: the leader has lost a front end: {link.closed}", file=sys.stderr, flush=True)
        self._poll.unregister(fd)
        del self.fronts[fd]
        for id in [id for id, owner in self.owner.items() if owner is link]:
            del self.owner[id]
            self.perform(self.machine.on(Aborted(id, -1), now))

    def publish_load(self, now: float) -> None:
        if now - self._load_at < LOAD_EVERY and not (self._load and self._load.running and not self.machine.replica.requests):
            return
        machine, replica = self.machine, self.machine.replica
        counters = machine.planner.counters
        load = Load(
            running=len(replica.requests),
            waiting=machine.waiting,
            pages_used=replica.pages.held,
            pages_total=replica.pages.total,
            steps=dict(machine.steps),
            host_seconds=dict(self.seconds),
            step_tokens=machine.step_tokens,
            prefix_queries=counters.prefix_queries,
            prefix_hits=counters.prefix_hits,
            preemptions=counters.preemptions,
        )
        self._load_at = now
        if load != self._load:
            self._load = load
            machine.step_tokens = []
            for link in self.fronts.values():
                link.queue(load)

    def count(self, phase: str, nanoseconds: int) -> None:
        self.seconds[phase] += nanoseconds * 1e-9

    def talk(self, effect: Effect) -> None:
        if isinstance(effect, SendToFront):
            self.tell(effect.message)
        elif isinstance(effect, Send):
            self.channel.send(effect.message)
        elif isinstance(effect, SendReply):
            self.applied(effect)
        elif isinstance(effect, Wake):
            self.wake_at = effect.at
        elif isinstance(effect, Poison):
            raise Diverged(effect.reason, effect.rank, effect.entry)

    def tell(self, message: ToFront) -> None:
        if isinstance(message, Tokens):
            self.tell_tokens(message)
        elif not isinstance(message, Load):
            last = isinstance(message, Finished | Refused)
            link = self.owner.pop(message.id, None) if last else self.owner.get(message.id)
            if link is not None and not link.closed:
                link.queue(message)

    def tell_tokens(self, message: Tokens) -> None:
        """One message for each front end, with its own requests' columns."""
        links = list(self.fronts.values())
        if len(links) == 1:
            links[0].queue(message)
            return
        ids = np.frombuffer(message.ids, "<i8")
        tokens = np.frombuffer(message.tokens, "<i4")
        owners = [self.owner.get(id) for id in ids.tolist()]
        for link in links:
            own = [i for i, owner in enumerate(owners) if owner is link]
            if own:
                logprobs = message.logprobs and {k: message.logprobs[i] for k, i in enumerate(own) if i in message.logprobs}
                link.queue(Tokens(ids[own].tobytes(), tokens[own].tobytes(), logprobs or None))
