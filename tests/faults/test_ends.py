"""How a server ends, and that nothing of it is left: supervisor, front end, signals, and starts that fail."""

import os
import pathlib
import shutil
import signal
import socket
import subprocess
import sys
import time

import pytest

from slipstream.process.supervisor import SAME_SIGNAL_S
from tests.faults.bad import SIM, BadServer
from tests.helpers.server import ROOT, TINY, Clients, Server, command_line, is_terminal, open_files

TP2 = (*SIM, "-tp", "2", "--step-timeout", "120")


@pytest.mark.parametrize("stopped", [None, 1])
def test_ff09_nobody_survives_a_killed_supervisor(stopped: int | None):
    with Server(*TP2) as server:
        clients = Clients(server, 2, max_tokens=7000)
        clients.wait_started()
        if stopped is not None:
            server.signal(signal.SIGSTOP, server.ranks()[stopped]["pid"])
        assert len(server.family()) >= 4
        server.signal(signal.SIGKILL)
        assert server.wait() == -signal.SIGKILL
        server.assert_nothing_left()


def test_ff09_nobody_survives_a_supervisor_killed_during_the_start():
    for delay in (0.0, 0.2, 0.5):
        server = Server(*TP2, wait=False)
        try:
            server.until(lambda s=server: len(s.family()) > 1, "the first child")
            time.sleep(delay)
            server.signal(signal.SIGKILL)
            server.wait()
            server.assert_nothing_left()
        finally:
            server.end_all()


def test_no_process_survives_a_killed_front_end():
    with Server(*TP2) as server:
        clients = Clients(server, 2, max_tokens=7000)
        clients.wait_started()
        (front,) = server.front_ends()
        server.signal(signal.SIGKILL, front)
        assert server.wait() == 1
        assert "a front end ended" in server.log
        server.assert_nothing_left()
        clients.join()


def test_sigterm_lets_running_streams_end_refuses_new_ones_and_exits_0():
    with Server(*TP2, "--drain-timeout", "20") as server:
        clients = Clients(server, 3, max_tokens=300)
        clients.wait_started()
        server.signal(signal.SIGTERM)
        server.until(lambda: server.get("/health").status == 503, "the drain")
        refused = server.complete()
        assert refused.status == 503 and int(refused.headers["retry-after"]) >= 1
        assert server.wait() == 0
        clients.join()
        for events in clients.events:
            ends = [e.data for e in events if e.data != "[DONE]" and is_terminal(e.data)]
            assert len(ends) == 1 and ends[0]["choices"][0]["finish_reason"] == "length"
            assert events[-1].data == "[DONE]"


def test_ff11_a_drain_that_runs_out_tells_each_client_why_before_the_socket_closes():
    with Server(*TP2, "--drain-timeout", "0.3") as server:
        clients = Clients(server, 3, max_tokens=7000)
        clients.wait_started()
        since = time.monotonic()
        server.signal(signal.SIGTERM)
        clients.join()
        assert server.wait() == 0
        for events, error in zip(clients.events, clients.errors, strict=True):
            assert error is None
            ends = [e.data for e in events if e.data != "[DONE]" and is_terminal(e.data)]
            assert len(ends) == 1 and "shutting down" in ends[0]["error"]["message"]
        assert time.monotonic() - since < 20


def test_a_second_sigterm_ends_a_drain_at_once_and_tells_each_client_why():
    with Server(*TP2, "--drain-timeout", "60") as server:
        clients = Clients(server, 3, max_tokens=7000)
        clients.wait_started()
        server.signal(signal.SIGTERM)
        server.until(lambda: server.get("/health").status == 503, "the drain")
        server.signal(signal.SIGTERM)
        assert server.wait(20) == 0
        clients.join()
        for events in clients.events:
            ends = [e.data for e in events if e.data != "[DONE]" and is_terminal(e.data)]
            assert len(ends) == 1 and "shutting down" in ends[0]["error"]["message"]


