"""Many simulated runs, one seed each, on one or several processes; a failing seed is shrunk and its shortest trace printed."""

import gc
import multiprocessing
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from slipstream.verify.common.memory import Violation
from slipstream.verify.simulate.run import Run
from slipstream.verify.simulate.scenario import Scenario, draw
from slipstream.verify.simulate.shrink import shrink

SEEDS_PER_TASK = 100  # seeds that a process takes at a time


class Result(NamedTuple):
    """What one seed did. `failure` is empty where nothing was wrong."""

    seed: int
    entries: int
    requests: int
    poisonings: int
    preemptions: int
    size: int
    ends: dict[str, int]
    orders: dict[str, int]
    failure: str = ""


def run_seed(seed: int) -> Result:
    scenario = draw(seed)
    run = Run(scenario)
    try:
        run.go()
        failure = ""
    except Violation as e:
        failure = str(e)
    leader = run.group.leader
    return Result(
        seed,
        run.entries,
        len(run.clients),
        run.poisonings,
        leader.planner.counters.preemptions,
        scenario.size,
        Counter(run.ends.values()),
        {str(order): n for order, n in leader.steps.items()},
        failure,
    )


def run_piece(seeds: range) -> list[Result]:
    gc.disable()  # a run's objects die together; collecting in the midst costs a tenth of the time
    out = [run_seed(seed) for seed in seeds]
    gc.collect()
    return out


def run_seeds(first: int, last: int, jobs: int) -> Iterator[Result]:
    """Results of the seeds first..last, in order."""
    pieces = [range(a, min(a + SEEDS_PER_TASK, last + 1)) for a in range(first, last + 1, SEEDS_PER_TASK)]
    if jobs == 1:
        for piece in pieces:
            yield from run_piece(piece)
        return
    with multiprocessing.get_context("spawn").Pool(jobs) as pool:
        for results in pool.imap(run_piece, pieces):
            yield from results


class Total:
    """Sums over results."""

    def __init__(self) -> None:
        self.runs = self.entries = self.requests = self.poisonings = self.preemptions = self.short = 0
        self.sizes: Counter[int] = Counter()
        self.ends: Counter[str] = Counter()
        self.orders: Counter[str] = Counter()
        self.failures: list[Result] = []
        self.began = time.monotonic()

    def add(self, r: Result) -> None:
        self.runs += 1
        self.entries += r.entries
        self.requests += r.requests
        self.poisonings += r.poisonings
        self.preemptions += r.preemptions
        self.short += r.entries < 100
        self.sizes[r.size] += 1
        self.ends.update(r.ends)
        self.orders.update(r.orders)
        if r.failure:
            self.failures.append(r)

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.began


def failure_of(scenario: Scenario) -> str:
    """What a scenario breaks, or an empty text."""
    try:
        Run(scenario).go()
    except Violation as e:
        return str(e)
    return ""


def shortest(scenario: Scenario) -> tuple[Scenario, str, list[str]]:
    """(the smallest failing scenario found, what it breaks, its trace)."""
    small = shrink(scenario, lambda s: bool(failure_of(s)))
    lines: list[str] = []
    try:
        Run(small, lines=lines).go()
    except Violation as e:
        return small, str(e), lines
    raise AssertionError("a failing scenario passes when it is run again")


def trace(seed: int) -> tuple[str, list[str]]:
    """(what the seed's run breaks or an empty text, its whole trace)."""
    lines: list[str] = []
    try:
        Run(draw(seed), lines=lines).go()
    except Violation as e:
        return str(e), lines
    return "", lines


def describe(scenario: Scenario) -> str:
    """The scenario without its clients, in one line."""
    s = replace(scenario, clients=(), reserve=())
    fields = {k: v for k, v in vars(s).items() if k not in ("clients", "reserve")}
    return ", ".join(f"{k} {v}" for k, v in fields.items())
