"""The checker: the log passes, its unsound rivals fail with an interleaving, and a broken log is caught."""

import pytest

from slipstream.log.state import Ended
from slipstream.schedule.planner import Plan
from slipstream.verify.check.cases import Case, cases
from slipstream.verify.check.explore import explore
from slipstream.verify.check.leases import LeasePlanner, LeaseReplica
from slipstream.verify.check.model import Model
from slipstream.verify.check.narrate import narrate
from slipstream.verify.check.rivals import LOG, PROTOCOLS
from slipstream.verify.check.timing import critical_path

SMALL = {c.name: c for c in cases(reduced=True)}
RIVALS = {p.name: p for p in PROTOCOLS}


@pytest.mark.parametrize("name", list(SMALL))
def test_the_log_passes_at_two_ranks_in_every_interleaving(name):
    found = explore(Model(SMALL[name], LOG, 2), merged=False)
    assert found.violation == "" and found.complete and found.states > 100


def test_merging_followers_own_steps_reaches_the_same_ends():
    """The reduction that three and four ranks need sees no fewer ends than the full search at two."""

    def ends(merged: bool) -> set[str]:
        model, out = Model(SMALL["page shortage"], LOG, 2), set()
        check_end = model.check_end

        def note(world):
            out.add(repr(world.front))
            check_end(world)

        model.check_end = note
        assert explore(model, merged).violation == ""
        return out

    assert ends(True) == ends(False)


def failing(protocol, case: Case, size: int = 2) -> list[str]:
    found = explore(Model(case, protocol, size), merged=size > 2)
    assert found.violation, f"{protocol.name} passes in {case.name}"
    lines = narrate(Model(case, protocol, size), found.trace)
    assert found.violation in lines[-1]
    return lines


def test_ff01_run_ahead_with_cancel_fails():
    lines = failing(RIVALS["run-ahead with cancel"], SMALL["stop tokens"])
    assert any("retract" in line for line in lines) and "where rank" in lines[-1]


@pytest.mark.parametrize("size", [2, 3])
def test_ff02_local_clocks_fail(size):
    lines = failing(RIVALS["per-rank verdict with local clocks"], SMALL["own clocks"], size)
    assert any("by the clock of rank" in line for line in lines)


def test_ff03_freeing_when_the_local_copy_ends_fails():
    lines = failing(RIVALS["early free"], SMALL["leases"])
    assert any("has copied the leased pages" in line for line in lines)


@pytest.mark.parametrize("name", ["gated commit", "verdict gate"])
def test_gated_rivals_pass(name):
    for case in ("stop tokens", "chunks", "leases", "rank death"):
        assert explore(Model(SMALL[case], RIVALS[name], 2), merged=False).violation == ""
    assert explore(Model(SMALL["stop tokens"], RIVALS[name], 3), merged=True).violation == ""


def test_only_the_log_queues_a_step_before_the_one_before_it_has_ended():
    assert critical_path(LOG, 2) == (0, True)
    assert critical_path(LOG._replace(serial=True), 2) == (1, False)
    assert critical_path(RIVALS["verdict gate"], 2) == (0, False)
    assert critical_path(RIVALS["gated commit"], 3) == (2, False)


# --- broken on purpose


class LocalPages(LeaseReplica):
    """A page more or less, by rank: as if a rank read its own free memory."""

    made = 0

    def __init__(self, limits):
        super().__init__(limits)
        LocalPages.made += 1
        if LocalPages.made % 2 == 0:
            self.pages.free.pop()
            self.pages.total -= 1


def test_ff03_a_rank_that_reads_its_own_free_pages_is_caught():
    found = explore(Model(SMALL["page shortage"], LOG._replace(replica=LocalPages), 2), merged=False)
    assert "differs" in found.violation or "digest" in found.violation or "queues" in found.violation


class DropsTooSoon(LeasePlanner):
    """Tells the followers of an end one entry before the leader acts on it: a removal that overtakes the step."""

    def _drop_one(self, plan: Plan, ended: Ended, kept: int) -> None:
        super()._drop_one(plan, ended, kept)
        plan.commands.append(plan.commands[-1])


def test_ff13_a_removal_of_an_unknown_request_is_caught():
    found = explore(Model(SMALL["lengths"], LOG._replace(planner=DropsTooSoon), 2), merged=False)
    assert "drop" in found.violation


class NeverDrops(LeasePlanner):
    def _droppable(self, slot: int) -> bool:
        return False


def test_a_deadlock_is_caught():
    found = explore(Model(SMALL["lengths"], LOG._replace(planner=NeverDrops), 2), merged=False)
    assert found.violation.startswith("deadlock")
