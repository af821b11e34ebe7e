"""SIGKILL and SIGSTOP of leader and follower in every phase of a step."""

import pytest

from tests.faults.bad import AT_ONCE, TIMEOUT, BadServer, assert_poisons

LEADER, FOLLOWER = 0, 1
PHASES = [
    (LEADER, "plan"),
    (LEADER, "publish"),
    *((rank, phase) for rank in (LEADER, FOLLOWER) for phase in ("admit", "launch", "step", "prefill", "settle")),
    (FOLLOWER, "answer"),
]


@pytest.mark.parametrize(("rank", "phase"), PHASES)
def test_a_rank_killed_in_any_phase_ends_every_stream_once_and_the_group_returns(server: BadServer, rank: int, phase: str):
    verdict = assert_poisons(server, f"kill:{phase}", rank, AT_ONCE)
    assert f"rank {rank} was killed by SIGKILL" in verdict


STOPPED = [(LEADER, "publish"), (LEADER, "launch"), (FOLLOWER, "settle"), (FOLLOWER, "answer")]


STOPS = [pytest.param(*case, marks=() if case in STOPPED else pytest.mark.slow) for case in PHASES]


@pytest.mark.parametrize(("rank", "phase"), STOPS)
def test_a_rank_stopped_in_any_phase_is_found_by_its_lack_of_progress_and_blamed(watched: BadServer, rank: int, phase: str):
    verdict = assert_poisons(watched, f"stop:{phase}", rank, TIMEOUT + 2.0)
    assert f"rank {rank} has made no progress for {TIMEOUT:g} s" in verdict or f"rank {rank} has not answered" in verdict