def test_a_second_sigterm_ends_a_front_end_that_stands_still():
    """It can neither drain nor tell its clients anything; nobody waits for it as long as for a drain."""
    with Server(*TP2, "--drain-timeout", "60") as server:
        front = next(pid for pid in server.family() if "slipstream.serve.main" in command_line(pid))
        server.signal(signal.SIGSTOP, front)
        server.signal(signal.SIGTERM)
        server.until(lambda: "draining for up to 60 s" in server.log, "the drain")
        time.sleep(2 * SAME_SIGNAL_S)
        server.signal(signal.SIGTERM)
        assert server.wait(20) == 0


def test_sigterm_during_the_start_exits_0():
    server = Server(*TP2, wait=False)
    try:
        server.until(lambda: len(server.family()) >= 4, "all children")
        server.signal(signal.SIGTERM)
        assert server.wait() == 0, server.log
        server.assert_nothing_left()
    finally:
        server.end_all()


def test_a_rank_killed_during_a_drain_still_tells_its_clients():
    with Server(*TP2, "--drain-timeout", "20") as server:
        clients = Clients(server, 2, max_tokens=7000)
        clients.wait_started()
        victim = server.ranks()[1]["pid"]
        server.signal(signal.SIGTERM)
        server.until(lambda: server.get("/health").status == 503, "the drain")
        since = time.monotonic()
        server.signal(signal.SIGKILL, victim)
        clients.assert_one_error_each(since, 2.0)
        assert server.wait() == 0, server.log


def test_an_idle_rank_that_dies_makes_health_say_so_and_the_server_comes_back():
    with Server(*TP2) as server:
        old = server.ranks()[1]["pid"]
        server.signal(signal.SIGKILL, old)
        server.until(lambda: server.get("/health").status == 503, "bad health")
        server.wait_healthy()
        assert server.complete().status == 200
        assert old not in server.family()
        counted = [server.metric(f"slipstream:{name}_total") for name in ("groups_poisoned", "group_restarts")]
        assert counted == [1, 1]


def test_restarts_leave_no_descriptors_in_the_supervisor():
    with Server(*TP2) as server:
        counts = []
        for _ in range(3):
            server.signal(signal.SIGKILL, server.ranks()[0]["pid"])
            server.until(lambda: server.get("/health").status == 503, "bad health")
            server.wait_healthy()
            counts.append(len(open_files(server.process.pid)))
        assert counts[0] == counts[-1], open_files(server.process.pid)


def test_new_requests_during_an_outage_get_503_and_tries_run_out():
    with BadServer("-tp", "2", start_fault={"rank": 1, "fault": "dies at start", "from": 2}) as server:
        assert server.complete().status == 200
        server.signal(signal.SIGKILL, server.ranks()[0]["pid"])
        server.until(lambda: server.get("/health").status == 503, "bad health")
        refused = server.complete()
        assert refused.status == 503 and int(refused.headers["retry-after"]) >= 1
        assert refused.body["error"]["type"] == "server_error"
        assert server.wait(60) == 1
        assert "rank 1 was killed by SIGKILL" in server.log and "giving up" in server.log
        server.assert_nothing_left()


def test_ff17_capacities_are_the_least_of_the_ranks_and_an_odd_rank_stops_the_start():
    with BadServer("-tp", "2", start_fault={"rank": 1, "fault": "less memory", "from": 1}) as server:
        clients = Clients(server, 4, max_tokens=100)
        clients.join()
        assert all(e[-1].data == "[DONE]" for e in clients.events)
        assert server.metric("slipstream:kv_pages") == 65_536 // 3
    server = BadServer("-tp", "2", start_fault={"rank": 1, "fault": "other config", "from": 1}, wait=False)
    try:
        assert server.wait() == 2
        assert "rank 1 differs from rank 0 in versions or configuration" in server.log
        server.assert_nothing_left()
    finally:
        server.end_all()


def test_a_rank_that_cannot_load_says_so_and_the_server_gives_up():
    server = BadServer("-tp", "2", start_fault={"rank": 1, "fault": "cannot load", "from": 1}, wait=False)
    try:
        assert server.wait(90) == 1
        assert "rank 1 could not start: RuntimeError: the weights are gone" in server.log
        server.assert_nothing_left()
    finally:
        server.end_all()


