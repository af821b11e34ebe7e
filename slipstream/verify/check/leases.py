"""The log with leases: pages that a copy outside the stream reads are freed by a command after every rank has reported.

`LEASED` requests lease their pages when they are dropped. The rival frees them when the rank's own copy ends.
"""

from collections.abc import Iterator

import msgspec

from slipstream.log.entries import Command
from slipstream.rank.events import Effect, Event, SendReply
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

    def apply(self, command: Command | Release) -> int:
        if isinstance(command, Release):
            self.end_lease(command.id)
            return 0
        return super().apply(command)

    def _drop(self, slot: int, id: int, kept: int) -> bool:
        request = self.requests.get(slot)
        if request is not None and request.id == id and request.salt == LEASED and self.held[slot]:
            table = self.cache.tables[0]
            pages = tuple(table.rows[slot, : self.held[slot]].tolist())
            for page in pages:  # the lease's own reference, that outlives the request's
                table.pages.share(page)
            self.leases[id] = pages
            self.ops.append(Copy(id, pages))  # type: ignore[arg-type]
        return super()._drop(slot, id, kept)

    def end_lease(self, id: int) -> None:
        for page in reversed(self.leases.pop(id)):
            self.cache.tables[0].pages.release(page)
        self.changes.append(b"L%d;" % id)

    def state(self) -> tuple[object, ...]:
        return (*super().state(), tuple(self.leases.items()))


class LeaseRank(Rank):
    replica: LeaseReplica

    def take(self, event: Event | Copied) -> Iterator[Effect]:
        if isinstance(event, Copied):
            yield from self.copied(event.id)
        else:
            yield from super().take(event)

    def copied(self, id: int) -> Iterator[Effect]:
        """The end of a rank's own copy never changes its replica."""
        yield SendReply(Reported(self.rank, id))  # type: ignore[arg-type]


class LeasePlanner(Planner):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.over: tuple[int, ...] = ()  # leases that every rank has reported

    def _drop(self, plan: Plan) -> None:
        for id in self.over:
            self._apply(plan, Release(id))  # type: ignore[arg-type]
            self.admission.reopen()
        self.over = ()
        super()._drop(plan)

    def state(self) -> tuple[object, ...]:
        return (*super().state(), self.over)


class LeaseLeader(Leader, LeaseRank):
    def __init__(self, *args):
        super().__init__(*args)
        self.heard: dict[int, frozenset[int]] = {}  # lease -> ranks whose copy has ended

    def take(self, event: Event | Copied | Reported) -> Iterator[Effect]:
        if isinstance(event, Reported):
            yield from self.reported(event.rank, event.id)
        else:
            yield from super().take(event)  # type: ignore[arg-type]

    def copied(self, id: int) -> Iterator[Effect]:
        return self.reported(0, id)

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
