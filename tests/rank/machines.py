"""A group's machines in one process, each with a device that draws tokens by hash. Every arrival is an action of its own.

`turn` takes one action that is possible now, chosen by the given random numbers: a message to a follower or from it, an outcome
on one rank, a grammar compiled on one rank, the time of the leader's next plan. So ranks run apart as far as the log lets them.
"""

import dataclasses
import random
from collections import deque
from collections.abc import Callable
from typing import Any, assert_never

import numpy as np

from slipstream.device.sim import SimTokens
from slipstream.log.batch import Batch, InitSlot, Offload, Outcome, Restore, SetState
from slipstream.log.caches import Limits, one_table
from slipstream.log.grammar import MakeMatcher
from slipstream.log.replica import Replica
from slipstream.log.request import Request
from slipstream.process.protocol import Abort, Finished, Refused, Submit, Tokens
from slipstream.rank import events
from slipstream.rank.effects import Interpreter
from slipstream.rank.leader import Leader
from slipstream.rank.loop import Rank
from slipstream.schedule.budget import Budget
from slipstream.schedule.planner import Planner


class Member:
    """One rank: its machine, what is on its way to it, and its device."""

    def __init__(self, machine: Rank, limits: Limits, vocab: int, make: MakeMatcher):
        self.machine, self.make = machine, make
        self.inbox: deque[Any] = deque()
        self.asked: deque[events.Prepare] = deque()  # grammars that it compiles, in order
        self.running: deque[Outcome] = deque()  # steps on the device
        self.calls: list[tuple[str, int]] = []  # what the device was asked to do; each holds collectives
        self.masks: list[tuple[int, dict[int, bytes]]] = []
        self.sim = SimTokens(limits.slots, vocab, limits.width - 1)
        self.held: Batch | None = None

    def compile(self) -> events.ResourcesReady:
        asked = self.asked.popleft()
        try:
            return events.ResourcesReady(asked.id, {each.kind: self.make(each.spec) for each in asked.resources})
        except ValueError as e:
            return events.ResourcesReady(asked.id, {}, str(e))

    def sample(self, batch: Batch, masks: dict[int, np.ndarray], discarded: frozenset[int]) -> None:
        outcome = self.sim.sample(batch, masks)
        slots = batch.slots[batch.judged].tolist()
        kept = {i: why for i, why in outcome.errors.items() if slots[i] not in discarded}
        self.running.append(dataclasses.replace(outcome, errors=kept))
        self.masks.append((batch.seq, {s: m.tobytes() for s, m in masks.items()}))


class Machines(Interpreter):
    def __init__(
        self, size: int, asynchronous: bool, make: Callable[[], MakeMatcher], vocab: int, pages: int = 64, width: int = 1
    ):
        limits = one_table(pages, 4, 64, 4, width=width)
        replica = Replica(limits)
        leader = Leader(replica, Planner(replica, Budget(16, 1.0), 64, 1.0), size, asynchronous)
        machines = [leader, *(Rank(r, Replica(limits)) for r in range(1, size))]
        self.leader = leader
        self.acting = 0  # the rank whose effects are carried out
        self.members = [Member(m, limits, vocab, make()) for m in machines]
        self.now = 0.0
        self.wake_at: float | None = None  # when the leader wants to plan
        self.tokens: dict[int, list[int]] = {}
        self.ends: dict[int, list[Finished | Refused]] = {}

    def submit(self, request: Request) -> None:
        self._on(0, Submit(request))

    def abort(self, id: int) -> None:
        self._on(0, Abort(id, -1))

    def turn(self, rng: random.Random) -> bool:
        """One action; False where there is none but waiting."""
        possible: list[Callable[[], None]] = []
        for i, member in enumerate(self.members):
            if member.inbox:
                possible.append(lambda i=i, m=member: self._on(i, m.inbox.popleft()))
            if member.running:
                possible.append(lambda i=i, m=member: self._on(i, events.Arrived(m.running.popleft())))
            if member.asked:
                possible.append(lambda i=i, m=member: self._on(i, m.compile()))
        if not possible:
            return False
        if self.wake_at is not None:
            possible.append(self._wake)
        rng.choice(possible)()
        return True

    def _wake(self) -> None:
        assert self.wake_at is not None
        self.now, self.wake_at = max(self.now, self.wake_at), None
        self._on(0, events.Tick())

    def run(self, rng: random.Random, ids: list[int]) -> None:
        """Until each of these requests has had its end."""
        for _ in range(20_000):
            if all(id in self.ends for id in ids):
                break
            if not self.turn(rng):
                self.now += 1.0
                self._on(0, events.Tick())
        else:
            raise AssertionError(f"no end of {[id for id in ids if id not in self.ends]}")
        while self.turn(rng):
            pass

    def _on(self, rank: int, event: Any) -> None:
        self.acting = rank
        self.now += 0.01
        self.perform(self.members[rank].machine.on(event, self.now))

    def send(self, effect: events.Send) -> None:
        for other in self.members[1:]:
            other.inbox.append(effect.message)

    def reply(self, effect: events.SendReply) -> None:
        if self.acting:
            self.members[0].inbox.append(effect.reply)

    def prepare(self, effect: events.Prepare) -> None:
        self.members[self.acting].asked.append(effect)

    def device(self, effect: events.DeviceEffect) -> None:
        member = self.members[self.acting]
        match effect:
            case InitSlot():
                member.sim.init_slot(effect.slot, effect.request)
            case events.Launch():
                member.calls.append(("whole", effect.batch.seq))
                member.sample(effect.batch, {}, frozenset())
            case events.LaunchForward():
                member.calls.append(("forward", effect.batch.seq))
                member.held = effect.batch
            case events.LaunchSample():
                member.calls.append(("sample", effect.seq))
                assert member.held is not None and member.held.seq == effect.seq
                member.sample(member.held, effect.masks, effect.discarded)
                member.held = None
            case SetState() | Offload() | Restore():
                pass  # pages and states hold nothing here
            case _:
                assert_never(effect)

    def wake(self, effect: events.Wake) -> None:
        self.wake_at = effect.at

    def poison(self, effect: events.Poison) -> None:
        raise AssertionError(effect.reason)

    def span(self, effect: events.Span) -> None:
        """Nobody times this group."""

    def send_to_front(self, effect: events.SendToFront) -> None:
        self._receive(effect.message)

    def _receive(self, message: Any) -> None:
        if isinstance(message, Tokens):
            pairs = zip(np.frombuffer(message.ids, "<i8").tolist(), np.frombuffer(message.tokens, "<i4").tolist(), strict=True)
            for id, token in pairs:
                self.tokens.setdefault(id, []).append(token)
        elif isinstance(message, Finished | Refused):
            self.ends.setdefault(message.id, []).append(message)
