"""Several front-end processes look like one server."""

import signal
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from slipstream.serve.observe.metrics import Metrics
from slipstream.serve.observe.shared_counters import SharedCounters
from tests.helpers.server import Server


@pytest.fixture(scope="module")
def server():
    with Server("--device", "sim", "--sim-step-us", "500", "--api-server-count", "3") as s:
        yield s


def cpu(pid: int) -> int:
    return sum(int(x) for x in open(f"/proc/{pid}/stat").read().rsplit(")", 1)[1].split()[11:13])


def test_connections_spread_and_counters_are_of_all(server):
    assert len(server.front_ends()) == 3
    before = {pid: cpu(pid) for pid in server.front_ends()}
    with ThreadPoolExecutor(12) as pool:
        answers = list(pool.map(lambda i: server.complete(f"{i}", max_tokens=8), range(240)))
    assert all(a.status == 200 and a.body["usage"]["completion_tokens"] == 8 for a in answers)
    assert sum(cpu(pid) > before[pid] for pid in before) >= 2, "one process answered all"
    for _ in range(6):  # whichever answers
        assert server.metric("slipstream:generation_tokens_total") == 240 * 8
        assert server.metric("slipstream:request_success_total") == 240
        assert server.metric("slipstream:e2e_request_latency_seconds_count") == 240
        assert server.metric("slipstream:num_requests_running") == 0


def test_stored_responses_are_found_and_cancelled_from_any(server):
    r = server.post("/v1/responses", {"input": "x", "max_output_tokens": 5, "temperature": 0})
    assert r.status == 200
    for _ in range(12):
        assert server.get("/v1/responses/" + r.body["id"]).body["output"] == r.body["output"]
        assert (
            server.post("/v1/responses", {"input": "y", "max_output_tokens": 1, "previous_response_id": r.body["id"]}).status
            == 200
        )
    for _ in range(4):
        slow = server.post("/v1/responses", {"input": "x", "background": True, "seed": 1, "chat_template_kwargs": {}})
        cancelled = server.post(f"/v1/responses/{slow.body['id']}/cancel", {})
        assert cancelled.body["status"] in ("cancelled", "completed", "incomplete")


def test_a_dead_front_end_ends_the_server():
    server = Server("--device", "sim", "--api-server-count", "2")
    try:
        server.signal(signal.SIGKILL, server.front_ends()[0])
        assert server.wait() == 1
        server.assert_nothing_left()
    finally:
        server.end_all()


def test_sums_are_over_blocks():
    import os

    fd = os.memfd_create("test")
    fronts = [Metrics("m", SharedCounters(fd, i, 2)) for i in range(2)]
    for i, m in enumerate(fronts):
        m.prompt(10 + i)
        m.token()
        m.ended("stop", 0.2)
    for m in fronts:
        text = m.render().decode()
        assert 'prompt_tokens_total{model_name="m"} 21.0' in text and 'generation_tokens_total{model_name="m"} 2.0' in text
        assert 'e2e_request_latency_seconds_count{model_name="m"} 2.0' in text
        total = [line for line in text.splitlines() if line.startswith("slipstream:e2e_request_latency_seconds_sum")]
        assert np.isclose(float(total[0].rsplit(" ", 1)[1]), 0.4)
