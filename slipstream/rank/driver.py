"""The driver: turns what arrives into events of the machine, and the machine's effects into I/O. It decides nothing.

One thread. It waits on the channel, the device, the front ends and the supervisor, takes all that is there, and waits again.
"""

import os
import select
import socket
import sys
import time
import traceback
from collections.abc import Iterable

import numpy as np

from slipstream.device.executor import Executor, StepFailed
from slipstream.errors import Diverged
from slipstream.rank.board import PHASE_ID, BoardWriter
from slipstream.rank.channel import FollowerEnd, LeaderEnd
from slipstream.rank.control import Control
from slipstream.rank.events import (
    Aborted,
    Answer,
    Arrived,
    Effect,
    Launch,
    LaunchForward,
    LaunchSample,
    Poison,
    Seat,
    Send,
    Span,
    Submitted,
    Tell,
    Tick,
    Wake,
)
from slipstream.rank.front_link import FrontLink
from slipstream.rank.leader import Leader
from slipstream.rank.loop import Rank
from slipstream.rank.protocol import Fault, Finished, Load, Refused, Submit, ToFront, Tokens

IDLE = 0.5  # seconds between turns of an idle loop, so that the board shows life
LOAD_EVERY = 0.1
COMPLAIN = 2.0  # seconds of waiting for another rank after which stderr says so, and again
SPINS = 200  # looks at the descriptors before sleeping, where cores are to spare


class Driver:
    """What both kinds of rank share."""

    def __init__(self, machine: Rank, executor: Executor, control: Control, board: BoardWriter, spare_cores: bool):
        self.machine = machine
        self.executor = executor
        self.control = control
        self.board = board
        self.spins = SPINS if spare_cores else 0
        self.entry = -1  # the last one of which anything was done, for reports
        self.waits_since: float | None = None
        self._stamp = 0
        self._poll = select.poll()
        self._poll.register(control.fileno(), select.POLLIN)
        device = executor.fileno()
        self.polls_device = device is None
        if device is not None:
            self._poll.register(device, select.POLLIN)

    def run(self) -> int:
        """Turns until the supervisor is gone (returns 0) or this rank cannot go on (returns 1, after a Fault)."""
        try:
            while True:
                ready = self.wait()
                now = time.monotonic()
                self._stamp = int(now * 1e9)
                self.board.set("beat_ns", self._stamp)
                if self.control.fileno() in ready and not self.on_control():
                    return 0
                for outcome in self.executor.outcomes():
                    self.board.set("arrived", outcome.seq)
                    self.board.set("arrived_ns", self._stamp)
                    self.perform(self.machine.on(Arrived(outcome), now))
                self.turn(ready, now)
                self.complain(now)
        except Exception as e:
            self.fault(e)
            return 1

    def fault(self, e: Exception) -> None:
        """Tells the supervisor why this rank stops."""
        rank = self.machine.rank
        entry = self.entry
        if isinstance(e, Diverged) and len(e.args) == 3:
            reason, rank, entry = e.args
        elif isinstance(e, StepFailed):
            reason = f"rank {rank} failed in the step of entry {entry}: {e}"
        else:
            reason = f"rank {rank} failed after entry {entry}: {type(e).__name__}: {e}"
            traceback.print_exc()
        print(f"slipstream: {reason}", file=sys.stderr, flush=True)
        self.board.set("state", 3)
        self.control.send(Fault(rank, entry, reason[:4000]))

    # --- waiting

    def timeout(self) -> float:
        return IDLE

    def wait(self) -> set[int]:
        for _ in range(self.spins):
            ready = self._poll.poll(0)
            if ready:
                return {fd for fd, _ in ready}
            if self.polls_device and self.machine.replica.flights:
                return set()
        if self.polls_device and self.machine.replica.flights:
            return {fd for fd, _ in self._poll.poll(0)}
        self.board.set("phase", PHASE_ID["wait"])
        return {fd for fd, _ in self._poll.poll(self.timeout() * 1e3)}

    def complain(self, now: float) -> None:
        """A rank that waits for another says so every two seconds."""
        other = self.waiting_for()
        self.board.set("waits_for", 0 if other is None else other + 1)
        if other is None:
            self.waits_since = None
        elif self.waits_since is None:
            self.waits_since = now + COMPLAIN
        elif now >= self.waits_since:
            self.waits_since = now + COMPLAIN
            print(f"slipstream: rank {self.machine.rank} waits for rank {other}", file=sys.stderr, flush=True)

    def waiting_for(self) -> int | None:
        return None

    # --- what the kinds of rank differ in

    def on_control(self) -> bool:
        """False when the supervisor is gone."""
        return self.control.receive() is not None

    def turn(self, ready: set[int], now: float) -> None:
        raise NotImplementedError

    # --- effects

    def perform(self, effects: Iterable[Effect]) -> None:
        for effect in effects:
            kind = type(effect)
            if kind is Span:
                self.span(effect)
            elif kind is Launch:
                self.launch(effect.batch.seq)
                self.executor.launch(effect.batch)
            elif kind is Seat:
                self.executor.admit(effect.slot, effect.request)
            elif kind is LaunchForward:
                self.launch(effect.batch.seq)
                self.executor.launch_forward(effect.batch)
            elif kind is LaunchSample:
                self.executor.launch_sample(effect.seq, effect.masks, effect.discarded)
            else:
                self.talk(effect)

    def launch(self, seq: int) -> None:
        self.entry = seq
        self.board.set("launched", seq)
        self.board.set("launched_ns", time.monotonic_ns())

    def span(self, span: Span) -> None:
        end = time.monotonic_ns()
        phase = PHASE_ID[span.phase]
        self.board.span(phase, self._stamp, end, span.entry, span.digest)
        self.board.set("phase", phase)
        if span.phase == "settle":
            self.board.set("settled", span.entry)
        self.count(span.phase, end - self._stamp)
        self._stamp = end

    def count(self, phase: str, nanoseconds: int) -> None:
        """Host time by phase, where somebody reads it."""

    def applied(self, answer: Answer) -> None:
        self.entry = answer.reply.seq
        self.board.set("applied", answer.reply.seq)
        self.board.set_digest(answer.reply.digest)

    def talk(self, effect: Effect) -> None:
        raise NotImplementedError


