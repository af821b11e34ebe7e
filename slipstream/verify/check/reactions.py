"""The effects of events on machines: computed once for each machine and event, on a copy, and remembered as small integers."""

from collections.abc import Callable, Hashable, Iterable
from typing import Any

import numpy as np

from slipstream.log.batch import Batch, InitSlot
from slipstream.log.entries import Reply
from slipstream.log.state import RUNNING
from slipstream.process.protocol import Finished, Refused, Started, ToFront, Tokens
from slipstream.rank.effects import Interpreter
from slipstream.rank.events import (
    DeviceEffect,
    Effect,
    Launch,
    LaunchForward,
    LaunchSample,
    Poison,
    Prepare,
    Send,
    SendReply,
    SendToFront,
    Span,
    Wake,
)
from slipstream.rank.leader import MAX_UNANSWERED_ENTRIES, Leader
from slipstream.rank.loop import Rank
from slipstream.verify.check.cases import Case
from slipstream.verify.check.device import Device
from slipstream.verify.check.ghost import Ghost
from slipstream.verify.check.world import HOLD, Action, Copy, Op
from slipstream.verify.common.audit import audit
from slipstream.verify.common.memory import Violation

MAX_UNSETTLED_STEPS = 3  # launched steps that may be unsettled


class Reactions:
    """All machines, messages and operations that a search has met, each under one number."""

    def __init__(self, case: Case):
        self.case = case
        self.machines: list[Rank] = []
        self.things: list[Any] = []  # messages and operations
        self.cores: list[int] = []  # for each machine, a number that leaves out which follower it is
        self._devices: list[Device] = []
        self._ghosts: list[Ghost | None] = []  # of the leader alone: pages are written in the order of the log
        self._ids: dict[Hashable, int] = {}
        self._thing_ids: dict[Hashable, int] = {}
        self._core_ids: dict[Hashable, int] = {}
        self._done: dict[tuple[int, Hashable], tuple[int, tuple[Action, ...]] | str] = {}

    def keep(self, machine: Rank, device: Device, ghost: Ghost | None) -> int:
        key = (machine.rank, machine.state(), device.state(), ghost and ghost.state())
        at = self._ids.get(key)
        if at is None:
            audit_machine(machine)
            at = self._ids[key] = len(self.machines)
            self.machines.append(machine)
            self._devices.append(device)
            self._ghosts.append(ghost)
            self.cores.append(self._core(machine, key[1], key[2:]))
        return at

    def _core(self, machine: Rank, state: Any, rest: Hashable) -> int:
        """The number of a machine without its rank, and without what it knows of each follower."""
        key = (state[:-2] if isinstance(machine, Leader) else state, rest)
        return self._core_ids.setdefault((isinstance(machine, Leader), key), len(self._core_ids))

    def react(self, at: int, key: Hashable, event: Callable[[], Any], now: float = HOLD) -> tuple[int, tuple[Action, ...]]:
        """(the machine after the event, its effects). `key` names the event. Raises Violation."""
        done = self._done.get((at, key))
        if done is None:
            try:
                done = self._work_out(at, event(), now)
            except Violation as e:
                done = str(e)
            except Exception as e:
                done = f"rank {self.machines[at].rank} raises {type(e).__name__}: {e}"
            self._done[at, key] = done
        if isinstance(done, str):
            raise Violation(done)
        return done

    def _work_out(self, at: int, event: Any, now: float) -> tuple[int, tuple[Action, ...]]:
        machine, device, ghost = self.machines[at].copy(), self._devices[at].copy(), self._ghosts[at]
        reaction = Reaction(machine, device, ghost and ghost.copy(), self.thing)
        reaction.perform(machine.on(event, now))
        device.forget(machine.replica)
        if reaction.ghost is not None:
            reaction.ghost.forget(machine.replica)
        forget_clocks(machine)
        return self.keep(machine, device, reaction.ghost), tuple(reaction.effects)

    def thing(self, key: Hashable, value: Any) -> int:
        """The number of a message or an operation."""
        at = self._thing_ids.get(key)
        if at is None:
            at = self._thing_ids[key] = len(self.things)
            self.things.append(value)
        return at


