"""`slipstream serve voice` as a process, for the tests beside this file."""

import os
import pathlib
import signal
import socket
import subprocess
import sys
import tempfile
import time

import httpx

ROOT = pathlib.Path(__file__).parents[2]


class VoiceServer:
    def __init__(self, *args):
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            self.port = s.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        command = [sys.executable, "-m", "slipstream.cli", "serve", "voice", "--port", str(self.port), *args]
        self.log = tempfile.TemporaryFile("w+b")  # noqa: SIM115 - closed with the server
        env = {k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"}  # the placement chooses
        self.process = subprocess.Popen(command, cwd=ROOT, env=env, stdout=self.log, stderr=subprocess.STDOUT)
        self.http = httpx.Client(base_url=self.url, timeout=120)
        self.wait()

    def wait(self, seconds=240):
        """Until it is healthy."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if self.process.poll() is not None:
                raise AssertionError(self.output())
            try:
                if self.http.get("/health").status_code == 200:
                    return
            except httpx.TransportError:
                pass
            time.sleep(0.1)
        raise AssertionError("the server did not become healthy")

    def holder(self, module: str) -> int:
        """The pid of the one child that has loaded a shared object or file whose path holds `module`."""
        (pid,) = [p for p in children(self.process.pid) if module in pathlib.Path(f"/proc/{p}/maps").read_text()]
        return pid

    def close(self):
        self.http.close()
        self.process.send_signal(signal.SIGTERM)
        try:
            code = self.process.wait(40)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise
        try:
            return code, self.output()
        finally:
            self.log.close()

    def output(self) -> str:
        self.log.seek(0)
        return self.log.read().decode(errors="replace")


def children(pid: int) -> list[int]:
    return [int(p) for p in pathlib.Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
