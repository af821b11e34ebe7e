"""A child process for work that came from outside: asked over its pipes, replaced when it ends or does not answer.

The limits themselves (computing time, memory) are the child's own to set, by the kernel's means: they hold inside one long call
of C or Rust code too, where no check of ours would run.
"""

import os
import select
import subprocess
import sys
import time

from slipstream.system.child import python_environment

# What Python needs to start, and what a date is written by; nothing secret.
_ENVIRONMENT = (
    "PATH",
    "PYTHONPATH",
    "PYTHONSAFEPATH",
    "PYTHONHOME",
    "VIRTUAL_ENV",
    "LD_LIBRARY_PATH",
    "LANG",
    "LC_ALL",
    "LC_TIME",
    "TZ",
)


class LimitedProcess:
    """`python ARGUMENTS`. Messages both ways are 8 bytes of length, little endian, then the bytes. For one thread at a time."""

    def __init__(self, *arguments: str, patience: float, env: dict[str, str] | None = None):
        """patience: seconds of wall time that an answer may take on a loaded machine."""
        environment = {k: v for k, v in python_environment().items() if k in _ENVIRONMENT}
        self._patience = patience
        self._process = subprocess.Popen(
            [sys.executable, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**environment, **(env or {})},
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait(self) -> None:
        """Returns when the process has ended."""
        self._process.wait()

    def ended(self) -> int | None:
        """For after `ask` gave None: the exit status (negative: by that signal), None where the process is there still."""
        try:
            return self._process.wait(0.5)  # one that has closed its pipes is about to end
        except subprocess.TimeoutExpired:
            return None

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def ask(self, request: bytes) -> bytes | None:
        """The answer, or None where the process ended or did not answer in time; it must then be closed."""
        assert self._process.stdin is not None and self._process.stdout is not None
        deadline = time.monotonic() + self._patience
        try:
            self._process.stdin.write(len(request).to_bytes(8, "little") + request)
            self._process.stdin.flush()
        except BrokenPipeError:
            return None
        fd = self._process.stdout.fileno()
        head = _read(fd, 8, deadline)
        return None if head is None else _read(fd, int.from_bytes(head, "little"), deadline)

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


def _read(fd: int, size: int, deadline: float) -> bytes | None:
    """Exactly `size` bytes, or None at the end of the pipe or the deadline."""
    data = bytearray()
    poller = select.poll()
    poller.register(fd, select.POLLIN)
    while len(data) < size:
        left = deadline - time.monotonic()
        if left <= 0 or not poller.poll(left * 1000):
            return None
        piece = os.read(fd, min(size - len(data), 1 << 20))
        if not piece:
            return None
        data += piece
    return bytes(data)