class FollowerDriver(Driver):
    def __init__(
        self, machine: Rank, executor: Executor, control: Control, board: BoardWriter, channel: FollowerEnd, spare: bool
    ):
        super().__init__(machine, executor, control, board, spare)
        self.channel = channel
        for fd in channel.descriptors():
            self._poll.register(fd, select.POLLIN)

    def turn(self, ready: set[int], now: float) -> None:
        for message in self.channel.receive():
            self.perform(self.machine.on(message, now))

    def talk(self, effect: Effect) -> None:
        assert isinstance(effect, Answer)
        self.applied(effect)
        self.channel.answer(effect.reply)


class LeaderDriver(Driver):
    machine: Leader

    def __init__(
        self, machine: Leader, executor: Executor, control: Control, board: BoardWriter, channel: LeaderEnd, spare: bool
    ):
        super().__init__(machine, executor, control, board, spare)
        self.channel = channel
        self.fronts: dict[int, FrontLink] = {}
        self.owner: dict[int, FrontLink] = {}  # request id -> who asked
        self.wake_at: float | None = None
        self.message_bytes = 0  # of the last entry
        self.seconds = dict.fromkeys(("plan", "publish", "launch", "settle"), 0.0)
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
        if self.wake_at is not None and self.wake_at <= now or now - machine.written_at >= 1.0:
            self.wake_at = None
            self.perform(machine.on(Tick(), now))
        self.publish_load(now)
        for link in list(self.fronts.values()):
            self.push(link, now)

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
            self._poll.modify(fd, select.POLLIN | (select.POLLOUT if link.blocked else 0))

    def forget(self, fd: int, link: FrontLink, now: float) -> None:
        """A front end is gone, and its clients with it."""
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
            waiting=len(machine.planner.queue),
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
        kind = type(effect)
        if kind is Tell:
            self.tell(effect.message)
        elif kind is Send:
            self.message_bytes = self.channel.send(effect.message)
        elif kind is Answer:
            self.applied(effect)
        elif kind is Wake:
            self.wake_at = effect.at
        elif kind is Poison:
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


def spare_cores(processes: int) -> bool:
    """Whether `processes` busy loops leave cores for everybody else."""
    return len(os.sched_getaffinity(0)) >= 2 * processes + 2
