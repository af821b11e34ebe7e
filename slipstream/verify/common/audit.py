"""The invariants of a replica at any time, and of a group at rest."""

from collections import Counter
from collections.abc import Iterable

from slipstream.log.pages import Pages
from slipstream.log.replica import Replica
from slipstream.log.state import PREEMPTED
from slipstream.rank.leader import Leader
from slipstream.rank.loop import Rank
from slipstream.verify.common.memory import Violation


def audit(replica: Replica, leases: Iterable[tuple[int, ...]] = ()) -> None:
    """Each page is free, idle or referenced, as often as page tables and leases name it; indexes and their inverses agree.

    Leases are of pages of the first table.
    """
    for slot in replica.requests:
        if replica.phase[slot] == PREEMPTED and replica.held[slot]:
            raise Violation(f"slot {slot} is preempted and holds {replica.held[slot]} pages")
        if not replica.committed[slot] <= replica.sure[slot] <= replica.bound[slot]:
            raise Violation(f"slot {slot} has fewer tokens for certain than committed, or more than it may have")
    for t, table in enumerate(replica.cache.tables):
        refs: Counter[int] = Counter()
        for slot in replica.requests:
            refs.update(table.rows[slot, table.first[slot] : replica.held[slot]].tolist())
        for pages_of_lease in leases if t == 0 else ():
            refs.update(pages_of_lease)
        _audit_pool(table.pages, refs)
    _audit_pool(replica.cache.snapshots, Counter(s for saved in replica.unpublished.values() for _, s in saved))


def _audit_pool(pages: Pages, refs: Counter[int]) -> None:
    wrong = [p for p in range(1, pages.total + 1) if pages.refs[p] != refs[p]]
    if wrong or 0 in refs:
        page = wrong[0] if wrong else 0
        raise Violation(f"page {page} has {pages.refs[page]} references and stands in {refs[page]} tables and leases")
    free, idle = set(pages.free), set(pages.idle)
    if len(free) != len(pages.free) or free & idle or (free | idle) & refs.keys():
        raise Violation("a page is free twice, or free and held")
    if len(free) + len(idle) + len(refs) != pages.total:
        raise Violation(f"{pages.total - len(free) - len(idle) - len(refs)} pages are lost")
    if free & pages.keys.keys() or idle - pages.keys.keys():
        raise Violation("a free page is indexed, or an idle one is not")
    if {key: page for page, key in pages.keys.items()} != pages.index:
        raise Violation("the prefix index and its inverse differ")


def at_rest(ranks: list[Rank]) -> None:
    """All ranks are equal and hold nothing: no page, slot, row, message or lease is left."""
    leader = ranks[0]
    assert isinstance(leader, Leader)
    for r in ranks:
        replica = r.replica
        audit(replica)
        tables = list(zip(replica.cache.tables, replica.limits.tables, strict=True))
        left = {
            "pages": replica.cache.held,
            "snapshots": replica.cache.snapshots.held + len(replica.unpublished),
            "requests": len(replica.requests),
            "slots": replica.limits.slots - len(set(replica.free_slots)),
            "ended requests": len(replica.ended),
            "steps in flight": len(replica.flights),
            "pages not yet in a batch": len(replica.fresh_pages),
            "rows": len(replica.decoding) + len(replica.prefilling),
            "stop tokens": len(replica.stop_ids),
            "matchers": len(replica.matchers),
            "host pages": sum(limits.host_pages - len(set(table.free_host)) for table, limits in tables)
            + len(replica.offloaded),
            "operations": len(replica.ops),
            "drafts": len(replica.drafts),
            "prepared requests": len(replica.prepared),
            "entries": len(r.entries),
            "outcomes": len(r.outcomes),
            "bodies": len(replica.bodies),
            "late samplings": int(r.late is not None),
        }
        for what, n in left.items():
            if n:
                raise Violation(f"rank {r.rank} is at rest with {n} {what} left")
        if r.applied != leader.next - 1:
            raise Violation(f"rank {r.rank} is at rest after entry {r.applied}, the log's last is {leader.next - 1}")
        if replica.digest != leader.replica.digest or replica.state() != leader.replica.state():
            raise Violation(f"rank {r.rank} is at rest in another state than the leader")
    planner = leader.planner
    owed = (leader.sealed, leader.early, leader.ending, leader.preparing)
    for what in (*owed, planner.aborted, planner.slot_of, planner.arrival, planner.preempted):
        if what:
            raise Violation(f"the leader is at rest with {what} left")
    if len(planner.queue) or leader.acknowledged != leader.next - 1:
        raise Violation("the leader is at rest with requests waiting or entries unanswered")
