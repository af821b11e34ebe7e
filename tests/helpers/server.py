"""A server as a child process of a test, talked to with the standard library alone.

`Server` starts `slipstream serve` in a session of its own and can tell, after its end, whether anything of it is left.
"""

import contextlib
import http.client
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

DATA = pathlib.Path(__file__).parent.parent / "data"
TINY = str(DATA / "tiny")
ROOT = pathlib.Path(__file__).parent.parent.parent
SERVE = ("-m", "slipstream.cli", "serve")
START = 120.0  # seconds that a server gets to start on a busy machine
READY = re.compile(r"slipstream: ready on (http://\S+:(\d+)|\S+)")


class Answer(NamedTuple):
    status: int
    headers: dict[str, str]
    body: Any  # parsed JSON, or text


class Event(NamedTuple):
    """One server-sent event and when it came, seconds of the monotonic clock. `data` is parsed JSON or "[DONE]"."""

    at: float
    data: Any


class Server:
    """A running server. Use it as a context manager: leaving it ends the server and asserts that nothing is left."""

    def __init__(
        self,
        *args: str,
        model: str = TINY,
        program: tuple[str, ...] = SERVE,
        env: dict[str, str] | None = None,
        wrap: tuple[str, ...] = (),
        wait: bool = True,
    ):
        """`program` is what Python runs; `wrap` stands before it (`unshare -m ...`). `wait`: return when it is ready."""
        self.folder = pathlib.Path(tempfile.mkdtemp(prefix="slipstream-test-"))
        weakref.finalize(self, shutil.rmtree, self.folder, True)
        self._log = self.folder / "log"
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                [*wrap, sys.executable, *program, model, "--port", "0", *args],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=ROOT,
                start_new_session=True,
                env={**os.environ, "OMP_NUM_THREADS": "1", "SLIPSTREAM_CACHE": str(self.folder), **(env or {})},
            )
        self.port = 0
        if wait:
            self.wait_ready()

    # --- where it is

    @property
    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def wait_ready(self) -> None:
        """Until the server has said that it is ready; AssertionError with its log when it does not."""
        try:
            self.until(lambda: READY.search(self.log), "the ready line", START)
        except AssertionError:
            self.end_all()
            raise
        found = READY.search(self.log)
        assert found is not None
        self.port = int(found[2] or 0)

    def until(self, is_true: Callable[[], Any], what: str, seconds: float = 60.0) -> Any:
        """Waits for a condition, however slow the machine; AssertionError with the log when it never comes."""
        end = time.monotonic() + seconds
        while True:
            with contextlib.suppress(OSError, http.client.HTTPException):
                if value := is_true():
                    return value
            ended = self.process.poll()
            assert time.monotonic() < end, f"{what} did not come within {seconds:g} s\n{self.log[-6000:]}"
            assert ended is None, f"the server ended with {ended} before {what}\n{self.log[-6000:]}"
            time.sleep(0.02)

    def wait_healthy(self, seconds: float = START) -> None:
        self.until(lambda: self.get("/health").status == 200, "health", seconds)

    def ranks(self) -> dict[int, dict]:
        """/debug/ranks by rank (the server must run with --enable-debug)."""
        return {r["rank"]: r for r in self.get("/debug/ranks").body}

    def family(self) -> list[int]:
        """Process ids of everything the server started that is still alive: its session."""
        out = []
        for entry in os.listdir("/proc"):
            if entry.isdigit():
                with contextlib.suppress(OSError):
                    fields = pathlib.Path(f"/proc/{entry}/stat").read_text().rsplit(")", 1)[1].split()
                    if int(fields[3]) == self.process.pid and fields[0] != "Z":
                        out.append(int(entry))
        return out

    def front_ends(self) -> list[int]:
        return [pid for pid in self.family() if "slipstream.serve.main" in command_line(pid)]

    def metric(self, name: str, **labels: str) -> float:
        """The sum of a metric's samples that carry these labels."""
        lines = self.get("/metrics").body.splitlines()
        found = [line for line in lines if re.match(re.escape(name) + r"[{ ]", line)]
        assert found, f"/metrics has no {name}"
        wanted = [f'{key}="{value}"' for key, value in labels.items()]
        return sum(float(line.rsplit(" ", 1)[1]) for line in found if all(label in line for label in wanted))

    # --- talking to it

    def _connect(self, timeout: float) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout)

    def get(self, path: str, timeout: float = 20.0) -> Answer:
        return self._call("GET", path, None, timeout)

    def post(self, path: str, body: dict, timeout: float = 60.0) -> Answer:
        return self._call("POST", path, json.dumps(body), timeout)

    def _call(self, method: str, path: str, body: str | None, timeout: float) -> Answer:
        connection = self._connect(timeout)
        try:
            connection.request(method, path, body, {"Content-Type": "application/json"})
            response = connection.getresponse()
            text = response.read().decode()
        finally:
            connection.close()
        headers = {k.lower(): v for k, v in response.getheaders()}
        is_json = "json" in headers.get("content-type", "")
        return Answer(response.status, headers, json.loads(text) if is_json else text)

    def complete(self, prompt: str = "hello", max_tokens: int = 4, **more: Any) -> Answer:
        """One completion, greedy and of exactly `max_tokens` tokens."""
        return self.post("/v1/completions", {**GREEDY, "prompt": prompt, "max_tokens": max_tokens, **more})

    def stream(self, timeout: float = 60.0, **body: Any) -> Iterator[Event]:
        """Events of a streamed completion; an answer without a stream is one event {"http": status, "error": ...}."""
        connection = self._connect(timeout)
        try:
            connection.request(
                "POST",
                "/v1/completions",
                json.dumps({**GREEDY, **body, "stream": True}),
                {"Content-Type": "application/json"},
            )
            response = connection.getresponse()
            if response.status != 200:
                yield Event(time.monotonic(), {"http": response.status, **json.loads(response.read())})
                return
            while line := response.readline():
                if line.startswith(b"data:"):
                    data = line[5:].strip()
                    yield Event(time.monotonic(), "[DONE]" if data == b"[DONE]" else json.loads(data))
        finally:
            connection.close()

    # --- its end

    def signal(self, number: int, pid: int | None = None) -> None:
        os.kill(self.process.pid if pid is None else pid, number)

    def wait(self, seconds: float = 60.0) -> int:
        """The exit code. AssertionError, with the log, when the server does not end."""
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the server did not end within {seconds:g} s\n{self.log[-6000:]}") from None

    def assert_nothing_left(self, seconds: float = 15.0) -> None:
        """No process of the session is alive a moment after the end; its memory has no names, so it went with them."""
        end = time.monotonic() + seconds
        while (left := self.family()) and time.monotonic() < end:
            time.sleep(0.02)
        assert not left, f"processes left: {[(p, command_line(p)) for p in left]}"

    def assert_no_names(self) -> None:
        """Nothing of the server lies in /dev/shm: all its shared memory is anonymous."""
        for pid in self.family():
            with contextlib.suppress(OSError):
                maps = pathlib.Path(f"/proc/{pid}/maps").read_text()
                assert "/dev/shm/" not in maps, f"process {pid} maps a named segment\n{maps}"
            assert not [t for t in open_files(pid) if t.startswith("/dev/shm/")]

    def end_all(self) -> None:
        """Kills whatever is left, so that a failed test leaves nothing behind."""
        for pid in self.family():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()

    def __enter__(self) -> "Server":
        return self

    def __exit__(self, kind: type | None, *_: object) -> None:
        try:
            if kind is None:
                if self.process.poll() is None:
                    self.signal(signal.SIGTERM)
                    assert self.wait() == 0, self.log[-6000:]
                self.assert_nothing_left()
        finally:
            self.end_all()


