"""Requests that a grammar binds, at the machines of a group: equal tokens in both modes, equal ends on all ranks."""

import random

import numpy as np
import pytest

from slipstream.grammar.matcher import Bound, Maker, Vocabulary
from slipstream.log.request import Request, SamplingParams
from tests.rank.machines import Machines

END = 0
TOKENS = [b"<|end|>", *(bytes([b]) for b in range(32, 122)), b"ab", b"cd", b"abc", b'{"']  # no token has the letter z
VOCABULARY = Vocabulary(TOKENS, [END], [END], len(TOKENS))
FREE, DIGITS, LETTERS, DEAD = "", "start: /[0-9]{8,40}/", "start: /[a-d]{2,9}/", 'start: /[a-d]{3}/ "z"'


def request(id: int, grammar: str = FREE, prompt: int = 6, max_tokens: int = 14, **bound) -> Request:
    ids = np.arange(id * 7 + 1, id * 7 + 1 + prompt, dtype="<i4") % len(TOKENS)
    data = Bound(grammar, **bound).encode() if grammar else b""
    return Request(id, ids.tobytes(), max_tokens, SamplingParams(seed=id, stop_ids=(END,)), grammar=data)


MIXED = [request(1, DIGITS), request(2), request(3, LETTERS), request(4, DIGITS, prompt=20), request(5, LETTERS, min_tokens=5)]


def group(size: int, asynchronous: bool, pages: int = 64) -> Machines:
    return Machines(size, asynchronous, lambda: Maker(VOCABULARY), len(TOKENS), pages)


def run(size: int, asynchronous: bool, requests: list[Request], seed: int = 0, pages: int = 64) -> Machines:
    machines = group(size, asynchronous, pages)
    for r in requests:
        machines.submit(r)
    machines.run(random.Random(seed), [r.id for r in requests])
    return machines


def answers(machines: Machines) -> dict[int, tuple]:
    return {
        id: (tuple(machines.tokens.get(id, ())), *((e.reason, e.error) for e in ends)) for id, ends in machines.ends.items()
    }


def text(machines: Machines, id: int) -> str:
    return b"".join(TOKENS[t] for t in machines.tokens[id] if t != END).decode()


@pytest.fixture(scope="module")
def expected() -> dict[int, tuple]:
    return answers(run(1, False, MIXED))


@pytest.mark.parametrize("size, asynchronous, seed", [(1, True, 0), (2, False, 1), (2, True, 2), (2, True, 3), (3, True, 4)])
def test_tokens_are_the_same_in_both_modes_and_on_any_number_of_ranks(expected, size, asynchronous, seed):
    machines = run(size, asynchronous, MIXED, seed)
    assert answers(machines) == expected
    assert (machines.leader.steps["late_sample"] > 0) == asynchronous
    assert text(machines, 1).isdigit() and set(text(machines, 3)) <= set("abcd")


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_matcher_outlives_a_preemption(asynchronous):
    long = [request(i, "start: /[0-9]{20,40}/", max_tokens=30, ignore_end=True) for i in range(1, 5)]
    machines = run(2, asynchronous, long, seed=5, pages=14)
    assert machines.leader.planner.counters.preemptions > 0
    assert answers(machines) == answers(run(1, False, long))


@pytest.mark.parametrize("size, asynchronous", [(1, False), (2, False), (2, True), (3, True)])
def test_a_dead_end_is_equal_on_all_ranks_and_ends_nobody_else(expected, size, asynchronous):
    machines = run(size, asynchronous, [*MIXED, request(9, DEAD)], seed=6)
    found = answers(machines)
    tokens, (reason, error) = found.pop(9)
    assert reason == "error" and "grammar" in error and len(tokens) <= 3
    assert found == expected


def test_the_masks_of_a_step_are_equal_on_all_ranks():
    machines = run(3, True, MIXED, seed=7)
    first, *others = machines.members
    assert first.masks and all(other.masks == first.masks for other in others)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_grammar_that_no_rank_can_compile_is_refused_and_changes_nothing(expected, asynchronous):
    machines = run(2, asynchronous, [*MIXED, request(9, "start: missing")], seed=8)
    (end,) = machines.ends.pop(9)
    assert end.status == 400 and "missing" in end.message
    assert answers(machines) == expected
    assert not any(m.machine.replica.bodies or m.machine.replica.prepared for m in machines.members)


def test_an_abort_while_a_grammar_is_prepared_ends_it_once_and_leaves_nothing():
    for seed in range(20):
        machines, rng = group(2, True), random.Random(seed)
        machines.submit(request(1))
        machines.submit(request(2, DIGITS))
        for _ in range(rng.randint(0, 6)):
            machines.turn(rng)
        machines.abort(2)
        machines.run(rng, [1, 2])
        assert [e.reason for e in machines.ends[2]] == ["abort"]
        assert not any(
            m.machine.replica.bodies or m.machine.replica.prepared or m.machine.replica.requests for m in machines.members
        )


@pytest.mark.parametrize("asynchronous", [False, True])
def test_ff06_an_abort_between_grammar_and_sampling_makes_no_rank_skip_a_collective(expected, asynchronous):
    """Aborted after every count of actions in turn: each rank's device gets the same calls, each forward its sampling."""
    between = 0
    for point in range(12, 150, 2):
        machines, rng = group(2, asynchronous), random.Random(point)
        for r in MIXED:
            machines.submit(r)
        for _ in range(point):
            machines.turn(rng)
        between += any(m.held is not None for m in machines.members)
        machines.abort(1)
        machines.run(rng, [r.id for r in MIXED])
        first, second = (m.calls for m in machines.members)
        assert first == second
        forwards = [seq for kind, seq in first if kind == "forward"]
        assert forwards == [seq for kind, seq in first if kind == "sample"]
        assert all(first[i + 1] == ("sample", seq) for i, (kind, seq) in enumerate(first) if kind == "forward")
        found = answers(machines)
        assert len(machines.ends[1]) == 1
        assert {id: a for id, a in found.items() if id != 1} == {id: a for id, a in expected.items() if id != 1}
    assert bool(between) == asynchronous, "no abort fell between a forward and its sampling"