def test_ff16_two_servers_on_one_machine_share_nothing():
    with Server(*TP2) as one, Server(*TP2) as two:
        assert one.port != two.port
        for server in (one, two):
            assert server.complete(max_tokens=20).status == 200
            server.assert_no_names()
        one.signal(signal.SIGKILL, one.ranks()[1]["pid"])
        one.until(lambda: one.get("/health").status == 503, "bad health")
        assert two.complete(max_tokens=20).status == 200
        one.wait_healthy()


def test_a_full_dev_shm_changes_nothing():
    script = 'mount -t tmpfs -o size=4k tmpfs /dev/shm && head -c 65536 /dev/zero > /dev/shm/full 2>/dev/null; exec "$@"'
    wrap = ("unshare", "-m", "sh", "-c", script, "sh")
    if subprocess.run([*wrap, "true"], capture_output=True).returncode:
        pytest.skip("needs the right to mount a small /dev/shm of its own (unshare -m)")
    with Server(*TP2, wrap=wrap) as server:
        assert server.complete(max_tokens=50).status == 200


def test_a_taken_port_is_told_before_anything_is_loaded():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        command = [sys.executable, "-m", "slipstream.cli", "serve", TINY, *TP2, "--port", port]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert f"cannot listen on 127.0.0.1:{port}" in done.stderr and "--port" in done.stderr


def test_ff12_a_server_under_python_o_serves_the_same():
    with Server(*TP2) as server:
        expected = server.complete(max_tokens=30).body["choices"][0]["text"]
    with Server(*TP2, env={"PYTHONOPTIMIZE": "1"}) as server:
        assert server.complete(max_tokens=30).body["choices"][0]["text"] == expected
        assert all(command_line(pid) for pid in server.family())


def test_no_rank_or_front_end_inherits_the_key():
    with Server(*TP2, "--host", "127.0.0.1", env={"SLIPSTREAM_API_KEY": "secret-of-a-test"}, wait=False) as server:
        server.wait_ready()
        for pid in server.family():
            if pid != server.process.pid:
                environ = pathlib.Path(f"/proc/{pid}/environ").read_bytes()
                assert b"secret-of-a-test" not in environ, command_line(pid)
        assert os.getpid() not in server.family()


def test_no_process_imports_from_the_folder_that_the_server_stands_in(tmp_path: pathlib.Path):
    """`cd MODEL; slipstream serve .` must not run what lies there: a model's folder comes from strangers."""
    mark = tmp_path / "ran"
    for name in ("msgspec", "numpy", "torch", "uvicorn", "llguidance", "jinja2", "slipstream", "resource"):
        (tmp_path / f"{name}.py").write_text(f"open({str(mark)!r}, 'a').write({name!r})\nraise SystemExit(3)\n")
    program = ("-P", "-m", "slipstream.cli", "serve")  # as the installed command, which has its own folder first
    env = {"PYTHONPATH": str(ROOT)}
    with Server(*TP2, program=program, env=env, wrap=("env", "-C", str(tmp_path))) as server:
        assert server.complete(structured_outputs={"regex": "[0-9]{3}"}).status == 200
        chat = server.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 3})
        assert chat.status == 200, chat
    assert not mark.exists(), mark.read_text()


@pytest.mark.skipif(shutil.which("nvidia-smi") is not None, reason="for machines without a GPU")
def test_asking_for_a_gpu_where_there_is_none_is_one_line_and_no_second_try():
    command = [
        sys.executable,
        "-m",
        "slipstream.cli",
        "serve",
        TINY,
        "--device",
        "cuda",
        "--load-format",
        "dummy",
        "--port",
        "0",
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and done.stderr.count("--device cuda: no usable GPU") == 1 and "Traceback" not in done.stderr


def test_a_configuration_that_does_not_fit_into_a_message_is_refused_and_not_waited_for(tmp_path: pathlib.Path):
    file = tmp_path / "config.yaml"
    file.write_text(f"chat_template: '{'{{ messages }}' * 40_000}'\n")
    with Server(*TP2, "--config", str(file), wait=False) as server:
        assert server.wait() == 2
        assert "could not be sent its configuration" in server.log and "nothing was started" in server.log
