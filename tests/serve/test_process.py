"""The front end as a process: hello, listening, attach, drain, and its end with its parent."""

import json
import os
import pathlib
import signal
import socket
import time

import httpx
import msgspec
import pytest

from slipstream import config
from slipstream.bench.micro.front import front_end
from slipstream.process.protocol import Attach, Down, Drain
from tests.serve.fake import FakeLeader, Script, wait_for


class Parent:
    """Plays the supervisor."""

    def __init__(self, folder: pathlib.Path):
        (folder / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": 1000, "eos_token_id": 999}))
        engine = config.EngineConfig(model="bench", device="sim")
        self._context = front_end(engine, config.ServerConfig(log_level="warning"), str(folder))
        self.pid, self.port, self.control = self._context.__enter__()
        self.leader = FakeLeader(lambda request: self.script)
        self.script = Script([300, 301, 302, 999])
        self.client = httpx.Client(base_url=f"http://127.0.0.1:{self.port}", timeout=20, trust_env=False)

    def attach(self) -> None:
        message = msgspec.msgpack.encode(Attach(0, 1, 100, 8, 512))
        socket.send_fds(self.control, [message], [self.leader.front_sock.fileno()])
        wait_for(lambda: self.client.get("/health").status_code == 200, 20)

    def send(self, message) -> None:
        self.control.send(msgspec.msgpack.encode(message))

    def exited(self) -> int | None:
        """The exit status once the process has ended."""
        pid, status = os.waitpid(self.pid, os.WNOHANG)
        return os.waitstatus_to_exitcode(status) if pid else None

    def close(self) -> None:
        self.client.close()
        self.leader.kill()
        self._context.__exit__(None, None, None)


@pytest.fixture
def parent(tmp_path):
    p = Parent(tmp_path)
    yield p
    p.close()


def test_it_listens_before_the_model_is_there_and_imports_no_torch(parent):
    assert parent.client.get("/health").status_code == 503
    assert parent.client.post("/v1/completions", json={"prompt": "x"}).status_code == 503
    parent.attach()
    r = parent.client.post("/v1/completions", json={"prompt": "x"})
    assert r.json()["choices"][0]["text"] == " t300 t301 t302"
    maps = pathlib.Path(f"/proc/{parent.pid}/maps").read_text()
    assert "libtorch" not in maps and "transformers" not in maps


def test_a_group_that_goes_down_is_told_to_everybody(parent):
    parent.attach()
    parent.send(Down(0, 1, "rank 1 was killed", 3.0))
    wait_for(lambda: parent.client.get("/health").status_code == 503)
    r = parent.client.post("/v1/completions", json={"prompt": "x"})
    assert r.status_code == 503 and "rank 1 was killed" in r.text


def test_drain_lets_answers_end_and_exits_with_0(parent):
    parent.attach()
    os.kill(parent.pid, signal.SIGTERM)  # the supervisor's business
    parent.leader.hold.set()
    with parent.client.stream("POST", "/v1/completions", json={"prompt": "x", "stream": True}) as r:
        parent.send(Drain(20.0))
        wait_for(lambda: "shutting down" in httpx.get(f"http://127.0.0.1:{parent.port}/health", trust_env=False).text)
        parent.leader.hold.clear()
        assert [line for line in r.iter_lines() if line][-1] == "data: [DONE]"
    status: list[int | None] = []
    wait_for(lambda: status.append(parent.exited()) or status[-1] is not None, 10)
    assert status[-1] == 0


def test_drain_s_end_is_an_error_for_what_still_runs(parent):
    parent.attach()
    parent.script = Script([300])
    with parent.client.stream("POST", "/v1/completions", json={"prompt": "x", "stream": True}) as r:
        lines = (line for line in r.iter_lines() if line)
        assert "t300" in next(lines)
        parent.send(Drain(0.2))
        rest = list(lines)
    assert len(rest) == 1 and "shutting down" in json.loads(rest[0][6:])["error"]["message"]
    status: list[int | None] = []
    wait_for(lambda: status.append(parent.exited()) or status[-1] is not None, 10)
    assert status[-1] == 0


def test_ff09_it_ends_with_its_parent(parent):
    parent.control.close()
    end = time.monotonic() + 10
    while parent.exited() is None:
        assert time.monotonic() < end, "the front end outlived its supervisor"
        time.sleep(0.01)


def test_a_model_without_a_tokenizer_is_named_in_one_line(tmp_path, capfd):
    (tmp_path / "config.json").write_text('{"model_type": "llama", "vocab_size": 1000}')
    with front_end(config.EngineConfig(model="bench", device="cpu"), config.ServerConfig(), str(tmp_path)) as (pid, _, _):
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 1
    said = capfd.readouterr()
    said = said.out + said.err
    assert "holds no tokenizer; give one with --tokenizer" in said and "Traceback" not in said
