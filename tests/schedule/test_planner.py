"""The planner over production machines and a toy device that checks every read."""

import itertools
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.log.caches import one_table
from slipstream.log.entries import Admit, Drop, Entry, Preempt
from slipstream.schedule.admission import MAX_BYPASSES
from slipstream.schedule.budget import Budget
from slipstream.schedule.planner import Planner, PrefillShare
from tests.helpers.toy_group import ToyGroup, expected, request

BOTH = pytest.mark.parametrize("asynchronous", [False, True])


def commands(group: ToyGroup, kind: type) -> list:
    return [c for e in group.entries if isinstance(e, Entry) for c in e.commands if isinstance(c, kind)]


@BOTH
def test_decode_rows_come_first_and_chunks_of_prompts_fill_what_is_left(asynchronous: bool):
    group = ToyGroup(asynchronous=asynchronous, cap=16, max_len=512, pages=128)
    group.submit(request(1, range(5), 60), request(2, range(7), 60))
    for _ in range(4):
        group.turn()
    group.submit(request(3, range(100), 4))
    group.run()
    mixed = [b for b in group.batches if b.decodes == 2 and len(b.slots) == 3]
    assert len(mixed) >= 7
    assert all(b.tokens <= 16 and b.counts[:2].tolist() == [1, 1] for b in mixed)
    assert mixed[1].tokens == 16
    group.assert_right()


@BOTH
def test_equally_long_prompts_do_not_share_a_step_and_a_short_one_overtakes_the_oldest(asynchronous: bool):
    group = ToyGroup(asynchronous=asynchronous, cap=32, max_len=512, pages=200, slots=8)
    group.submit(request(1, [1] * 300, 4), request(2, [2] * 290, 4))
    for _ in range(3):
        group.turn()
    group.submit(request(3, [3] * 40, 4))
    group.run()
    group.assert_right()
    prompts = [dict(zip(b.slots[b.decodes :].tolist(), b.counts[b.decodes :].tolist(), strict=True)) for b in group.batches]
    slots = list(dict.fromkeys(slot for step in prompts for slot in step))  # in the order in which they began
    oldest, short, second = slots
    assert max(i for i, step in enumerate(prompts) if oldest in step) <= min(
        i for i, step in enumerate(prompts) if second in step
    )
    both = [step for step in prompts if oldest in step and short in step]
    assert sum(step[short] for step in both) == 40
    assert all(step[oldest] >= 16 for step in both), "the oldest keeps half of the room"


@pytest.mark.parametrize("last", [0.0, 600.0, 100_000.0])
def test_what_a_step_holds_is_priced_by_where_all_of_it_is(last: float):
    """The oldest has 100 tokens left near its beginning; behind it stands a prompt with 100,000 in the cache."""
    budget = Budget(2048, 0.016, 0.0035, 4e-6, 2048, 1.5e-9)
    replica = SimpleNamespace(prefilling=[0, 1], bound=np.array([720, 103_000]), computed=np.array([620, 100_000]), ids=[7, 8])
    replica.limits = one_table(pages=1, slots=2, max_len=110_000)
    replica.requests = {slot: request(7 + slot, [1]) for slot in (0, 1)}
    planner = Planner(replica, budget, 8)  # type: ignore[arg-type]
    planner.arrival, planner._last = {0: (0, 0), 1: (0, 1)}, PrefillShare(0, [], -1, last)
    room, rows, _, _ = planner._share(np.arange(16), planner._turns())
    assert sum(n for _, _, n in rows) == room >= 64
    assert budget.base_s + sum(n * budget.cost(start) for _, start, n in rows) <= 1.05 * 0.016


@BOTH
def test_ff26_many_requests_with_one_prefix_compute_it_once(asynchronous: bool):
    group = ToyGroup(asynchronous=asynchronous, pages=200, slots=32, cap=256, max_len=256)
    prefix = [7] * 80
    group.submit(*(request(i, [*prefix, i + 10, i + 11], 6) for i in range(32)))
    group.run()
    group.assert_right()
    most = 80 + 32 * (2 + 6)
    assert group.devices[0].computed <= most
    assert sum(cached == 80 for cached in group.cached.values()) == 31


@BOTH
def test_requests_that_come_between_two_snapshots_wait_for_the_next_one(asynchronous: bool):
    limits = one_table(pages=200, slots=32, max_len=256)._replace(snapshots=8, snapshot_tokens=64)
    group = ToyGroup(asynchronous=asynchronous, cap=16, limits=limits)
    prefix = [7] * 140
    for i in range(8):
        group.submit(request(i, [*prefix, i + 10], 6))
        group.turn()
    group.run()
    group.assert_right()
    assert sorted(group.cached.values()) == [0] + [128] * 7


