"""Short prompts beside many long ones: whom they pass, for whom they wait, and what counts as short."""

import numpy as np
import pytest

from slipstream.schedule.planner import LONG_UNDER_WAY, LOOKAHEAD
from tests.helpers.toy_group import ToyGroup, request

BOTH = pytest.mark.parametrize("asynchronous", [False, True])


def long(id: int, tokens: int = 300, **kwargs):
    return request(id, np.random.default_rng(id).integers(0, 97, tokens), 2, **kwargs)


def new_group(asynchronous: bool = True, **shape) -> ToyGroup:
    """A short prompt has at most 50 tokens there, and a step 32."""
    group = ToyGroup(asynchronous=asynchronous, **{"cap": 32, "max_len": 512, "pages": 2000, "slots": 40, **shape})
    group.planner.short = 50
    return group


def crowd(group: ToyGroup, **kwargs) -> None:
    """Twenty long prompts, of which eight are under way and twelve wait."""
    group.submit(*(long(i, **kwargs) for i in range(20)))
    fill(group)
    assert len(group.planner.queue) == 12


def fill(group: ToyGroup) -> None:
    """Until as many long prompts are under way as may be; one joins a step."""
    while len(group.replica.prefilling) < LONG_UNDER_WAY:
        group.turn()


def turns_until_it_answers(group: ToyGroup, id: int, most: int = 400) -> int:
    for turn in range(most):
        if group.tokens[id]:
            return turn
        group.turn()
    raise AssertionError(f"no token of {id} after {most} turns")


@BOTH
def test_a_short_prompt_passes_a_queue_of_long_ones(asynchronous: bool):
    group = new_group(asynchronous)
    crowd(group)
    group.submit(request(50, [50] * 50, 2), request(51, [51] * 51, 2))
    assert turns_until_it_answers(group, 50) <= 8
    assert not group.tokens[51] and 51 not in group.planner.slot_of
    group.run()
    group.assert_right()


@BOTH
def test_the_next_turn_of_a_chat_is_short_by_what_the_cache_lacks(asynchronous: bool):
    group = new_group(asynchronous)
    group.submit(long(60, 400))
    group.run()
    crowd(group)
    history = np.frombuffer(group.sent[60].prompt, "<i4").tolist()
    group.submit(request(61, [*history, *[1] * 40], 2))
    group.submit(request(62, [*history, *[2] * 40], 2, prompt_logprobs=1))  # reads no cache
    assert turns_until_it_answers(group, 61) <= 8 and group.cached[61] == 400
    assert 62 not in group.planner.slot_of
    group.run()
    group.assert_right()


def test_what_was_short_by_the_cache_is_long_again_when_its_pages_are_gone():
    group = new_group()
    group.submit(long(60, 400))
    group.run()
    crowd(group)
    history = np.frombuffer(group.sent[60].prompt, "<i4").tolist()
    group.submit(*(request(70 + i, [i] * 20, 2, priority=-1) for i in range(LOOKAHEAD)), request(61, history, 2))
    waiting = next(w for w in group.planner.queue.all() if w.request.id == 61)
    group.planner.queue.set_short(waiting, group.planner._missing(waiting) <= 50)
    assert waiting.short
    pages = group.replica.pages
    for page in [pages.take() for _ in range(pages.available)]:
        pages.release(page)
    for _ in range(6):
        group.turn()
    assert not waiting.short and 61 not in group.planner.slot_of


@BOTH
def test_less_urgent_short_prompts_pass_nobody(asynchronous: bool):
    """Were they to pass, they would take half of each step from the long ones."""
    ends = []
    for flood in (False, True):
        group = new_group(asynchronous)
        crowd(group)
        for turn in range(150):
            if flood and turn % 2 == 0:
                group.submit(request(1000 + turn, [turn] * 20, 2, priority=3))
            group.turn()
        ends.append([id for id in group.ends if id < 20])
        group.run()
        group.assert_right()
    assert ends[0] == ends[1]


@BOTH
def test_behind_questions_that_wait_for_one_document_others_are_looked_at(asynchronous: bool):
    group = new_group(asynchronous)
    document = np.random.default_rng(1).integers(0, 97, 400).tolist()
    group.submit(*(request(i, [*document, i], 2) for i in range(2 * LOOKAHEAD)))
    for _ in range(3):
        group.turn()
    assert len(group.replica.prefilling) == 1
    group.submit(request(50, [50] * 20, 2))
    assert turns_until_it_answers(group, 50) <= 5
    group.run()
    group.assert_right()
    assert group.devices[0].computed < 400 + 2 * LOOKAHEAD * 8 + 30


@BOTH
def test_a_short_prompt_does_not_wait_for_a_beginning_whose_turn_is_far_off(asynchronous: bool):
    group = new_group(asynchronous)
    shared = np.random.default_rng(1).integers(0, 97, 40).tolist()
    group.submit(*(long(i, 450) for i in range(LONG_UNDER_WAY - 1)))
    group.submit(request(20, [*shared, *[20] * 400], 2))
    fill(group)
    group.submit(request(50, [*shared, 5, 5, 5], 2))
    assert turns_until_it_answers(group, 50) <= 8
    group.run()
    group.assert_right()


@BOTH
def test_when_the_head_is_aborted_for_which_everybody_waited_the_queue_opens(asynchronous: bool):
    group = new_group(asynchronous, pages=120, caching=False)
    group.submit(request(0, range(60), 400))
    group.turn()
    group.submit(*(long(1 + i, 400) for i in range(LOOKAHEAD)))
    group.submit(long(50, 200, priority=1))
    group.planner.short = 0  # so that only the first eight are looked at
    for _ in range(3):
        group.turn()
    assert 50 not in group.planner.slot_of
    for i in range(LOOKAHEAD):
        group.abort(1 + i)
    assert turns_until_it_answers(group, 50) <= 12
    group.run()
    group.assert_right()
