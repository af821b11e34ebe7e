"""The checker's model: what can happen in a world, and which world it leads to.

An operation of the device ends when every rank has queued it; its outcome then waits at each rank, however long. Clocks are no
part of a world: that the leader holds a step back, or goes ahead, are two different actions.
"""

from collections.abc import Callable, Hashable
from typing import Any

import msgspec
import numpy as np

from slipstream.log.entries import Entry, Prepared, Reply
from slipstream.process.protocol import Abort, Submit
from slipstream.rank.events import Arrived, ResourcesReady, Tick
from slipstream.rank.leader import Leader
from slipstream.rank.loop import Rank
from slipstream.verify.check.cases import Case
from slipstream.verify.check.clients import Clients, end_group, with_client
from slipstream.verify.check.device import Device
from slipstream.verify.check.ghost import Ghost
from slipstream.verify.check.reactions import Reactions
from slipstream.verify.check.world import (
    ABORTED,
    GO,
    HOLD,
    LIVE,
    OVER,
    UNSENT,
    Action,
    Client,
    Copied,
    Expire,
    FixedBudget,
    Protocol,
    Site,
    World,
    show,
    show_other,
    with_site,
)
from slipstream.verify.common.audit import at_rest
from slipstream.verify.common.memory import Violation
from slipstream.verify.common.toy import ToyMatcher, expected_of