@BOTH
def test_who_waits_for_a_common_beginning_joins_when_it_is_computed_and_not_when_its_owner_ends(asynchronous: bool):
    group = ToyGroup(asynchronous=asynchronous, cap=64, pages=200, slots=16, max_len=512)
    group.submit(request(1, [*[7] * 200, 1], 200), request(2, [*[7] * 200, 2], 20))
    for _ in range(8):
        group.turn()
    assert group.tokens[2] and group.cached[2] == 200
    group.run()
    group.assert_right()


@BOTH
def test_who_waits_for_a_common_beginning_computes_it_when_its_owner_is_gone(asynchronous: bool):
    group = ToyGroup(asynchronous=asynchronous, cap=64, pages=300, slots=16, max_len=512)
    group.submit(request(3, [9], 300), request(1, [*[7] * 200, 1], 200), request(2, [*[7] * 200, 2], 20))
    group.turn()
    group.abort(1)
    for _ in range(10):
        group.turn()
    assert group.tokens[2]
    group.run()
    group.assert_right()


@BOTH
def test_prompt_log_probabilities_wait_for_nobodys_beginning(asynchronous: bool):
    group = ToyGroup(asynchronous=asynchronous, cap=32, pages=200, slots=16, max_len=512)
    group.submit(request(1, [*[7] * 300, 1], 20), request(2, [*[7] * 200, 2], 20, prompt_logprobs=1))
    group.turn()
    assert [c.id for c in commands(group, Admit)] == [1, 2]
    group.run()
    group.assert_right()


@BOTH
def test_urgent_work_does_not_wait_behind_what_was_preempted_and_equals_do(asynchronous: bool):
    group = ToyGroup(asynchronous=asynchronous, pages=16, slots=8, cap=64)
    group.submit(*(request(i, [i] * 20, 24, priority=5) for i in (1, 2)))
    while not commands(group, Preempt):
        group.turn()
    victim = commands(group, Preempt)[0].slot
    group.submit(request(10, [1], 2, priority=0), request(11, [2], 2, priority=5))
    group.run()
    order = [c.id for c in commands(group, Admit)]
    back = max(i for i, c in enumerate(commands(group, Admit)) if c.slot == victim and c.id < 4)
    assert order.index(10) < back < order.index(11)
    group.assert_right()


@BOTH
def test_ff26_many_requests_with_one_prefix_all_decode_under_page_shortage(asynchronous: bool):
    group = ToyGroup(asynchronous=asynchronous, pages=30, slots=32, cap=64)
    group.submit(*(request(i, [*[7] * 60, i + 10], 12) for i in range(32)))
    group.run()
    group.assert_right()


@BOTH
def test_ff22_equal_prompts_that_arrive_together_read_no_page_before_it_is_computed(asynchronous: bool):
    group = ToyGroup(asynchronous=asynchronous, cap=8, slots=4)
    group.submit(*(request(i, range(30), 6) for i in range(4)))
    group.run()
    group.assert_right()  # the device refuses a row that reads what is not there
    assert group.devices[0].computed <= 30 + 3 * 2 + 4 * 6


@BOTH
def test_ff34_the_next_turn_of_a_chat_hits_its_own_answer(asynchronous: bool):
    group = ToyGroup(asynchronous=asynchronous)
    first = request(1, range(10), 21)
    group.submit(first)
    group.run()
    group.submit(request(2, [*range(10), *expected(first), 1, 2, 3], 4))
    group.run()
    assert group.cached[2] == 28
    group.assert_right()


@BOTH
def test_an_answer_cut_by_a_stop_string_is_cached_up_to_the_cut_only(asynchronous: bool):
    group = ToyGroup(asynchronous=asynchronous)
    first = request(1, range(10), 100)
    group.submit(first)
    while len(group.tokens[1]) < 30:
        group.turn()
    group.abort(1, kept=9)
    group.run()
    group.submit(request(2, [*range(10), *expected(first)[:30], 5], 4))
    group.run()
    assert group.cached[2] == 16
    group.assert_right()


@BOTH
def test_ff24_preempted_requests_give_the_same_tokens(asynchronous: bool):
    group = ToyGroup(size=2, asynchronous=asynchronous, pages=16, slots=6, cap=24, caching=False)
    group.submit(*(request(i, range(i, i + 6), 24) for i in range(6)))
    group.run()
    assert group.planner.counters.preemptions > 0
    group.assert_right()


@BOTH
def test_preempted_pages_come_back_from_the_host_where_copying_is_cheaper(asynchronous: bool):
    group = ToyGroup(size=2, asynchronous=asynchronous, pages=16, slots=6, cap=24, caching=False, host_pages=40)
    group.planner.budget.token_s = 1.0
    group.submit(*(request(i, range(i, i + 6), 24) for i in range(6)))
    group.run()
    kept = [c for c in commands(group, Preempt) if c.keep]
    assert kept and group.devices[0].computed < 6 * 30 + 40
    group.assert_right()


