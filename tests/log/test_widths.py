"""Rows that give several tokens, pages with a window and per-slot state: what a replica makes of them, alone and in groups."""

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.errors import BadEntry
from slipstream.log.batch import Batch, Outcome
from slipstream.log.caches import (
    Latent,
    Limits,
    Paged,
    PerSlot,
    StateArray,
    TableLimits,
    Window,
    one_table,
    state_bytes,
    windows,
)
from slipstream.log.entries import NO_OVERLAP, OVERLAP, Admit, Drop, Preempt, Step, named
from slipstream.log.replica import Replica
from slipstream.log.state import ENDED, PREEMPTED
from tests.helpers.toy_group import ToyGroup, check, request

WIDE = one_table(pages=24, slots=4, max_len=40, page_size=4, host_pages=8, width=3)


def limits(
    pages: int = 60, window: int = 0, state: int = 0, width: int = 1, host_pages: int = 0, window_pages: int = 0
) -> Limits:
    tables = [TableLimits(pages, 0, host_pages)]
    if window:
        tables.append(TableLimits(window_pages or pages, window, host_pages))
    return Limits(tuple(tables), 6, 120, 4, True, snapshots=6 if state else 0, snapshot_tokens=state, width=width)


def start(replica: Replica, id: int, prompt: int, max_tokens: int, stop_ids: tuple[int, ...] = ()) -> int:
    slot = replica.free_slots[-1]
    replica.receive(request(id, range(prompt), max_tokens, stop_ids=stop_ids))
    replica.apply(Admit(slot, id))
    replica.launch(0, Step(NO_OVERLAP, 0, named([(slot, 0, prompt, 1)])))
    replica.settle(Outcome(0, np.array([[50]], np.int32), np.ones(1, np.int32)))
    return slot


def gave(batch: Batch, *tokens: int) -> Outcome:
    out = np.full((1, batch.width), -1, np.int32)
    out[0, : len(tokens)] = tokens
    return Outcome(batch.seq, out, np.array([len(tokens)], np.int32))


def counts(replica: Replica, slot: int) -> tuple[int, int, int, int]:
    return tuple(int(c[slot]) for c in (replica.committed, replica.sure, replica.bound, replica.computed))  # type: ignore[return-value]


def test_the_least_and_the_most_that_the_device_can_have_are_kept_apart_until_a_settle():
    replica = Replica(WIDE)
    slot = start(replica, 1, 5, 20)
    first = replica.launch(1, Step(OVERLAP, 3))
    assert counts(replica, slot) == (6, 7, 9, 8)
    second = replica.launch(2, Step(OVERLAP, 3))
    assert second.starts.tolist() == [8] and counts(replica, slot) == (6, 8, 12, 11)
    assert replica.settle(gave(first, 51, 52)).tokens.tolist() == [51, 52]
    assert counts(replica, slot) == (8, 9, 11, 10)
    replica.settle(gave(second, 53))
    assert counts(replica, slot) == (9, 9, 9, 8)
    assert replica.tokens[slot, 5:9].tolist() == [50, 51, 52, 53]
    check(replica)


def test_pages_are_reserved_for_the_most_and_never_beyond_the_limit():
    replica = Replica(WIDE)
    slot = start(replica, 1, 7, 4)  # tokens 0..10; positions up to 10 lie in three pages
    assert replica.columns_wanted(replica.decoding, 3) == 1
    replica.launch(1, Step(OVERLAP, 3))
    replica.launch(2, Step(OVERLAP, 3))
    assert replica.held[slot] == 3 and counts(replica, slot)[1] == 10


def test_a_request_leaves_the_decoding_rows_when_its_end_is_certain():
    replica = Replica(WIDE)
    start(replica, 1, 4, 4)
    first = replica.launch(1, Step(OVERLAP, 3))
    assert len(replica.decoding) == 1, "two tokens are left, and the row may give one only"
    second = replica.launch(2, Step(OVERLAP, 3))
    assert len(replica.decoding) == 1
    replica.settle(gave(first, 51, 52))
    assert not len(replica.decoding), "the row in flight gives the last token"
    assert [e.reason for e in replica.settle(gave(second, 53)).ended] == ["length"]


