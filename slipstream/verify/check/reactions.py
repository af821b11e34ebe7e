"""What machines do at events: worked out once for each machine and event, on a copy, and remembered as small integers."""

from collections.abc import Callable, Hashable
from typing import Any

import numpy as np

from slipstream.log.batch import InitSlot, Offload, Outcome, Restore
from slipstream.log.entries import Reply
from slipstream.process.protocol import Finished, Refused, Tokens
from slipstream.rank.events import Launch, LaunchForward, LaunchSample, Poison, Prepare, Send, SendReply, SendToFront
from slipstream.rank.leader import WINDOW, Leader
from slipstream.rank.loop import Rank
from slipstream.verify.check.cases import Case
from slipstream.verify.check.ghost import Ghost
from slipstream.verify.check.world import HOLD, Action, Copy, Op
from slipstream.verify.common.audit import audit
from slipstream.verify.common.memory import Violation
from slipstream.verify.common.toy import DEAD_END, choose

RING = 3  # steps that may lack their settling


class Reactions:
    """All machines, messages and operations that a search has met, each under one number."""

    def __init__(self, case: Case):
        self.case = case
        self.machines: list[Rank] = []
        self.things: list[Any] = []  # messages and operations
        self.cores: list[int] = []  # for each machine, a number that leaves out which follower it is
        self._ghosts: list[Ghost | None] = []
        self._ids: dict[Hashable, int] = {}
        self._thing_ids: dict[Hashable, int] = {}
        self._core_ids: dict[Hashable, int] = {}
        self._done: dict[tuple[int, Hashable], tuple[int, tuple[Action, ...]] | str] = {}

    def keep(self, machine: Rank, ghost: Ghost | None) -> int:
        key = (machine.rank, machine.state(), ghost and ghost.state())
        at = self._ids.get(key)
        if at is None:
            audit_machine(machine)
            at = self._ids[key] = len(self.machines)
            self.machines.append(machine)
            self._ghosts.append(ghost)
            self.cores.append(self._core(machine, key[1], ghost))
        return at

    def _core(self, machine: Rank, state: Any, ghost: Ghost | None) -> int:
        """Names what a machine is but for which follower it is, or what it knows of each."""
        key = (state[:-2], ghost and ghost.state()) if isinstance(machine, Leader) else state
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
        machine = self.machines[at].copy()
        ghost = self._ghosts[at]
        ghost = ghost and ghost.copy()
        effects: list[Action] = []
        for effect in machine.on(event, now):
            kind = type(effect)
            if isinstance(effect, Launch | LaunchForward):
                effects.append(("queue", self._forward(machine, effect.batch)))
                if ghost is not None:
                    effects.append(("writes", tuple(ghost.run(effect.batch, machine.replica))))
                if kind is Launch:
                    effects.append(("queue", self._sample(machine, effect.batch.seq, {}, frozenset())))
            elif isinstance(effect, LaunchSample):
                effects.append(("queue", self._sample(machine, effect.seq, effect.masks, effect.discarded)))
            elif isinstance(effect, InitSlot | Offload | Restore | Copy):
                name = (
                    (kind.__name__, effect.slot, effect.request.id)
                    if isinstance(effect, InitSlot)
                    else (kind.__name__, *effect)
                )
                effects.append(("queue", self._thing(name, Op(name, None))))
                if isinstance(effect, Copy):
                    effects.append(("copy", effect.id))
                if ghost is not None:
                    ghost.call(effect)
            elif isinstance(effect, Send):
                effects.append(("send", self._thing(effect.message, effect.message)))
            elif isinstance(effect, SendReply):
                if machine.rank or isinstance(effect.reply, Reply):
                    effects.append(("answer", self._thing(effect.reply, effect.reply)))
            elif isinstance(effect, Prepare):
                effects.append(("job", effect.id))
            elif isinstance(effect, SendToFront):
                effects += self._tell(effect.message)
            elif isinstance(effect, Poison):
                raise Violation(f"the leader poisons the group: {effect.reason}")
        if ghost is not None:
            ghost.forget(machine.replica)
        forget_clocks(machine)
        return self.keep(machine, ghost), tuple(effects)

    def _thing(self, key: Hashable, value: Any) -> int:
        at = self._thing_ids.get(key)
        if at is None:
            at = self._thing_ids[key] = len(self.things)
            self.things.append(value)
        return at

    def _forward(self, machine: Rank, batch: Any) -> int:
        ids = tuple(machine.replica.requests[s].id for s in batch.slots.tolist())
        columns = (batch.slots, batch.starts, batch.counts, batch.samples, batch.pages)
        name = ("step", batch.seq, ids, *(tuple(c.ravel().tolist()) for c in columns))
        return self._thing(name, Op(name, None))

    def _sample(self, machine: Rank, seq: int, masks: dict[int, np.ndarray], over: frozenset[int]) -> int:
        """The sampling of the step launched last: its tokens follow from the script."""
        replica = machine.replica
        flight = replica.flights[-1]
        tokens: list[int] = []
        errors: dict[int, str] = {}
        for slot in flight.slots.tolist():
            r = replica.requests[slot]
            token = self.case.script[r.id][int(replica.target[slot]) - 1 - r.prompt_len]
            if slot in masks:
                token = choose(token, masks[slot])
                if token < 0:
                    errors[len(tokens)] = DEAD_END
            tokens.append(token)
        shown = tuple((s, masks[s].tobytes()) for s in sorted(masks))
        name = ("sample", seq, tuple(tokens), shown, tuple(sorted(over)))
        return self._thing(name, Op(name, Outcome(seq, np.array(tokens, np.int32), errors=errors)))

    def _tell(self, message: Any) -> list[Action]:
        if isinstance(message, Tokens):
            ids, tokens = np.frombuffer(message.ids, "<i8").tolist(), np.frombuffer(message.tokens, "<i4").tolist()
            return [("token", id, token) for id, token in zip(ids, tokens, strict=True)]
        if isinstance(message, Finished):
            return [("finished", message.id, message.reason)]
        if isinstance(message, Refused):
            raise Violation(f"request {message.id} is refused: {message.message}")
        return []


def forget_clocks(machine: Rank) -> None:
    """Sets all times that a leader remembers back to zero; `HOLD` and `GO` are told anew at each event."""
    if isinstance(machine, Leader):
        machine.now = machine.arrived_at = machine.written_at = 0.0
        machine.step_timings = type(machine.step_timings)(f._replace(at=0.0) for f in machine.step_timings)
        machine.step_tokens.clear()


def audit_machine(machine: Rank) -> None:
    replica = machine.replica
    audit(replica, getattr(replica, "leases", {}).values())
    if len(replica.flights) > RING:
        raise Violation(f"rank {machine.rank} has {len(replica.flights)} steps in flight")
    if isinstance(machine, Leader) and machine.next - machine.acknowledged > WINDOW + 1:
        raise Violation("too many entries are unanswered")
