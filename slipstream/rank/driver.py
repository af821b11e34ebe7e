"""The driver: turns messages and outcomes into events of the machine, and the machine's effects into I/O. It decides nothing.

It has one thread, which waits on the channel, the device, the front ends and the supervisor, takes all input, and waits again.
"""

import os
import select
import time
import traceback
from typing import NamedTuple

from slipstream.device.executor import Executor, StepFailed
from slipstream.errors import Diverged
from slipstream.log.entries import Prepared
from slipstream.process.board import PHASE_ID, STATES, BoardWriter
from slipstream.process.channel import FollowerEnd
from slipstream.process.control import MAX_REASON_CHARS, Control
from slipstream.process.protocol import Fault
from slipstream.rank.effects import Interpreter, queue
from slipstream.rank.events import (
    Arrived,
    DeviceEffect,
    Effect,
    Event,
    Launch,
    LaunchForward,
    Poison,
    Prepare,
    Send,
    SendReply,
    SendToFront,
    Span,
    Wake,
)
from slipstream.rank.loop import Rank
from slipstream.rank.preparer import Preparer
from slipstream.system.say import say

IDLE_TIMEOUT_S = 0.5  # an idle loop turns this often, so that the board shows that it lives
WAIT_REPORT_INTERVAL_S = 2.0  # a rank that waits for another one reports it on stderr this often
SPIN_POLLS = 200  # polls of the descriptors before sleeping, where cores are free


class Parts(NamedTuple):
    """What a driver needs besides its machine."""

    executor: Executor
    control: Control
    board: BoardWriter
    preparer: Preparer
    spare_cores: bool


class Driver(Interpreter):
    """The base of both kinds of driver."""

    def __init__(self, machine: Rank, parts: Parts):
        self.machine = machine
        self.executor = parts.executor
        self.control = parts.control
        self.board = parts.board
        self.preparer = parts.preparer
        self.spins = SPIN_POLLS if parts.spare_cores else 0
        self.entry = -1  # the last entry that was launched or answered, for reports
        self.digest = 0  # of the replica after the last answered entry
        self.waits_since: float | None = None
        self._stamp = 0
        self._poll = select.poll()
        self._poll.register(self.control.fileno(), select.POLLIN)
        self._poll.register(self.preparer.fileno(), select.POLLIN)
        device = self.executor.fileno()
        self.polls_device = device is None
        if device is not None:
            self._poll.register(device, select.POLLIN)

    def run(self) -> int:
        """Runs until the supervisor is gone (returns 0) or this rank cannot go on (returns 1, after a Fault)."""
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
                    self.take(Arrived(outcome), now)
                if self.preparer.fileno() in ready:
                    for resources in self.preparer.take():
                        self.take(resources, now)
                self.turn(ready, now)
                self.report_wait(now)
        except Exception as e:
            self.fault(e)
            return 1

    def fault(self, e: Exception) -> None:
        """Reports to the supervisor why this rank stops."""
        rank = self.machine.rank
        entry = self.entry
        if isinstance(e, Diverged) and len(e.args) == 3:
            reason, rank, entry = e.args
        elif isinstance(e, StepFailed):
            reason = f"rank {rank} failed in the step of entry {entry}: {e}"
        else:
            reason = f"rank {rank} failed after entry {entry}: {type(e).__name__}: {e}"
            say(traceback.format_exc())
        say(reason)
        self.board.set("state", STATES.index("failed"))
        self.control.send(Fault(rank, entry, reason[:MAX_REASON_CHARS]))

    # --- waiting

    def timeout(self) -> float:
        return IDLE_TIMEOUT_S

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

    def report_wait(self, now: float) -> None:
        """A rank that waits for another says so every two seconds."""
        other = self.waiting_for()
        self.board.set("waits_for", 0 if other is None else other + 1)
        if other is None:
            self.waits_since = None
        elif self.waits_since is None:
            self.waits_since = now + WAIT_REPORT_INTERVAL_S
        elif now >= self.waits_since:
            self.waits_since = now + WAIT_REPORT_INTERVAL_S
            say(f"rank {self.machine.rank} waits for rank {other}")

    def waiting_for(self) -> int | None:
        return None

    # --- what leader and followers do differently

    def take(self, event: Event, now: float) -> None:
        self.perform(self.machine.on(event, now))

    def on_control(self) -> bool:
        """False when the supervisor is gone."""
        return self.control.receive() is not None

    def turn(self, ready: set[int], now: float) -> None:
        raise NotImplementedError

    # --- effects

    def device(self, effect: DeviceEffect) -> None:
        if isinstance(effect, Launch | LaunchForward):
            self.launch(effect.batch.seq)
        queue(self.executor, effect)

    def prepare(self, effect: Prepare) -> None:
        self.preparer.prepare(effect.id, effect.resources)

    def launch(self, seq: int) -> None:
        self.entry = seq
        self.board.set("launched", seq)
        self.board.set("launched_ns", time.monotonic_ns())

    def span(self, effect: Span) -> None:
        end = time.monotonic_ns()
        phase = PHASE_ID[effect.phase]
        self.board.span(phase, self._stamp, end, effect.entry, self.digest)
        self.board.set("phase", phase)
        if effect.phase == "settle":
            self.board.set("settled", effect.entry)
        self.count(effect.phase, end - self._stamp)
        self._stamp = end

    def count(self, phase: str, nanoseconds: int) -> None:
        """Counts host time by phase. Only the leader does."""

    def reply(self, effect: SendReply) -> None:
        """Records on the board how far this rank is."""
        if not isinstance(effect.reply, Prepared):
            self.entry = effect.reply.seq
            self.board.set("applied", effect.reply.seq)
            self.digest = effect.reply.digest
            self.board.set_digest(self.digest)


class FollowerDriver(Driver):
    def __init__(self, machine: Rank, parts: Parts, channel: FollowerEnd):
        super().__init__(machine, parts)
        self.channel = channel
        for fd in channel.descriptors():
            self._poll.register(fd, select.POLLIN)

    def turn(self, ready: set[int], now: float) -> None:
        for message in self.channel.receive():
            self.perform(self.machine.on(message, now))

    def reply(self, effect: SendReply) -> None:
        super().reply(effect)
        self.channel.answer(effect.reply)

    def send(self, effect: Send) -> None:
        raise _leaders(effect)

    def send_to_front(self, effect: SendToFront) -> None:
        raise _leaders(effect)

    def wake(self, effect: Wake) -> None:
        raise _leaders(effect)

    def poison(self, effect: Poison) -> None:
        raise _leaders(effect)


def _leaders(effect: Effect) -> TypeError:
    return TypeError(f"only a leader yields {type(effect).__name__}")


def spare_cores(processes: int) -> bool:
    """Whether `processes` busy loops leave cores free for other work."""
    return len(os.sched_getaffinity(0)) >= 2 * processes + 2
