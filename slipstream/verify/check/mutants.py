"""Bugs planted on purpose, each of which the checker must find: `slipstream verify --mutants`.

A mutant edits the source text of production functions while it is explored. An edit whose text is not there, or not once, is an
error, so a mutant cannot outlive the code that it changes.
"""

import inspect
import sys
import textwrap
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

from rich.table import Table

from slipstream.log import replica, settling
from slipstream.log.replica import Replica
from slipstream.log.tables import Cache
from slipstream.rank import loop
from slipstream.rank.leader import Leader
from slipstream.rank.loop import Rank
from slipstream.schedule.admission import Admission
from slipstream.schedule.planner import Planner
from slipstream.system.terminal import console
from slipstream.verify.check.cases import Case, small_cases
from slipstream.verify.check.explore import explore
from slipstream.verify.check.model import Model
from slipstream.verify.check.rivals import LOG

MAX_STATES = 300_000  # of one case: an end to those that a mutant makes endless


class Edit(NamedTuple):
    """`old`, which stands once in the function's source, becomes `new`."""

    owner: Any  # the class or module that has the function
    function: str
    old: str
    new: str


class Mutant(NamedTuple):
    name: str
    case: str  # the first to be explored; every other one follows where it finds nothing
    edits: tuple[Edit, ...]


class Hunt(NamedTuple):
    """What was explored for one mutant, or for the machine as it is."""

    case: str  # that found it; "": none
    states: int
    seconds: float
    violation: str = ""


MUTANTS = (
    Mutant("an end is sent before every rank has acknowledged its drop", "lengths",
           (Edit(Leader, "finish", "through = self.acknowledged", "through = self.applied"),)),
    Mutant("a prompt may be cached to its last token", "wholly cached",
           (Edit(Replica, "_admit", "(known - 1) //", "known //"), Edit(Admission, "_cached", "(known - 1) //", "known //"))),
    Mutant("digests are not compared", "wrong replies",
           (Edit(Leader, "compare", "if reply.digest != digest:", "if False:"),)),
    Mutant("the order of replies is not checked", "wrong replies",
           (Edit(Leader, "check_reply", "due is None or reply.seq != due + 1 or reply.seq >= self.next", "due is None"),)),
    Mutant("a page is published one chunk early", "shared prefix in chunks",
           (Edit(Replica, "_publish_chunks", "min(end // page_size,", "min(-(-end // page_size),"),)),
    Mutant("a page is published one token early", "next turn",
           (Edit(settling, "_publish_generated", "(int(state.committed[slot]) - 1) //", "int(state.committed[slot]) //"),
            Edit(settling, "_commit_one", "np.count_nonzero(inside) < len(slots)", "True"),
            Edit(settling, "_commit_one", "slots[inside == 0].tolist()", "slots.tolist()"))),
    Mutant("a drop keeps the slot's epoch", "aborts",
           (Edit(Replica, "_drop", "self.epoch[slot] += 1", "pass"),)),
    Mutant("a row of a request that has ended still counts", "stop tokens",
           (Edit(replica, "settle", " & (state.phase[slots] != ENDED)", ""),)),
    Mutant("a follower does not wait at a mark", "lengths",
           (Edit(Rank, "advance", "self._unsettled_through(mark)", "False"),)),
    Mutant("followers do not forget a request that leaves before its grammar is compiled", "abort before a slot",
           (Edit(Leader, "unprepare", "yield self.send_aside(Forget(id))", "yield from ()"),)),
    Mutant("followers do not forget a request that leaves before it has a slot", "abort before a slot",
           (Edit(Leader, "abort", "yield self.send_aside(Forget(event.id))", "yield from ()"),)),
    Mutant("a late sampling does not wait for the tokens that its masks need", "late sampling",
           (Edit(Planner, "_needs_masks", "return bool(matchers) and", "return False and"),)),
    Mutant("a follower samples late before the second mark", "late sampling",
           (Edit(Rank, "advance", "len(self.replica.flights) > 1", "False"),)),
    Mutant("a row is written beyond a request's limit", "lengths",
           (Edit(Replica, "_launch_decode", "full = sure >= self.limit[slots]", "full = sure > self.limit[slots]"),)),
    Mutant("drafts are refunded by what came back, not by what was reserved", "drafts and a length",
           (Edit(settling, "_commit_many", "_take_back(state, slots, sampled, counts)",
                 "_take_back(state, slots, np.full_like(sampled, tokens.shape[1]), counts)"),)),
    Mutant("tokens after a stop inside drafts are committed", "drafts and a stop",
           (Edit(settling, "_commit_many", "    if state.stop_ids:", "    if False:"),)),
    Mutant("a grammar does not go back over drafts", "drafts and a grammar",
           (Edit(loop, "masks", "    if taken:", "    if False:"),)),
    Mutant("pages leave a window one page early", "window",
           (Edit(Replica, "_slide", "first = table.first_column(", "first = 1 + table.first_column("),)),
    Mutant("pages leave a window as if all drafts were right", "window and drafts",
           (Edit(Replica, "_slide", "min(int(self.committed[slot]) - 1, ", "max(0, "),)),
    Mutant("a hit does not need the pages of a window", "window and lost pages",
           (Edit(Cache, "find", "if gap < 0:", "if True:"),)),
    Mutant("a hit does not need a snapshot", "state and a lost snapshot",
           (Edit(Cache, "find", " or keys[columns - 1] not in self.snapshots.index", ""),
            Edit(Cache, "find", "self.snapshots.index[keys[columns - 1]]", "self.snapshots.index.get(keys[columns - 1], 0)"))),
    Mutant("a state is not cleared for a request that is computed again", "state computed again",
           (Edit(Replica, "_take", "(hit.snapshot or self.phase[slot] == PREEMPTED)", "hit.snapshot"),)),
    Mutant("a state is published before its tokens are committed", "state, drafts and a next turn",
           (Edit(Replica, "_save_decodes", "self.sure[slots] == self.bound[slots]", "self.sure[slots] > 0"),)),
    Mutant("host pages are not given back", "offload",
           (Edit(Replica, "_give_back_host", "table.free_host.extend(host)", "pass"),)),
    Mutant("a restored request counts wrong drafts as computed", "drafts and offload",
           (Edit(Replica, "_restored", "min(kept.tokens, known - 1)", "kept.tokens"),)),
    Mutant("a preempted request returns while its row is in flight", "leases and page shortage",
           (Edit(Planner, "_return_preempted", "elif not replica.pending(slot):", "elif True:"),
            Edit(Replica, "_admit", "if self.pending(slot):", "if False:"))),
    Mutant("chunks are cut too long, and no rank checks the bounds of a row", "chunks",
           (Edit(Planner, "_cut", "count) for slot", "count + 1) for slot"),
            Edit(Replica, "launch", "self._check(step.decode, slots, starts, counts, sampled)", "pass"))),
)  # fmt: skip


