"""The budget: quantized sizes, learned from step times."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.schedule.budget import (
    BACKLOG_STRETCH_FACTOR,
    FAR_CONTEXT_TOKENS,
    MIN_CHUNK_SHARE,
    MIN_CHUNK_TOKENS,
    PROBE_STEPS,
    Budget,
    StepLoad,
    sizes,
)

caps = st.integers(1, 20_000)


@given(caps)
def test_sizes_rise_to_the_cap_in_steps_of_at_most_a_doubling(cap: int):
    found = sizes(cap)
    assert found[-1] == cap and found == sorted(set(found))
    assert all(b <= 2 * a for a, b in zip(found, found[1:], strict=False))
    assert len(found) < 80


@given(caps, st.integers(0, 300), st.floats(1e-5, 1.0), st.floats(1e-7, 1e-2))
def test_what_joins_a_step_is_a_known_size_or_the_room_that_is_left(cap: int, decodes: int, base: float, per_token: float):
    budget = Budget(cap, 0.016, base, per_token, largest_chunk_tokens=cap)
    tokens = budget.prompt_tokens(decodes)
    assert 0 <= tokens <= max(cap - decodes, 0)
    if decodes and cap > decodes:
        assert decodes + tokens in sizes(cap) or tokens in (MIN_CHUNK_TOKENS, cap - decodes)
        if tokens > MIN_CHUNK_TOKENS:
            assert base + tokens * per_token <= max(0.016, base + MIN_CHUNK_SHARE * 0.016) * 1.001


@given(caps, st.floats(1e-5, 0.02), st.floats(1e-7, 1e-3), st.floats(1e-3, 0.1), st.floats(1.0, 3.0))
def test_a_larger_target_never_gives_a_smaller_chunk(cap: int, base: float, per_token: float, target: float, more: float):
    small = Budget(cap, target, base, per_token, cap).prompt_tokens(1)
    assert Budget(cap, target * more, base, per_token, cap).prompt_tokens(1) >= small
    assert Budget(cap, target, base * more, per_token, cap).prompt_tokens(1) <= small
    assert Budget(cap, target, base, per_token * more, cap).prompt_tokens(1) <= small


def test_nothing_that_decodes_means_the_whole_step():
    assert Budget(2048, 0.016, 0.01, 1e-4).prompt_tokens(0) == 2048


def test_a_slow_device_gets_no_step_that_would_count_as_hung():
    budget = Budget(2048, 0.1)
    assert budget.prompt_tokens(0) <= 256, "nothing is known yet"
    budget.observe(StepLoad(0, 256), 256 * 0.05)
    assert budget.prompt_tokens(0) * 0.05 <= 5.0


def test_beside_decoding_rows_the_chunk_starts_small_and_at_most_doubles_with_each_measurement():
    budget = Budget(2048, 10.0)
    found = []
    for _ in range(9):
        found.append(budget.prompt_tokens(8))
        budget.observe(StepLoad(8, found[-1]), 1e-3)
    assert found[0] == MIN_CHUNK_TOKENS and found[-1] >= 1024
    assert all(b <= 2 * a for a, b in zip(found, found[1:], strict=False))


def test_ff27_measured_steps_set_the_chunk_so_that_streams_keep_their_target():
    budget = Budget(8192, 0.016)
    for _ in range(50):
        budget.observe(StepLoad(16, 0), 0.003)
        n = budget.prompt_tokens(16)
        budget.observe(StepLoad(16, n), 0.003 + 17e-6 * n)
    n = budget.prompt_tokens(16)
    assert 0.003 + 17e-6 * n <= 0.016 < 0.003 + 17e-6 * 2 * n


def test_a_step_with_decoding_rows_comes_near_to_what_the_target_allows():
    """16 rows and 3 ms + 17 us a token, of 16 ms: quantizing costs less than a twelfth of the prefill rate."""
    budget = Budget(2048, 0.016)
    for _ in range(12):
        budget.observe(StepLoad(16, 0), 0.003 + 17e-6 * 16)
        n = budget.prompt_tokens(16)
        seconds = 0.003 + 17e-6 * (16 + n)
        budget.observe(StepLoad(16, n), seconds)
    assert seconds <= 0.016
    assert n / seconds >= 11 / 12 * 0.013 / 17e-6 / 0.016


def test_a_prompts_end_and_the_next_ones_beginning_both_come_near_to_the_target():
    """Prompts of 24,000 tokens one after the other beside 16 rows: 3.5 ms, and 14 to 28 us a token from beginning to end."""
    budget, target = Budget(2048, 0.019), 0.019
    steps = []
    for _ in range(12):
        context = 0
        while context < 24_000:
            n = budget.prompt_tokens(16, context)
            seconds = 0.0035 + n * (14e-6 + context * 0.6e-9)
            budget.observe(StepLoad(16), 0.0035)
            budget.observe(StepLoad(16, n, context), seconds)
            steps.append(seconds)
            context += n
    learned = steps[len(steps) // 2 :]
    assert max(learned) <= target * 1.02
    assert sum(learned) / len(learned) >= 0.92 * target


def test_short_prompts_between_do_not_make_long_ones_steps_too_long():
    """The first 80 tokens beside decoding rows cost nothing, as where memory is waited for: 200 then say little about 1200."""
    budget = Budget(2048, 0.019)
    seconds = lambda n: 0.0044 + 12e-6 * max(n - 80, 0)
    long = []
    for i in range(400):
        budget.observe(StepLoad(40), seconds(0))
        n = 200 if i % 8 else budget.prompt_tokens(40)
        if n != 200:
            long.append(seconds(n))
        budget.observe(StepLoad(40, n), seconds(n))
    assert max(long[len(long) // 2 :]) <= 0.019 * 1.05 and long[-1] >= 0.019 * 0.9


def test_steps_may_be_longer_while_many_steps_of_prompts_are_under_way():
    budget = Budget(2048, 0.016, 0.003, 15e-6, largest_chunk_tokens=2048)
    usual, behind = budget.prompt_tokens(16, 0.0, 20_000), budget.prompt_tokens(16, 0.0, 40_000)
    assert usual == budget.prompt_tokens(16) and behind > usual
    assert (
        budget.expected(StepLoad(16, usual)) <= 0.016
        and budget.expected(StepLoad(16, behind)) <= 0.016 * BACKLOG_STRETCH_FACTOR
    )


@given(st.lists(st.tuples(st.integers(16, 2048), st.floats(0, 40_000), st.floats(1e-5, 5.0)), min_size=1, max_size=40))
def test_whatever_is_measured_every_token_costs_something_and_a_context_never_makes_it_cheaper(measured):
    budget = Budget(2048, 0.016, 0.003)
    for n, context, seconds in measured:
        budget.observe(StepLoad(8, n, context), seconds)
        assert budget.cost(0) > 0
        assert budget.cost(FAR_CONTEXT_TOKENS) >= budget.cost(0)


def test_one_hiccup_of_the_machine_does_not_stop_the_prompts():
    budget = Budget(2048, 0.016, 0.003, 17e-6, largest_chunk_tokens=704)
    budget.observe(StepLoad(16, 704), 8.0)
    budget.observe(StepLoad(16, 0), 8.0)
    assert budget.prompt_tokens(16) >= 200
    for _ in range(20):
        budget.observe(StepLoad(16, 0), 0.003)
        n = budget.prompt_tokens(16)
        budget.observe(StepLoad(16, n), 0.003 + 17e-6 * n)
    assert budget.prompt_tokens(16) >= 640


def test_rows_that_became_slow_while_prompts_were_always_under_way_are_measured_again():
    """3 ms of decoding become 25, of a target of 16: a chunk may still take a quarter of it; one step in many goes without."""
    budget = Budget(2048, 0.016)
    steps = []
    for i in range(600):
        base = 0.003 if i < 100 else 0.025
        n = budget.prompt_tokens(16, waiting=100_000)
        budget.observe(StepLoad(16, n), base + 17e-6 * n)
        steps.append(n)
    assert budget.base_s == pytest.approx(0.025, rel=0.05)
    assert sum(steps[-200:]) / 200 >= 0.8 * MIN_CHUNK_SHARE * 0.016 / 17e-6
    assert 1 <= steps[-2 * PROBE_STEPS :].count(0) <= 4


def test_rows_first_measured_in_a_hiccup_do_not_make_every_step_the_longest():
    budget = Budget(2048, 0.016)
    budget.observe(StepLoad(16), 1.0)
    steps = []
    for _ in range(40):
        n = budget.prompt_tokens(16)
        steps.append(0.003 + 17e-6 * n)
        budget.observe(StepLoad(16, n), steps[-1])
    assert max(steps[20:]) <= 0.016 * BACKLOG_STRETCH_FACTOR


def test_a_device_too_slow_for_the_wish_still_takes_prompts_in():
    """Rows that take longer than the target by themselves: a chunk may then take a quarter of it, not a page at a time."""
    budget = Budget(2048, 0.1, base_s=0.15, token_s=1e-4, largest_chunk_tokens=2048)
    assert budget.prompt_tokens(8) * 1e-4 >= 0.02


def test_a_tiny_chunk_or_an_empty_step_teaches_nothing_false():
    budget = Budget(2048, 0.016, 0.003, 17e-6)
    budget.observe(StepLoad(4, 3), 5.0)
    budget.observe(StepLoad(0, 0), 5.0)
    assert (budget.base_s, budget.token_s) == (0.003, 17e-6)
