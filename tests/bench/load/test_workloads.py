"""Plans are fixed by their seed, have the shares and lengths that the workloads' names promise, and fit the model."""

import pytest

from slipstream.bench.load import workloads
from slipstream.bench.load.records import prompt_ids, token_range
from slipstream.bench.load.workloads import Shape
from slipstream.errors import ConfigError


def test_the_mix_is_four_short_prompts_to_one_long():
    jobs = workloads.mix(Shape(), 480, seed=0)
    assert sum(j.kind == "long" for j in jobs) == 96
    assert {(j.kind, j.prompt_len, j.output_len) for j in jobs} == {("short", 200, 256), ("long", 3000, 256)}
    assert jobs == workloads.mix(Shape(), 480, seed=0) != workloads.mix(Shape(), 480, seed=1)


def test_arrivals_come_at_the_rate_asked_for():
    jobs = workloads.poisson(workloads.mix(Shape(), 2000, 0), rate=5.0, seed=0)
    times = [j.at for j in jobs]
    assert times == sorted(times)
    assert 2000 / times[-1] == pytest.approx(5.0, rel=0.1)


def test_a_burst_is_streams_and_long_prompts():
    jobs = workloads.burst(Shape(), 16, 32, seed=0)
    prompts = [j for j in jobs if j.kind == "burst"]
    assert [sum(j.kind == k for j in jobs) for k in ("stream", "burst")] == [16, 32]
    assert all(16000 <= j.prompt_len <= 30000 and j.output_len == 16 for j in prompts)
    assert all(j.output_len == 3000 for j in jobs if j.kind == "stream")


def test_conversations_have_two_to_six_turns_and_fit():
    talks = workloads.conversations(200, 8192, leave=0.25, seed=0)
    stay = [c for c in talks if all(t.leave_after is None for t in c.turns)]
    assert {len(c.turns) for c in stay} == {2, 3, 4, 5, 6}
    assert 20 < len(talks) - len(stay) < 80
    for c in talks:
        assert sum(t.new_len + t.output_len for t in c.turns) <= 8192
        assert all(t.leave_after is None or 1 <= t.leave_after < t.output_len for t in c.turns)
    with pytest.raises(ConfigError, match="--scale"):
        workloads.conversations(1, 50, 0.0, 0)


def test_the_parity_set_spans_20_to_3000_tokens_greedy_or_seeded():
    jobs = workloads.parity(48, 64, 0)
    assert (jobs[0].prompt_len, jobs[-1].prompt_len) == (20, 3000)
    assert all(j.seed is None for j in jobs)
    assert len({j.seed for j in workloads.parity(48, 64, 0, seeded=True)}) == 48


def test_what_does_not_fit_is_refused_with_the_scale_that_would():
    with pytest.raises(ConfigError, match=r"3256 tokens and the model takes at most 2048; use --scale 0\.62"):
        workloads.check_fit(workloads.mix(Shape(), 10, 0), 2048)
    workloads.check_fit(workloads.mix(Shape().scaled(0.62), 10, 0), 2048)


def test_prompts_stay_away_from_both_ends_of_the_vocabulary():
    for vocab in (32, 256, 49152, 151936):
        low, high = token_range(vocab)
        ids = prompt_ids(0, 3, 500, vocab)
        assert 0 < low <= min(ids) and max(ids) < high <= vocab
    assert prompt_ids(0, 3, 50, 49152) == prompt_ids(0, 3, 50, 49152) != prompt_ids(0, 4, 50, 49152)
