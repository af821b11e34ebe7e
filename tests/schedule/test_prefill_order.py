"""Whose prompt has its turn: arrival, length and priority, on a device of one speed."""

from slipstream.schedule.prefill_order import PendingPrefill, PrefillOrder

PER_TOKEN = 1e-3  # seconds
ROOM = 50  # tokens of a step


def prompt(id: int, left: int, at: float = 0.0, priority: int = 0) -> PendingPrefill:
    return PendingPrefill(id, id, left, (at, id), priority)


def turns(*prompts: PendingPrefill, begun: int = -1) -> PrefillOrder:
    return PrefillOrder(list(prompts), begun, lambda _: PER_TOKEN)


def order_of_ends(arrivals: dict[int, tuple[float, int]], appears: dict[int, float] | None = None) -> list[int]:
    """In which order prompts (place in the order, tokens) end; they appear at their place or when `appears` says."""
    left = {id: tokens for id, (_, tokens) in arrivals.items()}
    now, begun, ended = 0.0, -1, []
    while left:
        here = [prompt(id, n, arrivals[id][0]) for id, n in left.items() if (appears or {}).get(id, arrivals[id][0]) <= now]
        step = turns(*here, begun=begun)
        begun = step.first.id if step.first else begun
        counts = step.cut(ROOM)
        now += PER_TOKEN * max(sum(counts.values()), 1)
        for id, n in counts.items():
            left[id] -= n
        ended += [id for id, n in left.items() if not n]
        left = {id: n for id, n in left.items() if n}
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


def test_a_step_is_filled_and_nobody_gets_more_than_it_needs():
    assert turns(prompt(0, 30), prompt(1, 7, at=0.1), prompt(2, 40, at=0.2)).cut(50) == {0: 30, 1: 7, 2: 13}
    assert turns(prompt(0, 30)).cut(0) == {} == turns().cut(50)
    assert turns(prompt(0, 30), prompt(1, 3, at=1.0)).cut(0) == {}
    assert turns(prompt(0, 30)).cut(1) == {0: 1} and turns(prompt(0, 9), prompt(1, 1)).cut(1) == {1: 1}


def test_a_short_prompt_overtakes_only_what_is_not_more_urgent():
    urgent = prompt(0, 1000, priority=0)
    assert turns(urgent, prompt(1, 100, at=30.0, priority=3)).cut(50) == {0: 50}
    assert turns(urgent, prompt(1, 100, at=1.0, priority=0)).cut(50) == {0: 25, 1: 25}
    assert turns(prompt(0, 1000, priority=3), prompt(1, 100, at=1.0, priority=0)).cut(50) == {0: 25, 1: 25}


def test_a_waiting_prompt_knows_who_is_computed_before_it():
    first, second = prompt(0, 1000), prompt(1, 1100, at=0.1)
    under_way = turns(first, second, begun=0)
    assert under_way.goes_before(0, prompt(9, 20, at=5.0)._replace(slot=-1)), "the first is being computed now"
    assert not under_way.goes_before(1, prompt(9, 20, at=5.0)._replace(slot=-1)), "a short one overtakes the first"
    assert under_way.goes_before(1, prompt(9, 900, at=5.0)._replace(slot=-1))
    assert not under_way.goes_before(1, prompt(9, 900, at=-20.0)._replace(slot=-1)), "more urgent"
