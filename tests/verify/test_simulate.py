"""The simulator passes on the production machine, replays exactly, shrinks, and catches what is broken on purpose."""

from dataclasses import replace

import msgspec
import pytest

from slipstream.log.caches import Limits
from slipstream.log.replica import Replica
from slipstream.log.request import Request, SamplingParams
from slipstream.log.state import Ended
from slipstream.schedule.admission import Admission
from slipstream.schedule.budget import Budget
from slipstream.schedule.planner import Plan, Planner
from slipstream.verify.common.memory import Violation
from slipstream.verify.simulate.run import Run
from slipstream.verify.simulate.scenario import Client, Fault, draw
from slipstream.verify.simulate.seeds import run_seed
from slipstream.verify.simulate.shrink import shrink


def seeds_until(wanted, first: int = 0, most: int = 400):
    """The first scenario from seed `first` on that `wanted` takes."""
    return next(s for s in map(draw, range(first, first + most)) if wanted(s))


def violation(scenario, **broken) -> str:
    try:
        Run(scenario, **broken).go()
    except Violation as e:
        return str(e)
    return ""


def first_violation(wanted=lambda s: not s.faults, tries: int = 25, **broken) -> str:
    """What breaks first in scenarios that `wanted` takes."""
    found = ""
    for seed in range(2000):
        scenario = draw(seed)
        if wanted(scenario):
            found = violation(scenario, **broken)
            tries -= 1
            if found or not tries:
                break
    return found


def test_runs_hold_every_promise_and_are_long_enough():
    results = [run_seed(seed) for seed in range(40)]
    assert [r for r in results if r.failure] == []
    assert all(r.entries >= 100 and r.requests >= 30 for r in results)
    assert any(r.poisonings for r in results) and any(r.preemptions for r in results)
    assert {order for r in results for order, n in r.orders.items() if n} == {"overlap", "no_overlap", "late_sample"}


def test_a_seed_replays_exactly():
    traces: list[list[str]] = [[], []]
    for lines in traces:
        Run(draw(7), lines=lines).go()
    assert traces[0] == traces[1] and len(traces[0]) > 100


@pytest.mark.parametrize(
    "kind", ["lose_entry", "lose_body", "lose_reply", "double_reply", "wrong_digest", "raise", "die", "stop"]
)
def test_a_fault_poisons_the_group_and_every_client_hears_one_end(kind):
    scenario = replace(seeds_until(lambda s: s.size == 2 and s.max_queue > 100), faults=(Fault(kind, 1, 10, 0.02, 100.0),))
    run = Run(scenario).go()
    assert run.poisonings == 1
    assert set(run.ends) == set(run.clients) and "500" in run.ends.values()


def test_a_rank_that_stands_still_for_a_moment_poisons_nothing():
    scenario = replace(seeds_until(lambda s: s.size == 3), faults=(Fault("stop", 2, 0, 0.02, 0.2),))
    assert Run(scenario).go().poisonings == 0


def planner_with(admission: type[Admission]):
    def make(*args) -> Planner:
        planner = Planner(*args)
        planner.admission = admission(planner.replica, planner.queue)
        return planner

    return make


class CountsCachedPages(Admission):
    """Counts pages of the prefix cache for a request that may not use them: found by the simulator."""

    def fits(self, request, known, keys):
        return super().fits(msgspec.structs.replace(request, sampling=SamplingParams()), known, keys)


def test_prompt_logprobs_need_all_their_pages():
    prompt = bytes(4 * 16)
    clients = (
        Client(Request(0, prompt, 12, SamplingParams(temperature=0.0)), 0.0),
        Client(Request(1, prompt, 2, SamplingParams(temperature=0.0, prompt_logprobs=1)), 0.008),
    )
    base = replace(draw(0), size=1, pages=8, slots=4, page_size=4, max_len=32, cap=256, faults=(), reserve=(), target=None)
    scenario = replace(base, clients=clients, asynchronous=True, caching=True, max_queue=100)
    assert violation(scenario) == ""
    assert "StopIteration" in violation(scenario, make_planner=planner_with(CountsCachedPages))


def test_requests_whose_grammar_is_compiled_count_as_waiting():
    """Found by the simulator."""
    clients = tuple(
        Client(Request(i, bytes(8), 2, SamplingParams(temperature=0.0), grammar=bytes((2, 0))), 0.0) for i in range(12)
    )
    run = Run(replace(draw(0), clients=clients, reserve=(), max_queue=6, faults=())).go()
    assert sum(end == "429" for end in run.ends.values()) == 6


# --- broken on purpose


class FreesEarly(Replica):
    """Hands a dropped request's pages out before the steps in flight have written them: as if on another stream."""

    def settle(self, outcome):
        settled = super().settle(outcome)
        for ended in settled.ended:
            table = self.cache.tables[0]
            for page in table.rows[ended.slot, : self.held[ended.slot]].tolist():
                if table.pages.refs[page] == 1 and page not in table.pages.keys:
                    table.pages.free.append(page)
        return settled


