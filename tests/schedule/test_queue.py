"""The queue of waiting requests: order, ageing, removal."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.schedule.queue import PRIORITY_LEVEL_S, Queue
from tests.helpers.toy_group import request


def ids(queue: Queue, count: int = 100) -> list[int]:
    return [w.request.id for w in queue.first(count)]


def test_within_a_priority_the_first_come_is_the_first_served():
    queue = Queue(10)
    for id in (3, 1, 2):
        queue.push(request(id, [1]), now=7.0)
    assert ids(queue) == [3, 1, 2]


def test_a_smaller_priority_goes_first_until_the_other_has_aged():
    queue = Queue(10)
    queue.push(request(1, [1], priority=1), now=0.0)
    queue.push(request(2, [1], priority=0), now=PRIORITY_LEVEL_S - 0.1)
    queue.push(request(3, [1], priority=0), now=PRIORITY_LEVEL_S + 0.1)
    assert ids(queue) == [2, 1, 3]


def test_nothing_waits_for_ever_behind_later_and_more_urgent_work():
    queue = Queue(1000)
    queue.push(request(0, [1], priority=5), now=0.0)
    served = []
    for i in range(1, 200):
        queue.push(request(i, [1], priority=0), now=float(i))
        served.append(ids(queue, 1)[0])
        queue.remove(served[-1])
    assert served.index(0) <= 5 * PRIORITY_LEVEL_S + 1


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["push", "remove", "move", ""]), st.integers(0, 9), st.integers(-2, 2)), max_size=60))
def test_it_is_a_sorted_list_with_removal_by_id(calls: list[tuple[str, int, int]]):
    queue, model, short, levels = Queue(1000), {}, set(), {}
    for at, (call, id, priority) in enumerate(calls):
        if call == "push" and id not in model:
            queue.push(request(id, [1], priority=priority), float(at), short=id < 4)
            model[id] = at + PRIORITY_LEVEL_S * priority
            levels[id] = priority
            short = short | {id} if id < 4 else short - {id}
        elif call == "move" and id in model:
            queue.set_short(next(w for w in queue.all() if w.request.id == id), id not in short)
            short ^= {id}
        elif call == "remove":
            assert (queue.remove(id) is not None) == (model.pop(id, None) is not None)
        want = sorted(model, key=lambda i: model[i])
        assert ids(queue, 3) == want[:3] and ids(queue) == want
        assert [w.request.id for w in queue.all()] == want and len(queue) == len(want)
        urgent = sorted((i for i in want if i in short), key=lambda i: levels[i])  # a stable sort
        assert [w.request.id for w in queue.first(3, short=True)] == urgent[:3]
        assert [w.request.id for w in queue.copy().first(9, short=True)] == urgent


@pytest.mark.parametrize("short", [False, True])
def test_those_that_have_left_are_not_kept_for_ever(short: bool):
    """While one of the other kind stands at the head, or all leave that came."""
    queue = Queue(10)
    queue.push(request(-1, [1]), 0.0, short=not short)
    for id in range(1000):
        queue.push(request(id, [1]), 1.0 + id, short)
        queue.remove(id)
    assert len(queue._long) + sum(map(len, queue._heaps)) <= 200 and ids(queue) == [-1]
    for id in range(1000):
        queue.push(request(id, [1]), 1.0 + id, short)
    for id in range(1000):
        queue.remove(id)
    assert len(queue._long) + sum(map(len, queue._heaps)) <= 200 and ids(queue) == [-1]


def test_long_prompts_are_asked_in_turn_again_and_again():
    queue = Queue(10)
    for id in range(6):
        queue.push(request(id, [1]), float(id), short=id == 1)
    queue.remove(2)
    queue.recheck_all()
    copy = queue.copy()
    for these in (queue, copy):
        assert [w.request.id for _ in range(9) if (w := these.next_long())] == [0, 3, 4, 5, 0, 3, 4, 5, 0]
        assert not these.unchecked
        these.set_short(these.first(1)[0], True)
        assert [w.request.id for _ in range(4) if (w := these.next_long())] == [3, 4, 5, 3]
        for w in these.first(9):
            these.remove(w.request.id)
        assert these.next_long() is None


def test_a_removed_request_may_come_again_with_the_same_id():
    queue = Queue(10)
    queue.push(request(1, [1]), now=0.0)
    queue.push(request(2, [1]), now=1.0)
    queue.remove(1)
    queue.push(request(1, [1]), now=2.0)
    assert ids(queue) == [2, 1]