class Reaction(Interpreter):
    """Carries out the effects of one event on the rank's device, and notes what they mean to the world."""

    def __init__(self, machine: Rank, device: Device, ghost: Ghost | None, thing: Callable[[Hashable, Any], int]):
        self.machine, self.device_model, self.ghost = machine, device, ghost
        self.thing = thing
        self.effects: list[Action] = []

    def perform(self, effects: Iterable[Effect | Copy]) -> None:
        for effect in effects:
            if isinstance(effect, Copy):
                self._queue((Copy.__name__, *effect))
                self.effects.append(("copy", effect.id))
            else:
                super().perform((effect,))
            if isinstance(effect, Poison):
                return  # as the driver, which then ends the group

    def _queue(self, name: tuple[Any, ...], outcome: Any = None) -> None:
        self.effects.append(("queue", self.thing(name, Op(name, outcome))))

    def device(self, effect: DeviceEffect) -> None:
        if isinstance(effect, Launch | LaunchForward):
            self._forward(effect.batch)
            if isinstance(effect, Launch):
                self._sample({}, frozenset())
        elif isinstance(effect, LaunchSample):
            self._sample(effect.masks, effect.discarded)
        else:
            if isinstance(effect, InitSlot):
                self.device_model.init_slot(effect.slot, effect.request)
                self._queue((InitSlot.__name__, effect.slot, effect.request.id))
            else:
                self._queue((type(effect).__name__, *effect))
            if self.ghost is not None:
                self.ghost.queue(effect)

    def _forward(self, batch: Batch) -> None:
        ids = tuple(self.machine.replica.requests[s].id for s in batch.slots.tolist())
        columns = (batch.slots, batch.starts, batch.counts, batch.sampled, batch.pages)
        self._queue(("step", batch.seq, ids, *(tuple(c.ravel().tolist()) for c in columns), batch.saves))
        self.device_model.held = batch
        if self.ghost is not None:
            self.effects.append(("writes", tuple(self.ghost.run(batch, self.device_model))))

    def _sample(self, masks: dict[int, np.ndarray], over: frozenset[int]) -> None:
        batch = self.device_model.held
        assert batch is not None
        outcome = self.device_model.sample(masks)
        if self.ghost is not None:
            self.ghost.sampled(batch, self.device_model)
        shown = tuple((s, masks[s].tobytes()) for s in sorted(masks))
        given = (outcome.tokens.shape, tuple(outcome.tokens.ravel().tolist()), tuple(outcome.accepted.tolist()))
        self._queue(("sample", batch.seq, *given, shown, tuple(sorted(over))), outcome)

    def send(self, effect: Send) -> None:
        self.effects.append(("send", self.thing(effect.message, effect.message)))

    def reply(self, effect: SendReply) -> None:
        if self.machine.rank or isinstance(effect.reply, Reply):
            self.effects.append(("answer", self.thing(effect.reply, effect.reply)))

    def prepare(self, effect: Prepare) -> None:
        self.effects.append(("job", effect.id))

    def send_to_front(self, effect: SendToFront) -> None:
        self.effects += told(effect.message)

    def poison(self, effect: Poison) -> None:
        self.effects.append(("poison", effect.rank, effect.reason))

    def span(self, effect: Span) -> None:
        """Takes no time here."""

    def wake(self, effect: Wake) -> None:
        """That time passes is an action of the world."""


def told(message: ToFront) -> list[Action]:
    """What a request hears."""
    match message:
        case Tokens():
            ids, tokens = np.frombuffer(message.ids, "<i8").tolist(), np.frombuffer(message.tokens, "<i4").tolist()
            return [("token", id, token) for id, token in zip(ids, tokens, strict=True)]
        case Finished():
            return [("finished", message.id, message.reason)]
        case Refused():
            raise Violation(f"request {message.id} is refused: {message.message}")
        case Started():
            return []
        case _:
            raise Violation(f"no case asks for a {type(message).__name__}")


def forget_clocks(machine: Rank) -> None:
    """Sets all times that a leader remembers back to zero; each event brings `HOLD` or `GO` again."""
    if isinstance(machine, Leader):
        machine.now = machine.arrived_at = machine.written_at = 0.0
        machine.step_timings = type(machine.step_timings)(f._replace(at=0.0) for f in machine.step_timings)
        machine.step_tokens.clear()


def audit_machine(machine: Rank) -> None:
    replica = machine.replica
    audit(replica, getattr(replica, "leases", {}).values())
    for slot in replica.requests:
        if replica.phase[slot] == RUNNING and replica.sure[slot] > replica.limit[slot]:
            raise Violation(f"slot {slot} has a row in flight that it did not need: its limit was reached before")
    if len(replica.flights) > MAX_UNSETTLED_STEPS:
        raise Violation(f"rank {machine.rank} has {len(replica.flights)} steps in flight")
    if isinstance(machine, Leader) and machine.next - machine.acknowledged > MAX_UNANSWERED_ENTRIES + 1:
        raise Violation("too many entries are unanswered")