@BOTH
def test_the_newest_of_the_lowest_priority_is_preempted_first(asynchronous: bool):
    group = ToyGroup(asynchronous=asynchronous, pages=14, slots=3, caching=False)
    group.submit(
        request(1, range(8), 30, priority=0), request(2, range(8), 30, priority=1), request(3, range(8), 30, priority=0)
    )
    while not commands(group, Preempt):
        group.turn()
    assert group.replica.ids[commands(group, Preempt)[0].slot] == 2
    group.run()
    group.assert_right()


@pytest.mark.parametrize("prompt", [5, 6])
def test_ff25_pages_that_the_next_settles_free_are_waited_for_and_nobody_is_preempted(prompt: int):
    """Two requests fill the cache; the other one needs a page when the last row of the first is in flight, or has settled."""
    group = ToyGroup(pages=7, slots=2, caching=False)
    group.submit(request(1, range(8), 9), request(2, range(prompt), 20 - prompt))
    group.run()
    assert group.planner.counters.preemptions == 0
    group.assert_right()


@BOTH
@pytest.mark.parametrize("pages", [8, 9, 12])
def test_under_any_shortage_something_advances_and_a_single_request_completes(asynchronous: bool, pages: int):
    group = ToyGroup(asynchronous=asynchronous, pages=pages, slots=4, cap=8)
    group.submit(*(request(i, range(i, i + 8), 24) for i in range(4)))  # one fills eight pages alone
    group.run()
    group.assert_right()
    assert group.planner.counters.preemptions < 40


@BOTH
def test_ff28_short_requests_pass_a_head_that_does_not_fit_and_it_is_served_in_the_end(asynchronous: bool):
    group = ToyGroup(asynchronous=asynchronous, pages=40, slots=8, cap=64, caching=False, max_len=200)
    group.submit(request(0, range(60), 90))
    group.turn()
    group.submit(request(1, range(120), 4))  # 31 pages: not beside the first
    group.submit(*(request(i, range(4), 4) for i in range(2, 12)))
    ended = []
    for _ in range(2000):
        if len(group.ends) == 12:
            break
        group.turn()
        ended += [i for i in group.ends if i not in ended]
    assert set(ended[:8]) <= set(range(2, 12)), ended
    group.assert_right()


def test_ff28_the_head_is_not_passed_for_ever():
    group = ToyGroup(pages=40, slots=8, cap=64, caching=False, max_len=200)
    group.submit(request(0, range(150), 4))
    ids = itertools.count(1)
    for _ in range(4):
        group.submit(request(next(ids), range(30), 30))
    group.submit(big := request(10_000, range(140), 4))
    passed = 0
    while big.id not in group.ends and passed < 4 * MAX_BYPASSES:
        group.submit(request(next(ids), range(4), 6))
        passed += 1
        group.turn()
    assert big.id in group.ends
    group.run()
    group.assert_right()


def test_ff32_what_can_never_fit_is_refused_at_once_with_the_fields_name():
    group = ToyGroup(pages=10, max_len=64, page_size=4)
    group.submit(request(1, range(60), 10))  # longer than the length
    group.submit(request(2, range(50), 4))  # longer than all pages
    assert group.refused[1].status == 400 and group.refused[1].param == "max_tokens"
    assert group.refused[2].status == 400 and group.refused[2].param == "prompt"
    assert not group.replica.requests and not len(group.planner.queue)
    group.submit(request(3, range(36), 4))  # exactly all pages
    group.run()
    group.assert_right()


def test_a_full_queue_refuses_and_forgets_the_refused():
    group = ToyGroup(max_queue=2, slots=1)
    group.submit(*(request(i, range(4), 8) for i in range(5)))
    assert [r.status for r in group.refused.values()] == [429] * 2 and list(group.refused) == [3, 4]
    group.run()
    group.assert_right()


@BOTH
def test_fewer_tokens_in_a_step_than_decoding_rows_go_round_fairly(asynchronous: bool):
    group = ToyGroup(asynchronous=asynchronous, cap=3, slots=8)
    group.submit(*(request(i, [i], 20) for i in range(8)))
    for _ in range(60):
        group.turn()
        assert group.batches[-1].tokens <= 3
    counts = [len(t) for t in group.tokens.values()]
    assert max(counts) - min(counts) <= 3, counts
    group.run()
    group.assert_right()


