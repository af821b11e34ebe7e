"""The parts of the checker's worlds: sites, protocols, and the events that only rivals and leases have.

A world is a value made of small integers, which `reactions` gives to machines, messages and operations.
"""

from typing import Any, NamedTuple

from slipstream.log.batch import Outcome
from slipstream.log.replica import Replica
from slipstream.rank.leader import Leader
from slipstream.rank.loop import Rank
from slipstream.schedule.budget import Budget, StepLoad
from slipstream.schedule.planner import Planner

HOLD, GO = 0.0, 0.9  # the times that the leader gets: before, or after, the moment at which it plans ahead
EXPECTED_STEP_S = 0.6  # the time that it expects of a step; HOLD < 0.75 * EXPECTED_STEP_S < GO < the heartbeat
UNSENT, LIVE, ABORTED, OVER = range(4)  # a request as the front end sees it


class FixedBudget(Budget):
    """Learns nothing, so that no measured time is part of a state."""

    def observe(self, load: StepLoad, seconds: float) -> None:
        pass

    def expected(self, load: StepLoad) -> float:
        return EXPECTED_STEP_S


class StateReplica(Replica):
    """Its digest is that of its whole state, not of its history, so that equal states are one state."""

    def seal(self) -> int:
        self.changes.clear()
        return hash(self.state()) & (2**63 - 1)


class Protocol(NamedTuple):
    """A protocol is the classes that follow it. `fails`: whether a violation is expected."""

    name: str
    leader: type[Leader] = Leader
    rank: type[Rank] = Rank
    planner: type[Planner] = Planner
    replica: type[Replica] = StateReplica
    fails: bool = False
    clocks: bool = False  # ranks end requests by clocks of their own
    serial: bool = False


class Expire(NamedTuple):
    """A rank's own clock ends a request."""

    id: int


class Copied(NamedTuple):
    """A rank's copy of a leased request's pages has ended."""

    id: int


class Copy(NamedTuple):
    """Effect: start the copy of a leased request's pages, outside the stream, when the stream gets here."""

    id: int
    pages: tuple[int, ...]


class Site(NamedTuple):
    """One rank: its machine, what is on its way to it and from it, and its part of the device."""

    machine: int
    inbox: tuple[int, ...] = ()  # messages from the leader
    back: tuple[int, ...] = ()  # messages to the leader
    queued: tuple[int, ...] = ()  # operations queued that have not run on all ranks
    arrived: tuple[int, ...] = ()  # operations whose outcome has not been taken
    jobs: tuple[int, ...] = ()  # requests whose grammar is being compiled
    copies: tuple[int, ...] = ()  # requests whose leased pages are being copied
    dead: bool = False
    heard: int = -1  # the last entry of which the leader has this rank's answer


class Client(NamedTuple):
    """A request as seen from outside the machines: what its client has been sent, and where the log admits and drops it."""

    phase: int = UNSENT  # .. OVER
    received: int = 0  # tokens
    admitted: bool = False
    drop: int = -1  # the entry that drops it; -1: none was written


class World(NamedTuple):
    sites: tuple[Site, ...]
    front: tuple["Client", ...]  # by request
    expired: tuple[tuple[int, int], ...] = ()  # (rank, request) of local clocks that have struck
    garbled: bool = False  # a follower has given a wrong answer: the group must end
    poisoned: bool = False


Action = tuple[Any, ...]


class Op(NamedTuple):
    """An operation of the device; only samplings have an outcome."""

    name: tuple[Any, ...]
    outcome: Outcome | None


def with_site(world: World, i: int, site: Site) -> World:
    return world._replace(sites=(*world.sites[:i], site, *world.sites[i + 1 :]))


def show(name: tuple[Any, ...]) -> str:
    """An operation in words."""
    if name[0] == "step":
        _, seq, ids, _, starts, counts, *_ = name
        rows = ", ".join(f"request {q}[{a}:{a + n}]" for q, a, n in zip(ids, starts, counts, strict=True))
        return f"the forward of entry {seq} ({rows})"
    if name[0] == "sample":
        return f"the sampling of entry {name[1]}"
    if name[0] == "InitSlot":
        return f"the seating of request {name[2]} in slot {name[1]}"
    return f"{name[0].lower()} {name[1:]}"


STEP_FIELDS = ("kind", "entry", "requests", "slots", "starts", "counts", "sampled", "pages", "saves")


def show_other(name: tuple[Any, ...], other: tuple[Any, ...]) -> str:
    """An operation in words, with the fields in which it differs from another one that reads the same."""
    text = show(name)
    if text != show(other):
        return text
    fields = STEP_FIELDS if name[0] == "step" else ("kind", "entry", "shape", "tokens", "accepted", "masks", "discarded")
    differ = [f"{what} {a}" for what, a, b in zip(fields, name, other, strict=False) if a != b]
    return f"{text} with other {', '.join(differ)}"