class Model:
    """All worlds of one case under one protocol with `size` ranks."""

    def __init__(self, case: Case, protocol: Protocol, size: int):
        self.case, self.protocol, self.size = case, protocol, size
        self.expected = [expected_of(r, case.script[i]) for i, r in enumerate(case.requests)]
        known = []
        for r, script, (tokens, _) in zip(case.requests, case.script, self.expected, strict=True):
            drawn = [*tokens, *script[len(tokens) :]][: r.max_tokens]
            known.append([*np.frombuffer(r.prompt, "<i4").tolist(), *drawn])
        self.known = Reactions(case)
        self._device = Device(case, known)
        self.clients = Clients(self.expected, protocol.clocks)
        self.entries = 0  # the longest log seen
        self._nameless: dict[int, tuple[Any, ...]] = {}
        self._views: dict[tuple[int, int], tuple[Any, ...]] = {}

    # --- worlds

    def start(self) -> World:
        case, protocol = self.case, self.protocol
        replica = protocol.replica(case.limits)
        planner = protocol.planner(replica, FixedBudget(case.cap, per_token=1.0), 8)
        leader = protocol.leader(replica, planner, self.size, case.asynchronous and not protocol.serial)
        ranks = [leader, *(protocol.rank(i, protocol.replica(case.limits)) for i in range(1, self.size))]
        sites = [Site(self.known.keep(r, self._device, None if r.rank else Ghost(case))) for r in ranks]
        world = World(tuple(sites), (Client(),) * len(case.requests))
        if case.all_at_once:
            for i in range(len(case.requests)):
                world = self.apply(world, ("submit", i))
        return world

    def key(self, world: World) -> Hashable:
        """Equal for worlds that differ only in which follower is which."""
        followers = []
        for i, site in enumerate(world.sites[1:], 1):
            struck = tuple(id for rank, id in world.expired if rank == i)
            back = tuple(self._without_name(t) for t in site.back)
            view = self._view(world.sites[0].machine, i)
            followers.append((self.known.cores[site.machine], site[1:2], back, site[3:], struck, view))
        followers.sort()
        own = (tuple(id for rank, id in world.expired if rank == 0), self._view(world.sites[0].machine, 0))
        return (
            self.known.cores[world.sites[0].machine],
            world.sites[0][1:],
            tuple(followers),
            world.front,
            own,
            world.garbled,
            world.poisoned,
        )

    def _without_name(self, message: int) -> tuple[Any, ...]:
        found = self._nameless.get(message)
        if found is None:
            found = self._nameless[message] = nameless(self.known.things[message])
        return found

    def _view(self, at: int, rank: int) -> tuple[Any, ...]:
        """What a leader remembers of one rank; `heard` is a rival's."""
        found = self._views.get((at, rank))
        if found is None:
            leader = self.known.machines[at]
            assert isinstance(leader, Leader)
            early = tuple((seq, r.digest) for seq, replies in leader.early.items() for r in replies if r.rank == rank)
            owed = tuple(id for id, (_, missing) in leader.preparing.items() if rank in missing)
            heard = tuple(sorted(id for id, ranks in getattr(leader, "heard", {}).items() if rank in ranks))
            found = self._views[at, rank] = (leader.replied.get(rank, -1), early, owed, heard)
        return found

    # --- actions

    def actions(self, world: World) -> list[Action]:
        """All that can happen next."""
        if world.poisoned:
            return []
        out: list[Action] = []
        for i, site in enumerate(world.sites):
            if not site.dead:
                out += self.local(world, i)
        leader = world.sites[0]
        for i, site in enumerate(world.sites):
            if site.back and not leader.dead:
                out.append(("hear", i))
        if not leader.dead:
            out += self._outside(world)
        out += self._troubles(world)
        return out

    def local(self, world: World, i: int) -> list[Action]:
        """What rank i can do by itself."""
        site = world.sites[i]
        out: list[Action] = []
        if site.inbox:
            out.append(("read", i))
        if site.arrived:
            out.append(("arrive", i))
        out += [("compiled", i, id) for id in site.jobs]
        out += [("copied", i, id) for id in site.copies]
        return out

    def _outside(self, world: World) -> list[Action]:
        """What clients and the passing of time can do."""
        case = self.case
        out: list[Action] = []
        unsent = [i for i, client in enumerate(world.front) if client.phase == UNSENT]
        if unsent:
            out.append(("submit", unsent[0]))
        out += [("abort", i) for i in case.aborts if world.front[i].phase == LIVE]
        leader = self.known.machines[world.sites[0].machine]
        assert isinstance(leader, Leader)
        if leader.depth > 1 and len(leader.replica.flights) == 1 and leader.late is None:
            out.append(("plan",))
        return out

    def _troubles(self, world: World) -> list[Action]:
        case = self.case
        out: list[Action] = []
        if case.dies:
            dead = [i for i, site in enumerate(world.sites) if site.dead]
            if dead:
                out.append(("found", dead[0]))
            elif any(client.phase in (LIVE, ABORTED) for client in world.front):
                out += [("die", 0), ("die", self.size - 1)]
        if not world.garbled:
            with_reply = [i for i, site in enumerate(world.sites) if site.back and self._is_reply(site.back[0])]
            out += [("garble", i, how) for i in with_reply for how in case.garbled]
        if self.protocol.clocks:
            for id in case.expires:
                if world.front[id].phase == LIVE:
                    out += [("expire", r, id) for r in range(self.size) if (r, id) not in world.expired]
        return out

    def apply(self, world: World, action: Action) -> World:
        """The world after the action. Raises Violation."""
        kind = action[0]
        sites = world.sites
        if kind == "submit":
            i = action[1]
            world = with_client(world, i, Client(LIVE))
            return self._react(world, 0, ("submit", i), lambda: Submit(self.case.requests[i]))
        if kind == "abort":
            i = action[1]
            world = with_client(world, i, world.front[i]._replace(phase=ABORTED))
            return self._react(world, 0, ("abort", i), lambda: Abort(i, self.case.kept))
        if kind == "plan":
            return self._react(world, 0, ("plan",), Tick, GO)
        if kind == "read":
            i = action[1]
            message = sites[i].inbox[0]
            world = with_site(world, i, sites[i]._replace(inbox=sites[i].inbox[1:]))
            return self._react(world, i, ("read", message), lambda: self.known.things[message])
        if kind == "hear":
            i = action[1]
            message = sites[i].back[0]
            heard = self.known.things[message].seq if self._is_reply(message) else sites[i].heard
            world = with_site(world, i, sites[i]._replace(back=sites[i].back[1:], heard=heard))
            return self._react(world, 0, ("read", message), lambda: self.known.things[message])
        if kind == "arrive":
            i = action[1]
            op = sites[i].arrived[0]
            world = with_site(world, i, sites[i]._replace(arrived=sites[i].arrived[1:]))
            return self._react(world, i, ("arrive", op), lambda: Arrived(self.known.things[op].outcome))
        if kind == "compiled":
            _, i, id = action
            world = with_site(world, i, sites[i]._replace(jobs=tuple(j for j in sites[i].jobs if j != id)))
            return self._react(
                world, i, action[::2], lambda: ResourcesReady(id, {"grammar": ToyMatcher(self.case.requests[id].grammar)})
            )
        if kind == "copied":
            _, i, id = action
            world = with_site(world, i, sites[i]._replace(copies=tuple(c for c in sites[i].copies if c != id)))
            return self._react(world, i, action[::2], lambda: Copied(id))
        if kind == "expire":
            _, i, id = action
            world = world._replace(expired=(*world.expired, (i, id)))
            return self._react(world, i, action[::2], lambda: Expire(id))
        if kind == "die":
            return with_site(world, action[1], sites[action[1]]._replace(dead=True))
        if kind == "garble":
            return self._garble(world, *action[1:])
        assert kind == "found"
        return end_group(world)

    def _is_reply(self, message: int) -> bool:
        return isinstance(self.known.things[message], Reply)

    def _garble(self, world: World, i: int, how: str) -> World:
        """Makes a follower's next reply a wrong one: another digest, or the same reply a second time."""
        first, *rest = world.sites[i].back
        reply = self.known.things[first]
        wrong = msgspec.structs.replace(reply, digest=reply.digest ^ 1)
        begin = (first, first) if how == "twice" else (self.known.thing(wrong, wrong),)
        return with_site(world, i, world.sites[i]._replace(back=(*begin, *rest)))._replace(garbled=True)

    def _react(self, world: World, i: int, key: Hashable, event: Callable[[], Any], now: float = HOLD) -> World:
        """Lets rank i take an event and carries its effects out."""
        after, effects = self.known.react(world.sites[i].machine, key, event, now)
        world = with_site(world, i, world.sites[i]._replace(machine=after))
        for effect in effects:
            world = self._carry_out(world, i, effect)
        return self._run_device(world) if effects else world

    # --- effects on the world

    def _carry_out(self, world: World, i: int, effect: Action) -> World:
        kind, *what = effect
        site = world.sites[i]
        if kind == "queue":
            self._compare(world, i, what[0])
            return with_site(world, i, site._replace(queued=(*site.queued, what[0])))
        if kind == "send":
            message = self.known.things[what[0]]
            if isinstance(message, Entry):
                self.entries = max(self.entries, message.seq + 1)
                world = self.clients.see(world, message)
            rest = (s if s.dead else s._replace(inbox=(*s.inbox, what[0])) for s in world.sites[1:])
            return world._replace(sites=(world.sites[0], *rest))
        if kind == "answer":
            return self._answer(world, i, what[0])
        if kind == "job":
            return with_site(world, i, site._replace(jobs=(*site.jobs, what[0])))
        if kind == "copy":
            return with_site(world, i, site._replace(copies=(*site.copies, what[0])))
        if kind == "writes":
            return self._writes(world, what[0])
        if kind == "poison":
            if not world.garbled:
                raise Violation(f"the leader poisons the group: {what[1]}")
            return end_group(world)
        return self.clients.tell(world, kind, *what)

    def _compare(self, world: World, i: int, op: int) -> None:
        """The n-th operation of each rank must be the same one."""
        n = len(world.sites[i].queued)
        for j, other in enumerate(world.sites):
            if j != i and len(other.queued) > n and other.queued[n] != op:
                mine, theirs = self.known.things[op].name, self.known.things[other.queued[n]].name
                raise Violation(f"rank {i} queues {show(mine)} where rank {j} has queued {show_other(theirs, mine)}")

    def _writes(self, world: World, pages: tuple[int, ...]) -> World:
        """A step of the log writes pages: no rank may still be copying them beside the stream."""
        for i, site in enumerate(world.sites):
            for id in site.copies:
                held = leased_pages(self.known.machines[site.machine], id)
                if held is None or set(held) & set(pages):
                    raise Violation(f"a step writes to pages {list(pages)} while rank {i} still copies those of request {id}")
        return world

    def _answer(self, world: World, i: int, message: int) -> World:
        reply = self.known.things[message]
        site = world.sites[i]
        if isinstance(reply, Reply):
            if not all(reply.existed):
                raise Violation(f"rank {i} does not know a request that entry {reply.seq} drops")
            if i == 0:
                return with_site(world, 0, site._replace(heard=reply.seq))
        if i == 0 and isinstance(reply, Prepared):
            return world
        return with_site(world, i, site._replace(back=(*site.back, message)))

    def _run_device(self, world: World) -> World:
        """Ends the operations that every rank has queued."""
        sites = world.sites
        n = min(len(s.queued) for s in sites)
        if not n:
            return world
        done = [op for op in sites[0].queued[:n] if self.known.things[op].outcome is not None]
        new = tuple(s._replace(queued=s.queued[n:], arrived=() if s.dead else (*s.arrived, *done)) for s in sites)
        return world._replace(sites=new)

    # --- ends

    def check_end(self, world: World) -> None:
        """Nothing can happen any more: everybody must have had an end, and everything be given back."""
        waiting = [i for i, client in enumerate(world.front) if client.phase != OVER]
        if waiting:
            raise Violation(f"deadlock: requests {waiting} never end; {self.where(world)}")
        if world.garbled and not world.poisoned:
            raise Violation("a follower's wrong reply goes unnoticed")
        if not world.poisoned:
            at_rest([self.known.machines[s.machine] for s in world.sites])

    def where(self, world: World) -> str:
        parts = []
        for i, site in enumerate(world.sites):
            queued = [show(self.known.things[op].name) for op in site.queued]
            parts.append(
                f"rank {i} has applied entry {self.known.machines[site.machine].applied} and waits in {queued or 'nothing'}"
            )
        return "; ".join(parts)

    def machine(self, world: World, i: int) -> Rank:
        return self.known.machines[world.sites[i].machine]

    def thing(self, at: int) -> Any:
        return self.known.things[at]


def nameless(message: Any) -> tuple[Any, ...]:
    """A follower's message without the follower's number."""
    return (type(message).__name__, *(v for k, v in message_items(message) if k != "rank"))


def message_items(message: Any) -> list[tuple[str, Any]]:
    names = message.__struct_fields__ if hasattr(message, "__struct_fields__") else message._fields
    return [(name, getattr(message, name)) for name in names]


def leased_pages(machine: Rank, id: int) -> tuple[int, ...] | None:
    """The pages of a lease, None where the rank holds no such lease any more."""
    return getattr(machine.replica, "leases", {}).get(id)