def test_ff20_pages_that_are_freed_while_a_step_still_writes_them_are_caught():
    assert first_violation(make_replica=FreesEarly)


class ForgetsADrop(Planner):
    """Drops an ended request on the leader and does not write it into the log."""

    def _drop_one(self, plan: Plan, ended: Ended, kept: int) -> None:
        super()._drop_one(plan, ended, kept)
        if ended.reason == "stop":
            plan.commands.pop()
            plan.dropped.pop()


def test_ff01_ff13_a_drop_that_one_rank_skips_is_caught():
    assert first_violation(lambda s: s.size > 1 and not s.faults, make_planner=ForgetsADrop)


class PublishesAtOnce(Replica):
    """Makes a prompt's pages findable when it is admitted, before any step has computed them."""

    def _admit(self, slot, id):
        cached = super()._admit(slot, id)
        self.publish(slot, range(len(self.keys[slot])))
        return cached


class AdmitsTwins(Planner):
    def _computed_soon(self, keys):
        return False


def test_ff22_a_hit_within_the_same_step_is_caught():
    broken = first_violation(make_replica=PublishesAtOnce, make_planner=AdmitsTwins)
    assert "holds something else" in broken or "two rows write" in broken


def test_ff04_rows_in_another_order_on_one_rank_are_caught():
    ranks = iter(range(10**6))

    class Reorders(Replica):
        def __init__(self, limits: Limits):
            super().__init__(limits)
            self.turned = next(ranks) % 2 == 1  # as a set's order might differ between two processes

        def _move_on(self, slots, sampled, decodes):
            super()._move_on(slots, sampled, decodes)
            if self.turned:
                self.decoding = self.decoding[::-1].copy()

    assert first_violation(lambda s: s.size == 2 and not s.faults, make_replica=Reorders)


def test_ff03_free_pages_that_differ_between_ranks_are_caught():
    ranks = iter(range(10**6))

    class Loses(Replica):
        def __init__(self, limits: Limits):
            super().__init__(limits)
            if next(ranks) % 2:
                self.cache.tables[0].pages.free.pop()

    assert "differ" in first_violation(lambda s: s.size == 2 and not s.faults, make_replica=Loses)


class FreesTwice(Replica):
    """An abort of a request in flight gives its last page back twice."""

    def _drop(self, slot, id, kept):
        table = self.cache.tables[0]
        page = int(table.rows[slot, max(int(self.held[slot]) - 1, 0)])
        found = super()._drop(slot, id, kept)
        if found and page in table.pages.free:
            table.pages.free.append(page)
        return found


def test_ff33_a_double_free_is_caught():
    assert first_violation(make_replica=FreesTwice)


class KeepsPages(Replica):
    """A preempted request that is dropped loses a page for ever."""

    def _drop(self, slot, id, kept):
        found, pages = super()._drop(slot, id, kept), self.cache.tables[0].pages
        if found and kept >= 0 and pages.free:
            pages.free.pop()
        return found


def test_ff33_a_page_lost_on_abort_is_caught():
    assert "lost" in first_violation(lambda s: not s.faults and any(c.stop for c in s.clients), make_replica=KeepsPages)


class SharesAdmissions(Admission):
    """Counts a shared prefix's free pages for every request that waits, and keeps no room to decode."""

    def fits(self, request, known, keys):
        pages, page_size = self.replica.cache.tables[0].pages, self.replica.limits.page_size
        return -(-known // page_size) - len(pages.find(keys)) <= pages.available


def test_ff26_admitting_many_against_the_same_free_pages_is_caught():
    wanted = lambda s: not s.faults and s.caching and s.pages < 2 * s.max_len // s.page_size  # noqa: E731
    assert first_violation(wanted, make_planner=planner_with(SharesAdmissions))


def test_ff25_page_shortage_always_ends():
    """Preemption after preemption must come to an end, also with pages for little more than one request."""
    preemptions = 0
    for seed in range(12):
        s = draw(seed)
        s = replace(s, pages=-(-s.max_len // s.page_size), slots=4, faults=(), max_queue=1000, size=1)
        run = Run(s).go()
        preemptions += run.group.leader.planner.counters.preemptions
    assert preemptions


def test_a_failing_scenario_shrinks_to_few_requests():
    wanted = seeds_until(lambda s: not s.faults and s.size == 2 and violation(s, make_planner=ForgetsADrop))
    small = shrink(wanted, lambda s: bool(violation(s, make_planner=ForgetsADrop)))
    assert len(small.clients) + len(small.reserve) <= 4
    assert violation(small, make_planner=ForgetsADrop)


def test_budget_learns_in_a_run():
    """The measured times reach the planner under virtual time too."""
    run = Run(replace(draw(3), size=1, faults=(), target=0.002)).go()
    assert isinstance(run.group.leader.planner.budget, Budget) and run.group.leader.planner.budget.base_s > 0
