"""A few faults on the CPU device with tiny random weights: ranks there wait for each other inside a step."""

import signal
import time

import pytest

from tests.faults.bad import TIMEOUT, BadServer
from tests.helpers.server import Clients, Server

CPU = ("--device", "cpu", "--load-format", "dummy", "--dtype", "float32", "-tp", "2", "--enable-debug")


@pytest.fixture(scope="module")
def server():
    with Server(*CPU, "--step-timeout", str(TIMEOUT)) as server:
        yield server
        server.wait_healthy()


@pytest.mark.parametrize(
    ("number", "rank", "within"),
    [
        (signal.SIGKILL, 1, 2.0),
        (signal.SIGSTOP, 1, TIMEOUT + 2.0),
        (signal.SIGKILL, 0, 2.0),
        (signal.SIGSTOP, 0, TIMEOUT + 2.0),
    ],
)
def test_a_rank_whose_peer_dies_or_stops_in_the_middle_of_a_sum_is_ended_and_a_new_group_serves(
    server: Server, number: int, rank: int, within: float
):
    server.wait_healthy()
    want = server.complete(max_tokens=20).body["choices"][0]["text"]
    old = {r: s["pid"] for r, s in server.ranks().items()}
    clients = Clients(server, 3, max_tokens=4000)
    clients.wait_started()
    since = time.monotonic()
    server.signal(number, old[rank])
    clients.assert_one_error_each(since, within)
    server.wait_healthy()
    assert not set(old.values()) & set(server.family()), "a rank that waited for its peer is left"
    assert server.complete(max_tokens=20).body["choices"][0]["text"] == want
    server.assert_no_names()


def test_a_rank_that_hangs_in_its_forward_is_blamed_and_not_the_one_that_waits_for_it():
    with BadServer(*CPU, "--step-timeout", str(TIMEOUT)) as server:
        clients = Clients(server, 2, max_tokens=4000)
        clients.wait_started()
        since = server.arm("forward hangs", 1)
        clients.assert_one_error_each(since, TIMEOUT + 2.0)
        assert "rank 1 has made no progress" in server.log
        server.wait_healthy()