@BOTH
def test_ff33_pages_are_back_two_entries_after_an_abort(asynchronous: bool):
    group = ToyGroup(size=2, asynchronous=asynchronous)
    group.submit(request(1, range(40), 50), request(2, range(3), 100))
    for _ in range(6):
        group.turn()
    group.abort(1)
    before = group.leader.next
    while group.leader.next < before + 2:
        group.turn()
    assert 1 not in group.replica.requests.values() and len(group.replica.requests) == 1
    assert group.replica.cache.held <= 8
    group.run()
    group.assert_right()


@BOTH
def test_a_waiting_request_that_is_aborted_never_enters_the_log(asynchronous: bool):
    group = ToyGroup(asynchronous=asynchronous, slots=1)
    group.submit(request(1, range(4), 10), request(2, range(4), 10))
    group.turn()
    group.abort(2)
    group.run()
    assert {c.id for c in commands(group, Admit)} == {1}
    assert group.ends == {1: "length", 2: "abort"}


def test_ff13_the_drop_of_a_finish_comes_only_after_its_last_row_is_settled():
    group = ToyGroup(size=2)
    group.submit(*(request(i, range(3 + i), 40, stop_ids=tuple(range(i, 97, 7))) for i in range(6)))
    group.run()
    last: dict[int, int] = {}  # slot -> entry of its latest row
    marks: dict[int, int] = {}
    for entry in group.entries:
        if isinstance(entry, Entry):
            marks[entry.seq] = entry.settled_to
    batches = {b.seq: b for b in group.batches}
    for entry in (e for e in group.entries if isinstance(e, Entry)):
        for c in entry.commands:
            if isinstance(c, Drop):
                assert last[c.slot] <= entry.settled_to
        if entry.seq in batches:
            last.update(dict.fromkeys(batches[entry.seq].slots.tolist(), entry.seq))
    assert list(marks.values()) == sorted(marks.values()), "settled_to decreased"
    group.assert_right()


def test_ten_thousand_waiting_requests_cost_a_step_nothing():
    """Counted in looks at the queue, not in time."""
    group = ToyGroup(max_queue=20_000, slots=2, pages=64)
    group.submit(*(request(i, range(4), 4) for i in range(10_000)))
    looks = 0
    original = group.planner.queue.first

    def first(count: int, short: bool = False):
        nonlocal looks
        found = original(count, short)
        looks += len(found)
        return found

    group.planner.queue.first = first  # type: ignore[method-assign]
    for _ in range(50):
        group.turn()
    assert looks <= 50 * 3 * 8


MODES = [(size, asynchronous) for size in (1, 2) for asynchronous in (False, True)]


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_tokens_ends_and_cache_are_right_in_every_mode_under_shortage_and_aborts(data: st.DataObject):
    prompts = st.lists(st.integers(0, 1), min_size=1, max_size=40)
    requests = [
        request(
            i,
            data.draw(prompts),
            data.draw(st.integers(1, 20)),
            priority=data.draw(st.integers(-1, 1)),
            stop_ids=data.draw(st.sampled_from([(), tuple(range(0, 97, 9))])),
        )
        for i in range(data.draw(st.integers(1, 10)))
    ]
    aborts = {data.draw(st.integers(0, 40)): data.draw(st.integers(0, 9)) for _ in range(data.draw(st.integers(0, 4)))}
    trickle = data.draw(st.booleans())
    shape = dict(
        pages=data.draw(st.sampled_from([15, 20, 60])),
        cap=data.draw(st.sampled_from([2, 7, 64])),
        slots=data.draw(st.sampled_from([2, 5])),
        caching=data.draw(st.booleans()),
        host_pages=data.draw(st.sampled_from([0, 12])),
    )
    for size, asynchronous in MODES:
        group = ToyGroup(size=size, asynchronous=asynchronous, **shape)
        waiting = list(requests)
        for at in range(41):
            while waiting and (not trickle or at % 3 == 0):
                group.submit(waiting.pop(0))
                if trickle:
                    break
            if at in aborts and aborts[at] in group.sent and aborts[at] not in group.ends:
                group.abort(aborts[at], kept=data.draw(st.integers(-1, 3)))
            group.turn()
        group.submit(*waiting)
        group.run()
        group.assert_right()


def test_serial_and_asynchronous_give_equal_tokens_and_ends():
    def run(asynchronous: bool):
        group = ToyGroup(asynchronous=asynchronous, pages=30, cap=16, slots=6)
        rng = np.random.default_rng(5)
        group.submit(*(request(i, rng.integers(0, 3, 1 + i * 3), 25, stop_ids=(i, 50 + i)) for i in range(12)))
        group.run()
        group.assert_right()
        return group

    serial, other = run(False), run(True)
    assert serial.tokens == other.tokens and serial.ends == other.ends
    assert serial.leader.steps["overlap"] == 0
    assert other.leader.steps["overlap"] >= 0.95 * sum(other.leader.steps.values())
