"""What surrounds a server may break: its terminal, its descriptors, its disk, its home."""

import errno
import os
import pathlib
import signal
import socket
import subprocess
import sys
import time

import pytest

from slipstream.config import EngineConfig
from slipstream.process.board import Board
from slipstream.process.group import Group, Spec
from tests.faults.bad import SIM
from tests.helpers.server import ROOT, TINY, Server

SHELL = ("sh", "-c")


def restarts(server: Server) -> None:
    """A rank's death leads to a new group, which serves."""
    old = server.ranks()[0]["pid"]
    server.signal(signal.SIGKILL, old)
    server.until(lambda: server.ranks().get(0, {"pid": old})["pid"] not in (0, old), "another rank")
    server.wait_healthy()
    assert server.complete().status == 200


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return sock.getsockname()[1]


@pytest.mark.parametrize(
    "script", ['"$@" 2>&1 | head -1', 'exec "$@" 2>&-', 'exec "$@" >&- 2>&-'], ids=["head", "no stderr", "none"]
)
def test_a_server_whose_output_nobody_reads_goes_on_and_restarts_its_ranks(script):
    port = free_port()
    server = Server(*SIM, "--port", str(port), wrap=(*SHELL, script, "sh"), wait=False)
    try:
        server.port = port
        server.wait_healthy()
        restarts(server)
    finally:
        server.end_all()


def test_idle_connections_beyond_the_descriptors_cost_nothing_and_keep_nobody_out():
    with Server(*SIM, wrap=(*SHELL, 'ulimit -n 64; exec "$@"', "sh")) as server:
        idle = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(100)]
        (front,) = server.front_ends()
        time.sleep(2.0)
        ticks = [sum(map(int, pathlib.Path(f"/proc/{front}/stat").read_text().rsplit(")", 1)[1].split()[11:13])) for _ in "x"]
        time.sleep(2.0)
        now = sum(map(int, pathlib.Path(f"/proc/{front}/stat").read_text().rsplit(")", 1)[1].split()[11:13]))
        assert now - ticks[0] < os.sysconf("SC_CLK_TCK"), "the front end is busy with connections that it cannot take"
        assert len(server.log) < 20_000, server.log[-3000:]
        assert server.complete().status == 200
        for sock in idle:
            sock.close()


def test_without_a_home_the_variable_to_set_is_named_and_no_folder_is_made(tmp_path):
    code = "import os; os.setuid(54321); from slipstream.system.folders import cache_folder; cache_folder()"
    env = {k: v for k, v in os.environ.items() if k not in ("HOME", "SLIPSTREAM_CACHE", "XDG_CACHE_HOME")}
    done = subprocess.run([sys.executable, "-c", code], env={**env, "PYTHONPATH": str(ROOT)}, cwd=tmp_path, capture_output=True)
    if b"PermissionError" in done.stderr:
        pytest.skip("needs the right to become a user without an entry in the password file")
    assert b"this user has no home folder; set SLIPSTREAM_CACHE" in done.stderr and not list(tmp_path.iterdir())


def test_a_flight_record_is_whole_or_not_there(tmp_path, monkeypatch):
    group = Group(Spec(0, EngineConfig(model=TINY, device="sim"), TINY, 1, 0), Board.create(1))
    write = pathlib.Path.write_text

    def full(self, text):
        write(self, text[: len(text) // 2])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(pathlib.Path, "write_text", full)
    with pytest.raises(OSError, match="No space left"):
        group.record(tmp_path)
    assert not list(tmp_path.iterdir())
    monkeypatch.undo()
    assert group.record(tmp_path).exists()
