"""One simulated run: clients, a front end, a group, a supervisor, under virtual time, from one scenario.

Every request must get exactly one terminal event at its client and one at the leader; what it is told must be what it would get
alone. The run raises Violation with the seed's words for anything else.
"""

import heapq
from collections.abc import Callable
from typing import Any

import numpy as np

from slipstream.log.caches import Limits
from slipstream.log.entries import Entry
from slipstream.log.replica import Replica
from slipstream.process.protocol import Abort, Finished, PromptLogprobs, Refused, Started, Submit, ToFront, Tokens
from slipstream.schedule.budget import Budget
from slipstream.schedule.planner import Planner
from slipstream.verify.common.audit import at_rest, audit
from slipstream.verify.common.memory import Violation
from slipstream.verify.common.toy import expected, impossible
from slipstream.verify.simulate.group import SimulatedGroup
from slipstream.verify.simulate.scenario import MIN_ENTRIES, Client, Scenario

BEAT = 0.25  # seconds between looks at the group
AUDIT_EVERY = 16  # entries
RESTART = 0.05  # seconds until a poisoned group is replaced
FRONT_DELAY = 0.0005  # seconds at most from the front end to the leader
LONGEST = 600.0  # virtual seconds of a run


class Run:
    def __init__(
        self,
        scenario: Scenario,
        make_planner: Callable[[Replica, Budget, int], Planner] = Planner,
        make_replica: Callable[[Limits], Replica] = Replica,
        lines: list[str] | None = None,
    ):
        self.scenario = scenario
        self.make_planner, self.make_replica = make_planner, make_replica
        self.lines = lines  # where the trace goes
        self.now = 0.0
        self.entries = self.steps = self.incarnations = self.poisonings = 0
        self._heap: list[tuple[float, int, Callable[[Any], None], Any]] = []
        self._number = 0
        self.clients: dict[int, Client] = {}
        self.ends: dict[int, str] = {}  # request -> its client's terminal event
        self.live: dict[int, list[int]] = {}  # request that the leader owes an end -> tokens it was told
        self.open: set[int] = set()  # requests whose client still listens
        self.aborted: set[int] = set()
        self.started: set[int] = set()
        self.reserve = list(scenario.reserve[::-1])
        self.unsent = len(scenario.clients)
        self.group = self._new_group()

    def go(self) -> "Run":
        for client in self.scenario.clients:
            self.at(client.at, self.submit, client)
        for fault in self.scenario.faults:
            if fault.kind in ("die", "stop"):
                self.at(fault.at, self.group.strike, fault)
        self.at(BEAT, self._beat, None)
        heap = self._heap
        while heap:
            self.now, _, call, argument = heapq.heappop(heap)
            call(argument)
        self._check_ends()
        return self

    def at(self, when: float, call: Callable[[Any], None], argument: object) -> None:
        self._number += 1
        heapq.heappush(self._heap, (when, self._number, call, argument))

    def note(self, text: str) -> None:
        if self.lines is not None:
            self.lines.append(f"{self.now * 1e3:10.3f} ms  {text}")

    # --- the front end and its clients

    def submit(self, client: Client) -> None:
        id = client.request.id
        self.clients[id] = client
        self.unsent -= 1
        if self.group.dead:
            self._end(id, "503")
            return
        self.live[id] = []
        self.open.add(id)
        if client.gone:
            self.at(self.now + client.gone, self._leave, id)
        self.note(f"client {id} submits {client.request.prompt_len} tokens, wants {client.request.max_tokens}")
        self.group.on(0, Submit(client.request))

    def _leave(self, id: int) -> None:
        if id in self.open:
            self._end(id, "gone")
            self._abort(id, -1)

    def _abort(self, id: int, kept: int) -> None:
        """Tells the leader, a little later, that a client has ended by itself."""
        self.aborted.add(id)
        delay = FRONT_DELAY * self.group.random.random()
        self.at(self.now + delay, lambda group: group.on(0, Abort(id, kept)), self.group)

    def _end(self, id: int, how: str) -> None:
        if id in self.ends:
            raise Violation(f"client {id} gets {how!r} after {self.ends[id]!r}")
        self.ends[id] = how
        self.open.discard(id)
        self.note(f"client {id} ends: {how}")

    def tell(self, message: ToFront) -> None:
        if isinstance(message, Tokens):
            ids = np.frombuffer(message.ids, "<i8").tolist()
            for id, token in zip(ids, np.frombuffer(message.tokens, "<i4").tolist(), strict=True):
                self._token(id, token)
        elif isinstance(message, Finished):
            self._finished(message)
        elif isinstance(message, Started):
            if message.id in self.started or message.id not in self.live:
                raise Violation(f"request {message.id} starts twice or out of turn")
            self.started.add(message.id)
        elif isinstance(message, Refused):
            self._refused(message)
        elif not isinstance(message, PromptLogprobs):
            raise Violation(f"the leader tells {message}")

    def _token(self, id: int, token: int) -> None:
        received_tokens = self.live.get(id)
        if received_tokens is None or id not in self.started:
            raise Violation(f"request {id} gets a token before its start or after its end")
        received_tokens.append(token)
        if id in self.open and self.clients[id].stop == len(received_tokens):
            self._end(id, "stop string")
            self._abort(id, self.clients[id].kept)

    def _finished(self, message: Finished) -> None:
        id = message.id
        if id not in self.live:
            raise Violation(f"request {id} ends twice at the leader, the second time by {message.reason!r}")
        received_tokens = self.live.pop(id)
        tokens, reason = expected(self.clients[id].request)
        if message.reason == "abort":
            if id not in self.aborted:
                raise Violation(f"request {id} was aborted by nobody")
            if received_tokens != tokens[: len(received_tokens)]:
                raise Violation(f"request {id} got {received_tokens}, not the beginning of {tokens}")
        elif received_tokens != tokens or message.reason != reason:
            raise Violation(f"request {id} got {received_tokens} and {message.reason!r}, not {tokens} and {reason!r}")
        if id in self.open:
            self._end(id, message.reason)

    def _refused(self, message: Refused) -> None:
        id = message.id
        if id not in self.live or id in self.started:
            raise Violation(f"request {id} is refused after its start or its end")
        del self.live[id]
        request, s = self.clients[id].request, self.scenario
        length = request.prompt_len + request.max_tokens
        never = length > s.max_len or s.limits.pages_of(length) > s.pages
        if message.status != 400 if never else message.status == 400 and not impossible(request):
            raise Violation(f"request {id} of {length} tokens is refused with {message.status}")
        if id in self.open:
            self._end(id, str(message.status))

    # --- the group

    def _new_group(self) -> SimulatedGroup:
        group = SimulatedGroup(self, self.scenario, self.scenario.faults if not self.incarnations else ())
        self.incarnations += 1
        return group

    def wrote(self, entry: Entry) -> None:
        self.entries += 1
        if self.lines is not None:
            self.note(f"entry {describe(entry)}")
        if self.entries % AUDIT_EVERY == 0:
            audit(self.group.leader.replica)

    def poisoned(self, group: SimulatedGroup) -> None:
        """The supervisor has ended the group: each open client hears so, once, and another group comes up."""
        self.note(f"the group is poisoned: {group.reason}")
        self.poisonings += 1
        for id in sorted(self.open):
            self._end(id, "500")
        for id, received_tokens in self.live.items():
            tokens, _ = expected(self.clients[id].request)
            if received_tokens != tokens[: len(received_tokens)]:
                raise Violation(f"request {id} got {received_tokens}, not the beginning of {tokens}")
        self.live.clear()
        self.at(self.now + RESTART, self._restart, None)

    def _restart(self, unused: None) -> None:
        self.steps += sum(self.group.leader.steps.values())
        self.group = self._new_group()

    def _beat(self, unused: None) -> None:
        group = self.group
        if not group.dead:
            group.beat()
        if self.now > LONGEST:
            raise Violation(f"not done after {LONGEST:g} virtual seconds")
        if not self._heap and not group.dead:
            if self.live or self.unsent:
                if not group.broken and group.wake_at <= self.now and group.leader.written_at < self.now - 5:
                    raise Violation(f"requests {sorted(self.live)} wait for nothing")
            elif self.entries < MIN_ENTRIES and self.reserve:
                for _ in range(min(4, len(self.reserve))):
                    self.unsent += 1
                    self.at(self.now, self.submit, self.reserve.pop())
            elif not group.broken:
                self._rest()
                return
        self.at(self.now + BEAT, self._beat, None)

    def _rest(self) -> None:
        """Nothing happens any more: the group must be as it was when it was new."""
        group = self.group
        self.steps += sum(group.leader.steps.values())
        at_rest(group.ranks)
        if group.stream.waiting:
            raise Violation(f"{len(group.stream.waiting)} operations never ran on all ranks")

    def _check_ends(self) -> None:
        missing = [id for id in self.clients if id not in self.ends]
        if missing or self.live:
            raise Violation(f"clients {missing} were never told an end")


def describe(entry: Entry) -> str:
    """One line of an entry."""
    parts = [f"{entry.seq} settles through {entry.settled_to}"]
    parts += [
        f"{type(c).__name__.lower()}({', '.join(str(x) for x in c.__struct_fields__ and _values(c))})" for c in entry.commands
    ]
    if entry.step is not None:
        rows = " ".join(f"{s}:[{a},{a + c})/{n}" for s, a, c, n in zip(*entry.step.columns(), strict=True))
        parts.append((f"decode {entry.step.decode} " if entry.step.decode else "") + rows + f" order {entry.step.order}")
    return "; ".join(parts)


def _values(command: Any) -> list[object]:
    return [getattr(command, name) for name in command.__struct_fields__]