GREEDY = {"prompt": "hello", "temperature": 0, "ignore_eos": True}


class Clients:
    """Streams that run beside the test, each in a thread. `events[i]` grows while stream i runs."""

    def __init__(self, server: Server, count: int, **body: Any):
        self.server = server
        self.events: list[list[Event]] = [[] for _ in range(count)]
        self.errors: list[BaseException | None] = [None] * count
        self._threads = [threading.Thread(target=self._run, args=(i, body), daemon=True) for i in range(count)]
        for thread in self._threads:
            thread.start()

    def _run(self, i: int, body: dict) -> None:
        try:
            for event in self.server.stream(**{**body, "prompt": body.get("prompt", "hello") + f" {i}"}):
                self.events[i].append(event)
        except BaseException as e:
            self.errors[i] = e

    def wait_started(self, events: int = 3) -> None:
        """Until every stream has had so many events."""
        have = lambda: all(len(e) >= events for e in self.events)
        self.server.until(lambda: have() or not all(t.is_alive() for t in self._threads), "the streams' first events")
        assert have(), f"streams ended early: {self.events} {self.errors}\n{self.server.log[-3000:]}"

    def join(self, seconds: float = 60.0) -> None:
        end = time.monotonic() + seconds
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))
        assert not any(t.is_alive() for t in self._threads), f"streams hang\n{self.server.log[-6000:]}"

    def assert_one_error_each(self, since: float, within: float) -> None:
        """Each stream ended by one error event and nothing after it but [DONE], within `within` seconds of `since`.

        On a machine with more work than cores the time stretches accordingly.
        """
        within *= slowness()
        self.join(within + 60)
        for events, error in zip(self.events, self.errors, strict=True):
            assert error is None, f"a client saw {error!r} and no reason\n{self.server.log[-6000:]}"
            terminal = [e for e in events if e.data == "[DONE]" or is_terminal(e.data)]
            failures = [e for e in terminal if e.data != "[DONE]" and "error" in e.data]
            assert len(failures) == 1 and len([e for e in terminal if e.data != "[DONE]"]) == 1, terminal
            assert events.index(failures[0]) >= len(events) - 2, events[-3:]
            assert failures[0].data["error"]["type"] == "server_error", failures
            assert failures[0].data.get("http", 500) == 500, failures
            late = failures[0].at - since
            assert late < within, f"the end came after {late:.1f} s, due within {within:g} s\n{self.server.log[-6000:]}"


def slowness() -> float:
    """How much longer things may take here than on an idle machine."""
    return 1.0 + 2.0 * os.getloadavg()[0] / len(os.sched_getaffinity(0))


def is_terminal(data: dict) -> bool:
    """Whether an event ends its stream: an error, or a finish reason."""
    return "error" in data or any(c.get("finish_reason") for c in data.get("choices", ()))


def command_line(pid: int) -> str:
    with contextlib.suppress(OSError):
        return pathlib.Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    return ""


def open_files(pid: int) -> list[str]:
    """What the descriptors of a process point at."""
    out = []
    with contextlib.suppress(OSError):
        for fd in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                out.append(os.readlink(f"/proc/{pid}/fd/{fd}"))
    return out
