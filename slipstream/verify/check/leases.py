"""The log with leases: pages that a copy beside the stream reads leave the replica by a command, after every rank has reported.

`LEASED` requests lease their pages when they are dropped. The rival frees them when the rank's own copy ends.
"""

from collections.abc import Iterator

import msgspec

from slipstream.log.entries import Entry
from slipstream.rank.events import Effect, SendReply
from slipstream.rank.leader import Leader
from slipstream.rank.loop import Rank
from slipstream.schedule.planner import Plan, Planner
from slipstream.verify.check.cases import LEASED
from slipstream.verify.check.world import Copied, Copy, StateReplica


class Release(msgspec.Struct, frozen=True, array_like=True, tag=100):
    """Command: the lease of request `id` has ended on every rank; its pages are free."""

    id: int


class Reported(msgspec.Struct, frozen=True, array_like=True, tag=101):
    """A rank's copy of a lease has ended."""

    rank: int
    id: int


class LeaseReplica(StateReplica):
    def __init__(self, limits):
        super().__init__(limits)
        self.leases: dict[int, tuple[int, ...]] = {}

    def drop(self, slot: int, id: int, kept: int = -1) -> bool:
        request = self.requests.get(slot)
        if request is not None and request.id == id and request.salt == LEASED and self.held[slot]:
            pages = tuple(self.page_table[slot, : self.held[slot]].tolist())
            for page in pages:  # the lease's own reference, that outlives the request's
                self.pages.refs[page] += 1
            self.leases[id] = pages
            self.calls.append(Copy(id, pages))  # type: ignore[arg-type]
        return super().drop(slot, id, kept)

    def end_lease(self, id: int) -> None:
        for page in reversed(self.leases.pop(id)):
            self.pages.release(page)
        self.changes.append(b"L%d;" % id)

    def state(self) -> tuple[object, ...]:
        return (*super().state(), tuple(self.leases.items()))


class LeaseRank(Rank):
    replica: LeaseReplica

    def on(self, event, now: float = 0.0) -> Iterator[Effect]:
        if isinstance(event, Copied):
            yield from self.copied(event.id)
        else:
            yield from super().on(event, now)

    def copied(self, id: int) -> Iterator[Effect]:
        """The end of a rank's own copy never changes its replica."""
        yield SendReply(Reported(self.rank, id))  # type: ignore[arg-type]

    def apply(self, entry: Entry) -> Iterator[Effect]:
        rest = tuple(c for c in entry.commands if not isinstance(c, Release))
        for command in entry.commands[: len(entry.commands) - len(rest)]:  # releases come first
            self.replica.end_lease(command.id)  # type: ignore[union-attr]
        return (yield from super().apply(msgspec.structs.replace(entry, commands=rest)))


class LeasePlanner(Planner):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.over: tuple[int, ...] = ()  # leases that every rank has reported

    def _drop(self, plan: Plan) -> None:
        for id in self.over:
            self.replica.end_lease(id)  # type: ignore[attr-defined]
            plan.commands.append(Release(id))  # type: ignore[arg-type]
            self.admission.reopen()
        self.over = ()
        super()._drop(plan)

    def state(self) -> tuple[object, ...]:
        return (*super().state(), self.over)


class LeaseLeader(Leader, LeaseRank):
    def __init__(self, *args):
        super().__init__(*args)
        self.heard: dict[int, frozenset[int]] = {}  # lease -> ranks whose copy has ended

    def on(self, event, now: float = 0.0) -> Iterator[Effect]:
        if isinstance(event, Copied | Reported):
            self.now = now
            yield from self.reported(getattr(event, "rank", 0), event.id)
            yield from self.write_entries()
        else:
            yield from Leader.on(self, event, now)

    def reported(self, rank: int, id: int) -> Iterator[Effect]:
        self.heard[id] = self.heard.get(id, frozenset()) | {rank}
        if len(self.heard[id]) == 1 + len(self.replied):
            del self.heard[id]
            assert isinstance(self.planner, LeasePlanner)
            self.planner.over += (id,)
        return iter(())

    def copy(self):
        other = super().copy()
        assert isinstance(other, LeaseLeader)
        other.heard = dict(self.heard)
        return other

    def state(self) -> tuple[object, ...]:
        *core, early = super().state()
        return (*core, (early, tuple((id, tuple(sorted(r))) for id, r in self.heard.items())))


class EarlyRank(LeaseRank):
    """Frees the pages of a lease when its own copy has ended."""

    def copied(self, id: int) -> Iterator[Effect]:
        self.replica.end_lease(id)
        return iter(())


class EarlyLeader(LeaseLeader):
    def reported(self, rank: int, id: int) -> Iterator[Effect]:
        assert isinstance(self.replica, LeaseReplica)
        self.replica.end_lease(id)
        self.planner.admission.reopen()
        return iter(())
