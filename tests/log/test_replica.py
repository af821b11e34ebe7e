"""The replica alone: what its commands, steps and settles do, and what any sequence of them keeps true."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.log.batch import Batch, Outcome
from slipstream.log.entries import OVERLAP, Step
from slipstream.log.replica import Replica
from slipstream.log.state import ENDED, PREEMPTED, RUNNING, Limits
from tests.helpers.toy_group import check, request

LIMITS = Limits(pages=24, slots=4, max_len=40, page_size=4, host_pages=8)


def step(*rows: tuple[int, int, int], decode: bool = True) -> Step:
    columns = np.array(rows, "<i4").reshape(-1, 3).T
    return Step(OVERLAP, decode, *(c.tobytes() for c in columns))


def outcome(batch: Batch, tokens: list[int] | int = 5, **more) -> Outcome:
    count = int(batch.samples.sum())
    return Outcome(batch.seq, np.array([tokens] * count if isinstance(tokens, int) else tokens, np.int32), **more)


def admitted(replica: Replica, *requests) -> list[int]:
    slots = []
    for r in requests:
        slots.append(replica.free_slots[-1])
        replica.admit(slots[-1], r, replica.prompt_keys(r))
    return slots


def test_columns_of_different_length_are_an_error_that_names_them():
    four, three = np.zeros(4, "<i4").tobytes(), np.zeros(3, "<i4").tobytes()
    with pytest.raises(ValueError, match="4 slots, 3 starts, 4 counts"):
        Step(OVERLAP, False, four, three, four).columns()


def test_a_wrong_number_of_tokens_is_an_error_that_names_both():
    replica = Replica(LIMITS)
    admitted(replica, request(1, range(4)))
    batch = replica.launch(0, step((batch_slot(replica), 0, 4)))
    with pytest.raises(ValueError, match="entry 0: 1 rows sampled, 2 tokens came back"):
        replica.settle(Outcome(0, np.zeros(2, np.int32)))
    assert batch.tokens == 4


def batch_slot(replica: Replica) -> int:
    return replica.prefilling[0]


def test_only_the_row_that_reaches_the_prompts_end_samples():
    replica = Replica(LIMITS)
    (slot,) = admitted(replica, request(1, range(10)))
    assert not replica.launch(0, step((slot, 0, 4))).samples.any()
    assert replica.prefilling == [slot]
    assert replica.launch(1, step((slot, 4, 6))).samples.all()
    assert replica.decoding.tolist() == [slot] and not replica.prefilling


def test_a_finish_by_length_is_known_when_planning_and_no_row_lies_beyond_it():
    replica = Replica(LIMITS)
    (slot,) = admitted(replica, request(1, range(3), max_tokens=3))
    rows = 0
    replica.launch(0, step((slot, 0, 3)))
    while len(replica.decoding):
        rows += 1
        replica.launch(rows, step())
    assert rows == 2  # the prompt's last row gave the first of three tokens (FF-83)
    for flight in list(replica.flights):
        settled = replica.settle(Outcome(flight.seq, np.array([5], np.int32)))
    assert [(e.slot, e.reason) for e in settled.ended] == [(slot, "length")]
    assert replica.phase[slot] == ENDED and replica.committed[slot] == 6


def test_a_stop_token_ends_only_those_who_asked_for_it():
    replica = Replica(LIMITS)
    a, b = admitted(replica, request(1, range(3), stop_ids=(7,)), request(2, range(4)))
    batch = replica.launch(0, step((a, 0, 3), (b, 0, 4)))
    assert [e.id for e in replica.settle(outcome(batch, 7)).ended] == [1]
    assert replica.decoding.tolist() == [b]


def test_rows_in_flight_of_a_finished_request_are_thrown_away():
    replica = Replica(LIMITS)
    (slot,) = admitted(replica, request(1, range(3), stop_ids=(7,)))
    first = replica.launch(0, step((slot, 0, 3)))
    second = replica.launch(1, step())
    replica.settle(outcome(first, 7))
    late = replica.settle(outcome(second, 9))
    assert not len(late.tokens) and late.columns is not None
    assert replica.committed[slot] == 4


def test_ff31_a_row_that_ended_in_the_middle_leaves_the_others_columns_right():
    replica = Replica(LIMITS)
    slots = admitted(replica, *(request(i, range(3 + i), stop_ids=(7,)) for i in range(3)))
    first = replica.launch(0, step(*((s, 0, 3 + i) for i, s in enumerate(slots))))
    second = replica.launch(1, step())
    replica.settle(outcome(first, [1, 7, 2]))
    settled = replica.settle(outcome(second, [11, 12, 13]))
    assert settled.ids.tolist() == [0, 2] and settled.tokens.tolist() == [11, 13]
    assert settled.columns is not None and settled.columns.tolist() == [0, 2]


def test_ff20_a_slots_new_owner_does_not_get_the_old_ones_token():
    replica = Replica(LIMITS)
    (slot,) = admitted(replica, request(1, range(3)))
    batch = replica.launch(0, step((slot, 0, 3)))
    assert replica.drop(slot, 1)
    assert admitted(replica, request(2, range(5))) == [slot]
    settled = replica.settle(outcome(batch, 9))
    assert not len(settled.tokens) and replica.committed[slot] == 5


def test_ff33_a_second_drop_finds_nothing_and_frees_nothing():
    replica = Replica(LIMITS)
    (slot,) = admitted(replica, request(1, range(9)))
    assert replica.drop(slot, 1)
    available = replica.pages.available
    assert not replica.drop(slot, 1) and not replica.drop(slot, 2)
    assert replica.pages.available == available == LIMITS.pages
    check(replica)


def test_a_rows_own_failure_ends_it_and_no_other():
    replica = Replica(LIMITS)
    a, b = admitted(replica, request(1, range(3)), request(2, range(4)))
    batch = replica.launch(0, step((a, 0, 3), (b, 0, 4)))
    settled = replica.settle(outcome(batch, [-1, 5], errors={0: "the grammar allows nothing"}))
    assert [(e.id, e.reason, e.error) for e in settled.ended] == [(1, "error", "the grammar allows nothing")]
    assert settled.ids.tolist() == [2] and settled.tokens.tolist() == [5]
    assert replica.committed[a] == 3 and -1 not in replica.tokens[a]


def run_answer(replica: Replica, slot: int, prompt: int, answer: list[int]) -> None:
    """Prefills and decodes serially with the given tokens."""
    seq = replica.settled_to + 1
    for token in answer:
        rows = ((slot, int(replica.launched[slot]), int(replica.target[slot] - replica.launched[slot])),)
        batch = replica.launch(seq, step(*rows) if replica.prefilling else step())
        replica.settle(outcome(batch, token))
        seq += 1


def test_ff34_generated_pages_hit_in_the_next_turn():
    replica = Replica(LIMITS)
    (slot,) = admitted(replica, request(1, range(6), max_tokens=11))
    answer = list(range(50, 61))
    run_answer(replica, slot, 6, answer)
    assert replica.drop(slot, 1)
    turn = [*range(6), *answer, 1, 2]  # 17 tokens of the first turn, the last of which never went through the model
    (slot,) = admitted(replica, request(2, turn))
    assert replica.launched[slot] == 16


def test_ff21_tokens_that_are_only_placeholders_are_never_cached():
    replica = Replica(LIMITS)
    (slot,) = admitted(replica, request(1, range(4), max_tokens=12))
    batches = [replica.launch(0, step((slot, 0, 4)))]
    batches += [replica.launch(i, step()) for i in range(1, 6)]
    assert len(replica.pages.index) == 1  # the prompt's; nothing of the answer is known
    for batch in batches[:4]:
        replica.settle(outcome(batch, 9))
    assert len(replica.pages.index) == 1  # four tokens are committed, the row that writes the fourth has not settled
    replica.settle(outcome(batches[4], 9))
    assert len(replica.pages.index) == 2


@pytest.mark.parametrize(("kept", "hit"), [(-1, 16), (11, 16), (6, 12), (5, 8), (0, 4)])
def test_pages_beyond_the_kept_tokens_leave_the_index(kept: int, hit: int):
    replica = Replica(LIMITS)
    (slot,) = admitted(replica, request(1, range(6), max_tokens=11))
    answer = list(range(50, 61))
    run_answer(replica, slot, 6, answer)
    replica.drop(slot, 1, kept)
    (slot,) = admitted(replica, request(2, [*range(6), *answer, 1]))
    assert replica.launched[slot] == hit
    check(replica)


def test_one_token_is_always_left_to_compute():
    replica = Replica(LIMITS)
    (slot,) = admitted(replica, request(1, range(8)))
    replica.launch(0, step((slot, 0, 8)))
    (again,) = admitted(replica, request(2, range(8)))
    assert replica.launched[again] == 4


def test_prompt_log_probabilities_bypass_the_cache():
    replica = Replica(LIMITS)
    (slot,) = admitted(replica, request(1, range(8)))
    replica.launch(0, step((slot, 0, 8)))
    (again,) = admitted(replica, request(2, range(12), prompt_logprobs=0))
    assert replica.launched[again] == 0


def test_a_preempted_request_commits_the_token_in_flight_publishes_no_page_and_starts_over():
    replica = Replica(LIMITS)
    (slot,) = admitted(replica, request(1, range(6)))
    batch = replica.launch(0, step((slot, 0, 6)))
    replica.preempt(slot, keep=False)
    assert replica.phase[slot] == PREEMPTED and not replica.pages.held
    assert len(replica.settle(outcome(batch, 9)).tokens) == 1
    assert replica.committed[slot] == replica.target[slot] == 7
    replica.admit(slot, replica.requests[slot], [])
    assert replica.phase[slot] == RUNNING and replica.launched[slot] == 4  # its own prompt's page is found again
    check(replica)


def test_two_replicas_that_hear_the_same_have_the_same_digest_and_another_token_gives_another():
    digests = []
    for token in (5, 5, 6):
        replica = Replica(LIMITS)
        (slot,) = admitted(replica, request(1, range(6)))
        replica.settle(outcome(replica.launch(0, step((slot, 0, 6))), token))
        digests.append(replica.seal())
    assert digests[0] == digests[1] != digests[2]


def test_ff04_the_order_of_rows_is_the_order_of_joining():
    replica = Replica(LIMITS)
    slots = admitted(replica, *(request(i, [i] * (4 - i)) for i in range(3)))
    replica.launch(0, step((slots[2], 0, 2), (slots[0], 0, 4)))
    replica.launch(1, step((slots[1], 0, 3)))
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
            if -(-len(prompt) // LIMITS.page_size) <= replica.pages.available:
                id += 1
                stops = data.draw(st.sampled_from([(), (3,)]))
                admitted(replica, request(id, prompt, data.draw(st.integers(1, 12)), stop_ids=stops))
        elif call == "launch":
            rows = []
            for slot in replica.prefilling:
                left = int(replica.target[slot] - replica.launched[slot])
                rows.append((slot, int(replica.launched[slot]), data.draw(st.integers(1, left))))
            wants = int(replica.pages_wanted(replica.decoding).sum())
            if (rows or len(replica.decoding)) and wants <= replica.pages.available:
                flying.append(replica.launch(seq, step(*rows)))
                seq += 1
        elif call == "settle" and flying:
            batch = flying.pop(0)
            count = int(batch.samples.sum())
            tokens = data.draw(st.lists(st.integers(0, 3), min_size=count, max_size=count))
            replica.settle(outcome(batch, tokens))
        elif call == "drop" and replica.requests:
            slot = data.draw(st.sampled_from(sorted(replica.requests)))
            assert replica.drop(slot, replica.requests[slot].id, data.draw(st.integers(-1, 4)))
        elif call == "preempt" and running:
            slot = data.draw(st.sampled_from(running))
            replica.preempt(slot, bool(len(replica.free_host) >= LIMITS.host_pages and data.draw(st.booleans())))
        resumable = [s for s in range(LIMITS.slots) if replica.phase[s] == PREEMPTED and not replica.pending(s)]
        if resumable and -(-int(replica.target[resumable[0]]) // LIMITS.page_size) <= replica.pages.available:
            replica.admit(resumable[0], replica.requests[resumable[0]], [])
        check(replica)
    twin = replica.copy()
    assert twin.state() == replica.state() and twin.seal() == replica.seal()