@pytest.mark.parametrize(
    "given, kept, reason", [((9, 7, 8), [9, 7], "stop"), ((7, 7, 7), [7], "stop"), ((1, 2, 3), [1, 2, 3], "length")]
)
def test_ff43_what_lies_behind_an_end_inside_accepted_drafts_is_neither_committed_nor_sent(given, kept, reason):
    replica = Replica(WIDE)
    slot = start(replica, 1, 4, 4, stop_ids=(7,))
    settled = replica.settle(gave(replica.launch(1, Step(NO_OVERLAP, 3)), *given))
    assert settled.tokens.tolist() == kept and settled.ids.tolist() == [1] * len(kept)
    assert [e.reason for e in settled.ended] == [reason]
    assert replica.committed[slot] == 5 + len(kept) and replica.phase[slot] == ENDED


def test_ff45_a_row_that_gave_less_than_it_could_is_refunded_by_what_it_had_reserved():
    replica = Replica(WIDE)
    slot = start(replica, 1, 4, 30)
    for seq in range(1, 20):
        replica.settle(gave(replica.launch(seq, Step(NO_OVERLAP, 3)), 5))
        assert counts(replica, slot) == (5 + seq, 5 + seq, 5 + seq, 4 + seq)
    assert replica.held[slot] <= -(-(24 + 3) // 4)


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("accepted", [1, 2, 3])
def test_a_request_preempted_before_its_accepted_count_is_known_goes_on_where_it_stands(keep: bool, accepted: int):
    replica = Replica(WIDE)
    slot = start(replica, 1, 6, 20)
    batch = replica.launch(1, Step(OVERLAP, 3))
    replica.apply(Preempt(slot, keep))
    with pytest.raises(BadEntry, match="in flight"):
        replica.apply(Admit(slot, 1))
    replica.settle(gave(batch, *range(51, 51 + accepted)))
    assert replica.phase[slot] == PREEMPTED and counts(replica, slot) == (7 + accepted, 7 + accepted, 7 + accepted, 0)
    replica.apply(Admit(slot, 1))
    assert replica.computed[slot] == (6 + accepted if keep else 4), "drafts that were wrong are computed again"
    check(replica)


@pytest.mark.parametrize(
    "rows, why",
    [
        ([(0, 1, 2, 0)], "computes 2 tokens from 1"),
        ([(0, 0, 0, 0)], "computes 0 tokens"),
        ([(0, 0, -1, 0)], "computes -1 tokens"),
        ([(0, 0, 7, 1)], "stands at 0 of 6"),
        ([(0, 0, 6, 0)], "samples 0"),
        ([(0, 0, 5, 1)], "samples 1"),
        ([(0, 0, 2, 0), (0, 2, 2, 0)], "appear once"),
        ([(1, 0, 2, 0)], "row of slot 1"),
        ([(9, 0, 2, 0)], "each must be one of 4"),
    ],
)
def test_a_row_that_does_not_fit_its_request_is_refused_and_changes_nothing(rows, why: str):
    replica = Replica(WIDE)
    replica.receive(request(1, range(6)))
    replica.free_slots.sort(reverse=True)
    replica.apply(Admit(0, 1))
    before = replica.state()
    with pytest.raises(BadEntry, match=why):
        replica.launch(0, Step(NO_OVERLAP, 0, named(rows)))
    assert replica.state() == before


@pytest.mark.parametrize("width", [0, 4])
def test_a_decode_row_of_an_impossible_width_is_refused(width: int):
    replica = Replica(WIDE)
    slot = start(replica, 1, 4, 9)
    with pytest.raises(BadEntry):
        replica.launch(1, Step(NO_OVERLAP, 0, named([(slot, 4, width, width)])))


@pytest.mark.parametrize("accepted", [0, 4])
def test_an_outcome_with_an_impossible_count_is_refused(accepted: int):
    replica = Replica(WIDE)
    start(replica, 1, 4, 9)
    replica.launch(1, Step(NO_OVERLAP, 3))
    with pytest.raises(BadEntry, match="gave"):
        replica.settle(Outcome(1, np.zeros((1, 3), np.int32), np.array([accepted], np.int32)))


@pytest.mark.parametrize("command", [Admit(0, 99), Preempt(0, False), Preempt(3, True)])
def test_a_command_that_does_not_fit_is_refused(command):
    replica = Replica(WIDE)
    with pytest.raises(BadEntry):
        replica.apply(command)


# --- windows and state


def test_layers_with_one_rule_of_growth_share_a_page_table():
    layers = (
        Window(2, 64, 512),
        Paged(2, 64),
        None,
        Latent(576),
        Window(2, 64, 128),
        PerSlot((StateArray((4, 8), "float32"),)),
    )
    assert windows(layers) == (0, 512, 128)
    assert state_bytes(layers) == 4 * 8 * 4


def test_pages_that_have_left_the_window_are_given_back_while_the_request_runs():
    group = ToyGroup(limits=limits(window=8))
    group.submit(request(1, range(60), 40))
    most = 0
    while 1 not in group.ends:
        group.turn()
        if len(group.replica.decoding):
            most = max(most, group.replica.cache.tables[1].pages.held)
    assert most <= 4, "a window of two pages, one that fills and one that is left"
    group.assert_right()


def test_ff41_a_hit_needs_pages_and_the_state_of_the_same_boundary():
    group = ToyGroup(limits=limits(state=8), cap=64)
    group.submit(request(1, range(30), 4))
    group.run()
    group.submit(request(2, range(30), 4))
    group.run()
    assert group.cached[2] == 24, "state is saved at multiples of 8"
    replica = group.replica
    for page in list(replica.cache.snapshots.keys):
        replica.cache.snapshots.forget(page)
        replica.cache.snapshots.idle.pop(page, None)
        replica.cache.snapshots.free.append(page)
    group.submit(request(3, range(30), 4))
    group.run()
    assert group.cached[3] == 0
    group.assert_right()


def test_the_state_of_generated_tokens_is_found_by_the_next_turn():
    group = ToyGroup(limits=limits(state=8))
    first = request(1, range(10), 30)
    group.submit(first)
    group.run()
    group.submit(request(2, [*range(10), *group.tokens[1], 3, 4], 4))
    group.run()
    assert group.cached[2] == 32
    group.assert_right()


def test_a_window_hit_needs_only_the_pages_that_are_still_read():
    group = ToyGroup(limits=limits(window=8))
    group.submit(request(1, range(40), 2))
    group.run()
    group.submit(request(2, range(41), 2))
    group.run()
    assert group.cached[2] == 40
    table = group.replica.cache.tables[1]
    assert table.first_column(40) == 8
    group.assert_right()


SHAPES = [
    limits(width=3),
    limits(window=8, width=1),
    limits(window=6, width=4),
    limits(state=8),
    limits(window=12, state=4, width=5),
    limits(pages=36, window=8, state=8, host_pages=40, width=2),
]


@pytest.mark.parametrize("shape", range(len(SHAPES)))
@pytest.mark.parametrize("asynchronous", [False, True])
def test_groups_of_any_shape_give_the_same_tokens_and_leave_nothing(shape: int, asynchronous: bool):
    rng = random.Random(shape)
    for _ in range(6):
        group = ToyGroup(size=2, asynchronous=asynchronous, cap=24, limits=SHAPES[shape])
        shared = [rng.randrange(9) for _ in range(24)]
        for id in range(12):
            prompt = [*shared[: rng.randrange(25)], *(rng.randrange(9) for _ in range(rng.randrange(1, 30)))]
            stops = (rng.randrange(97),) if rng.random() < 0.5 else ()
            group.submit(request(id, prompt, rng.randrange(1, 50), stop_ids=stops))
            for _ in range(rng.randrange(6)):
                group.turn()
            if rng.random() < 0.2:
                group.abort(rng.randrange(id + 1), rng.randrange(-1, 4))
        group.run()
        group.assert_right()


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_scarce_pages_of_any_shape_preempt_and_still_give_the_right_tokens(data: st.DataObject):
    window = data.draw(st.sampled_from([0, 5, 8]))
    shape = limits(
        pages=data.draw(st.integers(30, 44)), window=window, state=data.draw(st.sampled_from([0, 4, 8])),
        width=data.draw(st.integers(1, 5)), host_pages=data.draw(st.sampled_from([0, 40])),
        window_pages=data.draw(st.integers(30, 44)),
    )  # fmt: skip
    group = ToyGroup(asynchronous=data.draw(st.booleans()), cap=data.draw(st.integers(5, 40)), limits=shape)
    group.planner.budget.token_s = 1e-3 if data.draw(st.booleans()) else 0.0
    for id in range(data.draw(st.integers(2, 7))):
        prompt = data.draw(st.lists(st.integers(0, 2), min_size=1, max_size=60))
        group.submit(request(id, prompt, data.draw(st.integers(1, 59))))
        for _ in range(data.draw(st.integers(0, 5))):
            group.turn()
    group.run()
    group.assert_right()


def test_a_drop_of_a_request_with_unknown_accepted_counts_leaves_nothing():
    replica = Replica(WIDE)
    slot = start(replica, 1, 6, 20)
    batch = replica.launch(1, Step(OVERLAP, 3))
    assert replica.apply(Drop(slot, 1, 0))
    assert not len(replica.settle(gave(batch, 1, 2, 3)).tokens)
    assert replica.cache.held == 0
    check(replica)