@contextmanager
def planted(mutant: Mutant) -> Iterator[None]:
    """Runs the body with the mutant's edits in place."""
    sources: dict[tuple[Any, str], str] = {}
    for owner, name, old, new in mutant.edits:
        source = sources.get((owner, name)) or textwrap.dedent(inspect.getsource(vars(owner)[name]))
        if source.count(old) != 1:
            raise LookupError(f"mutant {mutant.name!r}: {old!r} stands {source.count(old)} times in {name}, not once")
        sources[owner, name] = source.replace(old, new)
    before = {(owner, name): vars(owner)[name] for owner, name in sources}
    try:
        for (owner, name), source in sources.items():
            defined: dict[str, Any] = {}
            exec(source, before[owner, name].__globals__, defined)
            setattr(owner, name, defined[name])
        yield
    finally:
        for (owner, name), function in before.items():
            setattr(owner, name, function)


def hunt(mutant: Mutant | None, which: list[Case], merged: bool) -> Hunt:
    """Explores cases at two ranks until one fails. `mutant` None: the machine as it is."""
    began = time.monotonic()
    states = 0
    with planted(mutant) if mutant is not None else nullcontext():
        for case in which:
            found = explore(Model(case, LOG, 2), merged, MAX_STATES)
            states += found.states
            if found.violation or not found.complete:
                violation = found.violation or f"more than {MAX_STATES} states"
                return Hunt(case.name, states, time.monotonic() - began, violation)
    return Hunt("", states, time.monotonic() - began)


def check_mutants(reduced: bool) -> int:
    """Prints what found each mutant; 0 when all are found, and nothing in the machine as it is.

    `reduced`: only the case that is named with a mutant is explored, and followers' own steps are merged.
    """
    everything = {case.name: case for case in small_cases()}
    hunts: list[tuple[str, Hunt]] = []
    for mutant in MUTANTS:
        print(f"hunting: {mutant.name}", file=sys.stderr, flush=True)
        first = everything[mutant.case]
        rest = [] if reduced else [case for case in everything.values() if case is not first]
        hunts.append((mutant.name, hunt(mutant, [first, *rest], reduced)))
    named = {mutant.case for mutant in MUTANTS}
    print("exploring the machine as it is", file=sys.stderr, flush=True)
    clean = hunt(None, [case for case in everything.values() if not reduced or case.name in named], reduced)
    console().print(table_of([*hunts, ("none: the machine as it is", clean)]))
    missed = [name for name, found in hunts if not found.case]
    for name in missed:
        print(f"not found: {name}")
    if clean.case:
        print(f"the machine as it is fails in {clean.case!r}: {clean.violation}")
    return 1 if missed or clean.case else 0


def table_of(hunts: list[tuple[str, Hunt]]) -> Table:
    table = Table()
    for name in ("mutant", "found by", "states", "seconds", "as"):
        table.add_column(name, justify="right" if name in ("states", "seconds") else "left")
    for name, found in hunts:
        table.add_row(name, found.case or "-", f"{found.states:,}", f"{found.seconds:.1f}", found.violation)
    return table
