"""Short prompts beside many long ones: whom they pass, for whom they wait, and what counts as short."""

import numpy as np
import pytest

from slipstream.schedule.admission import LOOKAHEAD_REQUESTS, MAX_LONG_PREFILLS
from slipstream.schedule.queue import PRIORITY_LEVEL_S
from tests.helpers.toy_group import ToyGroup, request

BOTH = pytest.mark.parametrize("asynchronous", [False, True])


def long(id: int, tokens: int = 300, **kwargs):
    return request(id, np.random.default_rng(id).integers(0, 97, tokens), 2, **kwargs)


def new_group(asynchronous: bool = True, **shape) -> ToyGroup:
    """A short prompt has at most 50 tokens there, and a step 32."""
    group = ToyGroup(asynchronous=asynchronous, **{"cap": 32, "max_len": 512, "pages": 2000, "slots": 40, **shape})
    group.planner.admission.short = 50
    return group


def crowd(group: ToyGroup, **kwargs) -> None:
    """Twenty long prompts, of which eight are under way and twelve wait."""
    group.submit(*(long(i, **kwargs) for i in range(20)))
    fill(group)
    assert len(group.planner.queue) == 12


def fill(group: ToyGroup) -> None:
    """Until as many long prompts are under way as may be; one joins a step."""
    for _ in range(20):
        if len(group.replica.prefilling) < MAX_LONG_PREFILLS:
            group.turn()
    assert len(group.replica.prefilling) == MAX_LONG_PREFILLS


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
    assert turns_until_it_answers(group, 50) <= 12
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
    group.submit(*(request(70 + i, [i] * 20, 2, priority=-1) for i in range(LOOKAHEAD_REQUESTS)), request(61, history, 2))
    waiting = next(w for w in group.planner.queue.all() if w.request.id == 61)
    for _ in range(6):
        group.planner.admission.begin()
        group.planner.admission.choose(group.planner._turns(), crowded=True, before=None)
    assert waiting.short
    pages = group.replica.cache.tables[0].pages
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
    group.submit(*(request(i, [*document, i], 2) for i in range(2 * LOOKAHEAD_REQUESTS)))
    for _ in range(3):
        group.turn()
    assert len(group.replica.prefilling) == 1
    group.submit(request(50, [50] * 20, 2))
    assert turns_until_it_answers(group, 50) <= 8
    group.run()
    group.assert_right()
    assert group.devices[0].computed < 400 + 2 * LOOKAHEAD_REQUESTS * 8 + 30


@BOTH
def test_a_short_prompt_does_not_wait_for_a_beginning_whose_turn_is_far_off(asynchronous: bool):
    group = new_group(asynchronous)
    shared = np.random.default_rng(99).integers(0, 97, 40).tolist()
    group.submit(*(long(i, 450) for i in range(MAX_LONG_PREFILLS - 1)))
    group.submit(request(20, [*shared, *[20] * 400], 2))
    fill(group)
    group.submit(request(50, [*shared, 5, 5, 5], 2))
    assert turns_until_it_answers(group, 50) <= 8
    group.run()
    group.assert_right()


@BOTH
def test_when_the_head_is_aborted_for_which_everybody_waited_the_queue_opens(asynchronous: bool):
    group = new_group(asynchronous, pages=112, caching=False)
    group.planner.admission.short = 0  # so that only the first eight are looked at
    group.submit(request(0, range(60), 300))
    for _ in range(4):
        group.turn()
    group.submit(*(long(1 + i, 400) for i in range(LOOKAHEAD_REQUESTS)))
    group.submit(long(50, 200, priority=1))
    for _ in range(3):
        group.turn()
    assert len(group.planner.queue) == LOOKAHEAD_REQUESTS + 1
    for i in range(LOOKAHEAD_REQUESTS):
        group.abort(1 + i)
    assert turns_until_it_answers(group, 50) <= 12
    group.run()
    group.assert_right()


def tokens(seed: int, count: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, 97, count).tolist()


@BOTH
def test_questions_about_one_document_behind_another_compute_it_once(asynchronous: bool):
    """Each has a few tokens less of its own than the one before, so each would be computed before it, were it to join."""
    group = new_group(asynchronous, max_len=2048, pages=4000)
    document = tokens(1, 600)
    group.submit(long(0, 1000))
    group.turn()
    group.submit(*(request(10 + i, [*document, *tokens(50 + i, 60 - 4 * i)], 2) for i in range(12)))
    group.run()
    group.assert_right()
    assert group.devices[0].computed < 1000 + 600 + 12 * 70


@BOTH
def test_a_prompt_that_is_through_opens_the_queue_as_freed_pages_do(asynchronous: bool):
    """An urgent prompt does not wait for its document's owner and has no room for a copy; then the owner is done."""
    group = new_group(asynchronous, max_len=1024, pages=220)
    document = tokens(1, 400)
    group.submit(request(0, [1] * 4, 300))
    group.turn()
    group.submit(request(1, tokens(2, 100), 200), request(2, [*document, 1], 300))
    for _ in range(3):
        group.turn()
    group.submit(request(3, [*document, 2], 2, priority=-1))
    while not group.tokens[2]:
        group.turn()
    assert turns_until_it_answers(group, 3) <= 3
    group.run()
    group.assert_right()


