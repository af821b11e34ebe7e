"""The failure table on real GPUs: memory runs out in a step, a kernel hangs, a rank dies with sums queued, clients leave."""

import contextlib
import json
import random
import socket
import time

import pytest
import torch

from tests.faults.bad import AT_ONCE, TIMEOUT, BadServer, assert_poisons
from tests.helpers.server import GREEDY

CUDA = ("--device", "cuda", "--load-format", "dummy", "--dtype", "float32", "--enable-debug", "--max-num-seqs", "8")
CUDA = (*CUDA, "--kv-cache-memory-bytes", str(1 << 26), "--step-timeout", str(TIMEOUT))
RANKS = [pytest.param(size, rank, id=f"rank {rank} of {size}") for size in (1, 2) for rank in range(size)]


@pytest.fixture(scope="module")
def servers():
    """One misbehaving server by the number of its ranks."""
    made: dict[int, BadServer] = {}
    with contextlib.ExitStack() as running:

        def server(size: int) -> BadServer:
            if torch.cuda.device_count() < size:
                pytest.skip(f"{size} GPUs are needed")
            if size not in made:
                made[size] = BadServer(*CUDA, "-tp", str(size))
                running.enter_context(made[size])
            return made[size]

        yield server


@pytest.mark.parametrize(("size", "rank"), RANKS)
def test_a_step_that_runs_out_of_memory_is_told_at_once(servers, size: int, rank: int):
    verdict = assert_poisons(servers(size), "out of memory", rank, AT_ONCE)
    assert f"rank {rank} " in verdict and "out of memory" in verdict


@pytest.mark.parametrize(("size", "rank"), RANKS)
def test_a_kernel_that_hangs_is_found_and_its_rank_blamed(servers, size: int, rank: int):
    verdict = assert_poisons(servers(size), "kernel hangs", rank, TIMEOUT + 2.0)
    assert f"rank {rank} has made no progress" in verdict


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_killed_with_a_step_queued_ends_its_peer_too(servers, rank: int):
    """The other rank spins in a sum that nobody will finish; the spin is bounded, and the group ends with the dead one."""
    assert_poisons(servers(2), "kill:step", rank, AT_ONCE)


def test_a_thousand_clients_that_leave_during_prefill_leave_no_page(servers):
    server = servers(1)
    server.wait_healthy()
    body = json.dumps({**GREEDY, "prompt": "x" * 3000, "max_tokens": 500, "stream": True}).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    request = f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body
    moments = random.Random(3)
    for _ in range(50):
        clients = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(20)]
        for client in clients:
            client.sendall(request)
        time.sleep(moments.uniform(0.0, 0.03))
        for client in clients:
            client.close()
    assert server.complete().status == 200
    server.until(lambda: server.metric("slipstream:num_requests_running") == 0, "the end of all requests")
    server.until(lambda: server.metric("slipstream:kv_cache_usage_perc") == 0, "the pages of all requests")
