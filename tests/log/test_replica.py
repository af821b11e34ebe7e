"""The replica alone: what its commands, steps and settles do, and what any sequence of them keeps true."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.errors import BadEntry
from slipstream.log.batch import Batch, Outcome
from slipstream.log.caches import one_table
from slipstream.log.entries import OVERLAP, Admit, Drop, Preempt, Step, named
from slipstream.log.replica import Replica
from slipstream.log.state import ENDED, PREEMPTED, RUNNING
from tests.helpers.toy_group import check, request

LIMITS = one_table(pages=24, slots=4, max_len=40, page_size=4, host_pages=8)


def step(replica: Replica, *chunks: tuple[int, int, int], decode: int = 1) -> Step:
    """Rows of all decoding slots, and chunks (slot, start, count)."""
    rows = [(s, start, count, int(start + count == replica.bound[s])) for s, start, count in chunks]
    return Step(OVERLAP, decode if len(replica.decoding) else 0, named(rows) if rows else b"")


def outcome(batch: Batch, tokens: list[int] | int = 5, **more) -> Outcome:
    count = len(batch.judged)
    column = np.array([tokens] * count if isinstance(tokens, int) else tokens, np.int32)
    return Outcome(batch.seq, column[:, None], np.ones(count, np.int32), **more)


def admitted(replica: Replica, *requests) -> list[int]:
    slots = []
    for r in requests:
        slots.append(replica.free_slots[-1])
        replica.receive(r)
        replica.apply(Admit(slots[-1], r.id))
    return slots


def readmit(replica: Replica, slot: int) -> int:
    return replica.apply(Admit(slot, int(replica.ids[slot])))


def drop(replica: Replica, slot: int, id: int, kept: int = -1) -> bool:
    return bool(replica.apply(Drop(slot, id, kept)))


def test_rows_that_are_not_four_columns_are_refused():
    with pytest.raises(BadEntry, match="12 bytes"):
        Step(OVERLAP, 0, bytes(12)).columns()


def test_a_wrong_number_of_tokens_is_an_error_that_names_both():
    replica = Replica(LIMITS)
    admitted(replica, request(1, range(4)))
    batch = replica.launch(0, step(replica, (batch_slot(replica), 0, 4)))
    with pytest.raises(BadEntry, match="entry 0: 1 rows sampled, 2 came back"):
        replica.settle(Outcome(0, np.zeros((2, 1), np.int32), np.ones(2, np.int32)))
    assert batch.tokens == 4 and len(replica.flights) == 1


def batch_slot(replica: Replica) -> int:
    return replica.prefilling[0]


def test_only_the_row_that_reaches_the_prompts_end_samples():
    replica = Replica(LIMITS)
    (slot,) = admitted(replica, request(1, range(10)))
    assert not len(replica.launch(0, step(replica, (slot, 0, 4))).judged)
    assert replica.prefilling == [slot]
    assert replica.launch(1, step(replica, (slot, 4, 6))).judged.tolist() == [0]
    assert replica.decoding.tolist() == [slot] and not replica.prefilling


def test_a_finish_by_length_is_known_when_planning_and_no_row_lies_beyond_it():
    replica = Replica(LIMITS)
    (slot,) = admitted(replica, request(1, range(3), max_tokens=3))
    rows = 0
    replica.launch(0, step(replica, (slot, 0, 3)))
    while len(replica.decoding):
        rows += 1
        replica.launch(rows, step(replica))
    assert rows == 2  # the prompt's last row gave the first of three tokens (FF-83)
    for flight in list(replica.flights):
        settled = replica.settle(Outcome(flight.seq, np.array([[5]], np.int32), np.ones(1, np.int32)))
    assert [(e.slot, e.reason) for e in settled.ended] == [(slot, "length")]
    assert replica.phase[slot] == ENDED and replica.committed[slot] == 6


def test_a_stop_token_ends_only_those_who_asked_for_it():
    replica = Replica(LIMITS)
    a, b = admitted(replica, request(1, range(3), stop_ids=(7,)), request(2, range(4)))
    batch = replica.launch(0, step(replica, (a, 0, 3), (b, 0, 4)))
    assert [e.id for e in replica.settle(outcome(batch, 7)).ended] == [1]
    assert replica.decoding.tolist() == [b]


def test_rows_in_flight_of_a_finished_request_are_thrown_away():
    replica = Replica(LIMITS)
    (slot,) = admitted(replica, request(1, range(3), stop_ids=(7,)))
    first = replica.launch(0, step(replica, (slot, 0, 3)))
    second = replica.launch(1, step(replica))
    replica.settle(outcome(first, 7))
    late = replica.settle(outcome(second, 9))
    assert not len(late.tokens) and late.rows is not None
    assert replica.committed[slot] == 4


def test_ff31_a_row_that_ended_in_the_middle_leaves_the_others_columns_right():
    replica = Replica(LIMITS)
    slots = admitted(replica, *(request(i, range(3 + i), stop_ids=(7,)) for i in range(3)))
    first = replica.launch(0, step(replica, *((s, 0, 3 + i) for i, s in enumerate(slots))))
    second = replica.launch(1, step(replica))
    replica.settle(outcome(first, [1, 7, 2]))
    settled = replica.settle(outcome(second, [11, 12, 13]))
    assert settled.ids.tolist() == [0, 2] and settled.tokens.tolist() == [11, 13]
    assert settled.rows is not None and settled.rows.tolist() == [0, 2]


def test_ff20_a_slots_new_owner_does_not_get_the_old_ones_token():
    replica = Replica(LIMITS)
    (slot,) = admitted(replica, request(1, range(3)))
    batch = replica.launch(0, step(replica, (slot, 0, 3)))
    assert drop(replica, slot, 1)
    assert admitted(replica, request(2, range(5))) == [slot]
    settled = replica.settle(outcome(batch, 9))
    assert not len(settled.tokens) and replica.committed[slot] == 5


def test_ff33_a_second_drop_finds_nothing_and_frees_nothing():
    replica = Replica(LIMITS)
    (slot,) = admitted(replica, request(1, range(9)))
    assert drop(replica, slot, 1)
    available = replica.cache.available
    assert not drop(replica, slot, 1) and not drop(replica, slot, 2)
    assert replica.cache.available == available == LIMITS.pages
    check(replica)


def test_a_rows_own_failure_ends_it_and_no_other():
    replica = Replica(LIMITS)
    a, b = admitted(replica, request(1, range(3)), request(2, range(4)))
    batch = replica.launch(0, step(replica, (a, 0, 3), (b, 0, 4)))
    settled = replica.settle(outcome(batch, [-1, 5], errors={0: "the grammar allows nothing"}))
    assert [(e.id, e.reason, e.error) for e in settled.ended] == [(1, "error", "the grammar allows nothing")]
    assert settled.ids.tolist() == [2] and settled.tokens.tolist() == [5]
    assert replica.committed[a] == 3 and -1 not in replica.tokens[a]


def run_answer(replica: Replica, slot: int, prompt: int, answer: list[int]) -> None:
    """Prefills and decodes serially with the given tokens."""
    seq = replica.settled_to + 1
    for token in answer:
        rows = ((slot, int(replica.computed[slot]), int(replica.bound[slot] - replica.computed[slot])),)
        batch = replica.launch(seq, step(replica, *rows) if replica.prefilling else step(replica))
        replica.settle(outcome(batch, token))
        seq += 1


def test_ff34_generated_pages_hit_in_the_next_turn():
    replica = Replica(LIMITS)
    (slot,) = admitted(replica, request(1, range(6), max_tokens=11))
    answer = list(range(50, 61))
    run_answer(replica, slot, 6, answer)
    assert drop(replica, slot, 1)
    turn = [*range(6), *answer, 1, 2]  # 17 tokens of the first turn, the last of which never went through the model
    (slot,) = admitted(replica, request(2, turn))
    assert replica.computed[slot] == 16


def test_ff21_tokens_that_are_only_placeholders_are_never_cached():
    replica = Replica(LIMITS)
    (slot,) = admitted(replica, request(1, range(4), max_tokens=12))
    batches = [replica.launch(0, step(replica, (slot, 0, 4)))]
    batches += [replica.launch(i, step(replica)) for i in range(1, 6)]
    assert len(replica.cache.tables[0].pages.index) == 1  # the prompt's; nothing of the answer is known
    for batch in batches[:4]:
        replica.settle(outcome(batch, 9))
    assert len(replica.cache.tables[0].pages.index) == 1  # the row that writes the fourth token has not settled
    replica.settle(outcome(batches[4], 9))
    assert len(replica.cache.tables[0].pages.index) == 2


@pytest.mark.parametrize(("kept", "hit"), [(-1, 16), (11, 16), (6, 12), (5, 8), (0, 4)])
def test_pages_beyond_the_kept_tokens_leave_the_index(kept: int, hit: int):
    replica = Replica(LIMITS)
    (slot,) = admitted(replica, request(1, range(6), max_tokens=11))
    answer = list(range(50, 61))
    run_answer(replica, slot, 6, answer)
    drop(replica, slot, 1, kept)
    (slot,) = admitted(replica, request(2, [*range(6), *answer, 1]))
    assert replica.computed[slot] == hit
    check(replica)


def test_one_token_is_always_left_to_compute():
    replica = Replica(LIMITS)
    (slot,) = admitted(replica, request(1, range(8)))
    replica.launch(0, step(replica, (slot, 0, 8)))
    (again,) = admitted(replica, request(2, range(8)))
    assert replica.computed[again] == 4


def test_prompt_log_probabilities_bypass_the_cache():
    replica = Replica(LIMITS)
    (slot,) = admitted(replica, request(1, range(8)))
    replica.launch(0, step(replica, (slot, 0, 8)))
    (again,) = admitted(replica, request(2, range(12), prompt_logprobs=0))
    assert replica.computed[again] == 0


def test_a_preempted_request_commits_the_token_in_flight_publishes_no_page_and_starts_over():
    replica = Replica(LIMITS)
    (slot,) = admitted(replica, request(1, range(6)))
    batch = replica.launch(0, step(replica, (slot, 0, 6)))
    replica.apply(Preempt(slot, False))
    assert replica.phase[slot] == PREEMPTED and not replica.cache.held
    assert len(replica.settle(outcome(batch, 9)).tokens) == 1
    assert replica.committed[slot] == replica.bound[slot] == 7
    readmit(replica, slot)
    assert replica.phase[slot] == RUNNING and replica.computed[slot] == 4  # its own prompt's page is found again
    check(replica)


def test_two_replicas_that_hear_the_same_have_the_same_digest_and_another_token_gives_another():
    digests = []
    for token in (5, 5, 6):
        replica = Replica(LIMITS)
        (slot,) = admitted(replica, request(1, range(6)))
        replica.settle(outcome(replica.launch(0, step(replica, (slot, 0, 6))), token))
        digests.append(replica.seal())
    assert digests[0] == digests[1] != digests[2]


def test_ff04_the_order_of_rows_is_the_order_of_joining():
    replica = Replica(LIMITS)
    slots = admitted(replica, *(request(i, [i] * (4 - i)) for i in range(3)))
    replica.launch(0, step(replica, (slots[2], 0, 2), (slots[0], 0, 4)))
    replica.launch(1, step(replica, (slots[1], 0, 3)))
    assert replica.decoding.tolist() == [slots[2], slots[0], slots[1]]


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_any_sequence_of_commands_steps_and_settles_keeps_the_invariants(data: st.DataObject):
    replica = Replica(LIMITS)
    flying: list[Batch] = []
    seq = id = 0
    for _ in range(data.draw(st.integers(1, 50))):
        running = [s for s in range(LIMITS.slots) if replica.phase[s] == RUNNING]
        calls = (
            ["admit"] * (len(replica.free_slots) > 0) + ["launch"] * 3 + ["settle"] * 2 + ["drop"] + ["preempt"] * bool(running)
        )
        call = data.draw(st.sampled_from(calls))
        if call == "admit":
            prompt = data.draw(st.lists(st.integers(0, 1), min_size=1, max_size=20))
            if -(-len(prompt) // LIMITS.page_size) <= replica.cache.available:
                id += 1
                stops = data.draw(st.sampled_from([(), (3,)]))
                admitted(replica, request(id, prompt, data.draw(st.integers(1, 12)), stop_ids=stops))
        elif call == "launch":
            rows = []
            for slot in replica.prefilling:
                left = int(replica.bound[slot] - replica.computed[slot])
                rows.append((slot, int(replica.computed[slot]), data.draw(st.integers(1, left))))
            wants = replica.columns_wanted(replica.decoding, 1)
            if (rows or len(replica.decoding)) and wants <= replica.cache.available:
                flying.append(replica.launch(seq, step(replica, *rows)))
                seq += 1
        elif call == "settle" and flying:
            batch = flying.pop(0)
            count = len(batch.judged)
            tokens = data.draw(st.lists(st.integers(0, 3), min_size=count, max_size=count))
            replica.settle(outcome(batch, tokens))
        elif call == "drop" and replica.requests:
            slot = data.draw(st.sampled_from(sorted(replica.requests)))
            assert drop(replica, slot, replica.requests[slot].id, data.draw(st.integers(-1, 4)))
        elif call == "preempt" and running:
            slot = data.draw(st.sampled_from(running))
            replica.apply(Preempt(slot, replica.host_fits(slot) and data.draw(st.booleans())))
        resumable = [s for s in range(LIMITS.slots) if replica.phase[s] == PREEMPTED and not replica.pending(s)]
        if resumable and -(-int(replica.bound[resumable[0]]) // LIMITS.page_size) <= replica.cache.available:
            readmit(replica, resumable[0])
        check(replica)
    twin = replica.copy()
    assert twin.state() == replica.state() and twin.seal() == replica.seal()
