"""Whose prompt has its turn: arrival, length and priority, on a device of one speed."""

from types import SimpleNamespace

import numpy as np

from slipstream.schedule.budget import Budget
from slipstream.schedule.planner import Planner


def order_of_ends(arrivals: dict[int, tuple[float, int]], appears: dict[int, float] | None = None) -> list[int]:
    """In which order prompts (place in the order, tokens) end, by slot; they appear at their place or when `appears` says."""
    per_token = 1e-3
    budget = Budget(100, 0.1, 0.01, per_token, 100)
    replica = SimpleNamespace(prefilling=[], target=np.zeros(64, int), launched=np.zeros(64, int), ids=range(100, 164))
    planner = Planner(replica, budget, 8)  # type: ignore[arg-type]
    now, ended = 0.0, []
    while len(ended) < len(arrivals):
        for slot, (second, tokens) in arrivals.items():
            if (appears or {}).get(slot, second) <= now and slot not in planner.order:
                planner.order[slot], replica.target[slot] = (second, slot), tokens
                replica.prefilling.append(slot)
        rows = planner._cut_prompts(50)
        now += max(per_token * sum(n for _, _, n in rows), per_token)
        for slot, _, n in rows:
            replica.launched[slot] += n
            if replica.launched[slot] == replica.target[slot]:
                replica.prefilling.remove(slot)
                ended.append(slot)
    return ended


def test_of_prompts_that_came_together_the_shortest_ends_first():
    assert order_of_ends({0: (0.0, 900), 1: (0.0, 700), 2: (0.0, 1000), 3: (0.0, 800)}) == [1, 3, 0, 2]


def test_what_has_begun_goes_on_but_for_more_urgent_work():
    assert order_of_ends({0: (0.0, 1000), 1: (0.3, 600)}) == [0, 1]
    assert order_of_ends({0: (0.0, 1000), 1: (0.3, 600), 2: (-9.0, 900)}, appears={2: 0.3}) == [2, 0, 1]


def test_a_prompt_of_many_seconds_keeps_its_priority():
    assert order_of_ends({0: (0.0, 12_000), 1: (-10.0, 23_000)}, appears={1: 0.0}) == [1, 0]
    assert order_of_ends({0: (0.0, 6000), 1: (-49.0, 6000)}, appears={1: 1.0}) == [1, 0]


def test_a_long_prompt_waits_for_nothing_that_arrives_when_it_could_have_ended():
    """Short prompts fill the device for ever; one of 2000 tokens, two seconds, ends among those that came in the first six."""
    flood = {i: (0.1 * i, 100) for i in range(1, 60)}
    ended = order_of_ends({0: (0.0, 2000), **flood})
    assert ended.index(0) <= 45
