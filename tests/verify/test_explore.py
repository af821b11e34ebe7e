"""The checker: the log passes, its unsound rivals fail with an interleaving, and a broken log is caught."""

import pytest

from slipstream.log.replica import Replica
from slipstream.log.state import PREEMPTED, Ended
from slipstream.schedule.planner import Plan
from slipstream.verify.check.cases import STOP, Case, cases
from slipstream.verify.check.explore import explore
from slipstream.verify.check.leases import LeasePlanner, LeaseReplica
from slipstream.verify.check.model import Model
from slipstream.verify.check.mutants import MUTANTS, Edit, Mutant, hunt, planted
from slipstream.verify.check.narrate import narrate
from slipstream.verify.check.rivals import LOG, PROTOCOLS
from slipstream.verify.check.timing import critical_path
from slipstream.verify.check.world import Op
from slipstream.verify.common.toy import WORDS

SMALL = {c.name: c for c in cases(reduced=True)}
RIVALS = {p.name: p for p in PROTOCOLS}


@pytest.mark.parametrize("name", list(SMALL))
def test_the_log_passes_at_two_ranks_in_every_interleaving(name):
    found = explore(Model(SMALL[name], LOG, 2), merged=False)
    assert found.violation == "" and found.complete and found.states > 50


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


def test_a_rank_launches_before_another_one_has_read_the_entry():
    """No gate holds a rank back at its start: in every such world the ranks still queue the same operations in one order."""
    model, ahead = Model(SMALL["stop tokens"], LOG, 2), set()
    actions = model.actions

    def note(world):
        leader, follower = (sum(model.thing(op).name[0] == "step" for op in site.queued) for site in world.sites)
        ahead.add(leader - follower)
        return actions(world)

    model.actions = note
    assert explore(model, merged=False).violation == ""
    assert ahead == {0, 1, 2}  # steps that the leader's device has and the follower's has not


# --- what the cases reach


def reached(name: str) -> tuple[Model, list[Op]]:
    """A case explored to the end, with all device operations that were met."""
    model = Model(SMALL[name], LOG, 2)
    assert explore(model, merged=True).violation == ""
    return model, [thing for thing in model.known.things if isinstance(thing, Op)]


def accepted(ops: list[Op]) -> list[int]:
    return [n for op in ops if op.outcome is not None for n in op.outcome.accepted.tolist()]


@pytest.mark.parametrize("name", ["drafts and page shortage", "drafts and offload"])
def test_a_case_preempts_a_request_whose_accepted_count_is_not_known(name):
    model, ops = reached(name)
    replicas = [machine.replica for machine in model.known.machines]
    assert any(r.phase[s] == PREEMPTED and r.bound[s] > r.sure[s] for r in replicas for s in r.requests)
    assert any(op.name[0] == "Restore" for op in ops) == (name == "drafts and offload")


def test_a_case_stops_inside_accepted_drafts():
    _, ops = reached("drafts and a stop")
    outcomes = [op.outcome for op in ops if op.outcome is not None]
    inside = [o.tokens[row, : n - 1].tolist() for o in outcomes for row, n in enumerate(o.accepted.tolist())]
    assert any(STOP in tokens for tokens in inside)


def test_a_case_reaches_a_length_inside_a_row_of_drafts():
    model, ops = reached("drafts and a length")
    assert any(n > 1 for n in accepted(ops))
    replicas = [machine.replica for machine in model.known.machines]
    assert any(r.bound[s] > r.limit[s] for r in replicas for s in r.requests)


@pytest.mark.parametrize("name", ["drafts and a grammar", "drafts and a dead end"])
def test_a_case_samples_drafts_late_under_several_masks(name):
    model, ops = reached(name)
    masks = [mask for op in ops if op.name[0] == "sample" for _, mask in op.name[-2]]
    assert any(len(mask) > 4 * WORDS for mask in masks) and any(n > 1 for n in accepted(ops))
    assert any(machine.late is not None for machine in model.known.machines)


def test_a_case_goes_on_from_a_saved_state():
    _, ops = reached("state")
    assert any(op.name[0] == "SetState" and op.name[2] > 0 for op in ops)


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
    for case in ("stop tokens", "chunks", "leases", "rank death", "wrong replies"):
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
            pages = self.cache.tables[0].pages
            pages.free.pop()
            pages.total -= 1


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


# --- planted bugs


@pytest.mark.parametrize("mutant", MUTANTS, ids=[mutant.name for mutant in MUTANTS])
def test_a_planted_bug_is_found(mutant):
    found = hunt(mutant, [SMALL[mutant.case]], merged=True)
    assert found.case == mutant.case and found.violation


def test_a_planted_bug_is_gone_afterwards():
    before = [vars(edit.owner)[edit.function] for mutant in MUTANTS for edit in mutant.edits]
    for mutant in MUTANTS:
        with planted(mutant):
            assert all(vars(edit.owner)[edit.function] not in before for edit in mutant.edits)
    assert [vars(edit.owner)[edit.function] for mutant in MUTANTS for edit in mutant.edits] == before


def test_an_edit_that_no_longer_fits_the_source_is_an_error():
    stale = Mutant("stale", "lengths", (Edit(Replica, "_drop", "no such text", ""),))
    with pytest.raises(LookupError, match="0 times in _drop"), planted(stale):
        pass
