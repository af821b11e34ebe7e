"""Ranks that raise, hang, or answer wrongly, and messages that are lost, doubled or spoiled between them."""

import json
import re
import time

import pytest

from tests.faults.bad import AT_ONCE, TIMEOUT, BadServer, assert_poisons
from tests.helpers.server import Clients


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ("raise", "RuntimeError: an illegal memory access was encountered"),
        ("step fails", "failed in the step of entry"),
        ("exit", "exited with 3"),
    ],
)
def test_ff10_a_rank_that_raises_in_its_forward_is_told_at_once(server: BadServer, rank: int, fault: str, says: str):
    verdict = assert_poisons(server, fault, rank, AT_ONCE)
    assert f"rank {rank} " in verdict and says in verdict


def test_a_flight_record_shows_the_entry_from_which_the_ranks_differ(server: BadServer):
    verdict = assert_poisons(server, "other token", 1, AT_ONCE)
    differs = re.search(r"rank 1 differs at entry (\d+)", verdict)
    assert differs is not None
    newest = max(server.folder.glob("**/flight-*.json"), key=lambda file: file.stat().st_mtime)
    record = json.loads(newest.read_text())
    assert record["reason"] in verdict
    leader, follower = ({s["entry"]: s["digest"] for s in rank["spans"] if s["phase"] == "launch"} for rank in record["ranks"])
    both = sorted(leader.keys() & follower.keys())
    assert len(both) > 3 and "0" * 16 not in leader.values()
    assert [e for e in both if leader[e] != follower[e]] == [e for e in both if e >= int(differs[1])]


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ("wrong digest", r"rank 1 differs at entry \d+: its digest is [0-9a-f]{16}, the leader's [0-9a-f]{16}"),
        ("other token", r"rank 1 differs at entry \d+: its digest is"),
        ("reply twice", r"rank 1 differs at entry \d+: answered entry \d+ where \d+ was due"),
        ("reply lost", r"rank 1 differs at entry \d+: answered entry \d+ where \d+ was due"),
        ("wrong rank", r"rank 0 differs at entry \d+"),
    ],
)
def test_a_wrong_answer_names_the_rank_and_the_first_entry_that_differs(server: BadServer, fault: str, says: str):
    assert re.search(says, assert_poisons(server, fault, 1, AT_ONCE))


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ("garbled", r"rank 1 failed after entry \d+: \w*DecodeError"),
        ("entry lost", r"rank 1 (differs at|failed after|was sent) entry \d+"),
        ("entry twice", r"rank 1 (differs at|failed after|was sent) entry \d+"),
    ],
)
def test_a_spoiled_lost_or_doubled_entry_poisons_the_group(server: BadServer, fault: str, says: str):
    assert re.search(says, assert_poisons(server, fault, 0, AT_ONCE))


def test_a_drop_that_a_rank_did_not_find_poisons_the_group(server: BadServer):
    server.wait_healthy()
    clients = Clients(server, 2, max_tokens=7000)
    clients.wait_started()
    since = server.arm("wrong existed", 1)
    ended = server.complete(max_tokens=2)  # its drop is the one
    assert ended.status == 500
    clients.assert_one_error_each(since, AT_ONCE)
    assert "its drops found [False], the leader's [True]" in server.log


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("fault", ["loop hangs", "device hangs"])
def test_ff08_a_rank_that_is_alive_but_hangs_is_found_by_its_lack_of_progress(watched: BadServer, rank: int, fault: str):
    verdict = assert_poisons(watched, fault, rank, TIMEOUT + 2.0, lasting=True)
    assert f"rank {rank} has made no progress" in verdict or f"rank {rank} has not answered" in verdict


@pytest.mark.parametrize("fault", ["silent", "deaf"])
def test_a_rank_that_turns_but_never_answers_is_found_and_blamed(watched: BadServer, fault: str):
    assert re.search(r"rank 1 has not answered entry \d+", assert_poisons(watched, fault, 1, TIMEOUT + 2.0, lasting=True))


def test_a_late_reply_delays_the_end_and_harms_nobody(server: BadServer):
    server.wait_healthy()
    since = server.arm("late reply", 1)
    answer = server.complete(max_tokens=20)
    assert answer.status == 200 and answer.body["choices"][0]["finish_reason"] == "length"
    assert time.monotonic() - since > 0.9, "the end must wait for the rank's answer"
    assert {r["incarnation"] for r in server.ranks().values()} == {server.ranks()[0]["incarnation"]}