def test_nobody_waits_for_pages_that_their_owner_has_passed():
    """Equal content was in the cache when the owner computed its own, and was evicted since: the owner's is never found."""
    group = new_group(max_len=4096, pages=3000)
    shared = tokens(1, 40)
    group.submit(request(1, [*shared, 1], 2))
    group.run()
    group.submit(request(2, [*shared, *tokens(2, 3000)], 2, prompt_logprobs=0))
    for _ in range(4):
        group.turn()
    pages = group.replica.cache.tables[0].pages
    for page in [pages.take() for _ in range(pages.available)]:
        pages.release(page)
    group.submit(request(3, [*shared, 2], 4))
    assert turns_until_it_answers(group, 3) <= 8 and not group.tokens[2]


@BOTH
def test_a_question_becomes_short_when_its_document_is_computed(asynchronous: bool):
    """As one is that comes then, and would pass it for ever."""
    group = new_group(asynchronous, max_len=1024, pages=6000, slots=60)
    document = tokens(1, 700)
    group.submit(request(60, document, 2))
    group.turn()
    group.submit(*(long(i, 900) for i in range(24)))
    fill(group)
    group.submit(request(50, [*document, 1, 2], 2))
    group.turn()
    assert 50 not in group.planner.slot_of and not group.tokens[60]
    while not group.tokens[60]:
        group.turn()
    assert turns_until_it_answers(group, 50) <= 8


def test_behind_documents_that_do_not_fit_every_long_prompt_is_asked_whether_it_is_short():
    """They begin alike, so that hashing them takes many looks; between two looks nothing else happens."""
    group = new_group(max_len=4096, pages=1500, cap=256)
    system = tokens(1, 1200)
    group.submit(request(0, [*system, 1], 2000))
    for _ in range(8):
        group.turn()
    group.submit(request(1, tokens(2, 2000), 1500))
    for _ in range(12):
        group.turn()
    group.submit(*(request(10 + i, [*system, *tokens(20 + i, 2840)], 20) for i in range(30)))
    group.submit(request(50, [*system, *tokens(3, 40)], 4))
    assert turns_until_it_answers(group, 50) <= 40


def test_less_urgent_short_prompts_do_not_hide_urgent_ones_however_old_they_are():
    group = new_group()
    crowd(group)
    group.submit(*(request(100 + i, [i] * 20, 2, priority=1) for i in range(LOOKAHEAD_REQUESTS)))
    group.now += 1.1 * PRIORITY_LEVEL_S
    group.submit(request(50, [50] * 20, 2))
    assert turns_until_it_answers(group, 50) <= 8


def test_questions_whose_document_was_evicted_do_not_hide_a_short_one():
    """Eight that do not fit were short and no longer are; nobody else stands among the short ones that a look sees."""
    group = new_group(max_len=1024, pages=200, cap=64)
    document = tokens(1, 400)
    group.submit(request(60, document, 2))
    group.run()
    group.submit(request(0, tokens(2, 400), 300))
    for _ in range(13):
        group.turn()
    group.submit(*(request(10 + i, [*document, *tokens(30 + i, 6)], 2) for i in range(LOOKAHEAD_REQUESTS)))
    for _ in range(72):
        group.turn()
    group.submit(request(50, [50] * 20, 2))
    assert turns_until_it_answers(group, 50) <= 8 and 0 not in group.ends


def test_a_beginning_with_a_gap_in_the_cache_makes_nothing_short():
    """Pages 64 to 99 of a document are in the cache and the first 64 are not: they were there when they were computed again."""
    group = new_group(max_len=1024, pages=2000)
    document = tokens(77, 400)
    group.submit(request(60, document, 2))
    group.run()
    group.submit(request(61, [*document, 1], 2, prompt_logprobs=0))
    for _ in range(6):
        group.turn()
    pages = group.replica.cache.tables[0].pages
    for page in [pages.take() for _ in range(pages.available)]:
        pages.release(page)
    group.run()
    crowd(group)
    group.submit(request(50, [*document, 2], 2))
    group.turn()
    keys = group.replica.prompt_keys(group.sent[50])
    assert sum(key in pages.index for key in keys) > 30 and not pages.find(keys)
    group.turn()
    assert 50 not in group.planner.slot_of


def test_a_burst_of_long_prompts_is_hashed_over_several_plans(monkeypatch):
    """Hashing all at once would keep the loop from feeding the device. Here at most 99 pages, and then one prompt more."""
    monkeypatch.setattr("slipstream.schedule.admission.MAX_HASHED_PAGES", 100)
    group = new_group()
    hashed, original = [0], group.replica.prompt_keys

    def prompt_keys(r):
        keys = original(r)
        hashed[-1] += len(keys)
        return keys

    monkeypatch.setattr(group.replica, "prompt_keys", prompt_keys)
    group.submit(request(50, [50], 200))
    group.turn()
    group.submit(*(long(i) for i in range(20)))
    for _ in range(20):
        hashed.append(0)
        group.turn()
    assert max(hashed) <= 99 + 75 and sum(hashed) == 20 * 75
