"""A child process for work on untrusted input: asked over its pipes, replaced when it ends or does not answer.

The child sets the limits itself (CPU time, memory), and the kernel enforces them. So they hold inside one long call of C or
Rust code too, where no check of ours would run. The way in which a child ended shows whether its work was too much (`Overrun`)
or whether it was stopped from outside (`Lost`). Only the first is the work's fault.
"""

import asyncio
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from queue import Empty, LifoQueue

from slipstream.system.child import python_environment
from slipstream.system.framing import Frames, head

# The variables that Python needs to start and to write dates; no secrets.
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
# The signals by which limits end a process: the CPU timer; no memory, or no stack, in C or Rust.
_OWN_ENDS = frozenset(
    {signal.SIGPROF, signal.SIGXCPU, signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS, signal.SIGTRAP, signal.SIGILL}
)
_PIECE_BYTES = 1 << 16  # bytes written or read at a time
_REAP_SECONDS = 1.0  # seconds that a process has to end after it has closed its pipes


class Overrun(Exception):
    """The process was ended by its limits: the work was too much."""


class Lost(Exception):
    """The process was ended or stopped from outside, or did not start: another attempt may succeed."""


class LimitedProcess:
    """`python ARGUMENTS`. Messages both ways are framed as `system.framing` says. For one thread at a time."""

    def __init__(self, *arguments: str, patience: float, env: dict[str, str] | None = None):
        """patience: seconds of wall time that an answer may take on a loaded machine. Raises Lost."""
        environment = {k: v for k, v in python_environment().items() if k in _ENVIRONMENT}
        self._patience = patience
        try:
            self._process = subprocess.Popen(
                [sys.executable, *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env={**environment, **(env or {})},
                bufsize=0,
            )
        except OSError as e:
            raise Lost(f"it could not be started: {e.strerror}") from None
        assert self._process.stdin is not None and self._process.stdout is not None
        self._into, self._out = self._process.stdin.fileno(), self._process.stdout.fileno()
        os.set_blocking(self._into, False)

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait(self) -> None:
        """Returns when the process has ended."""
        self._process.wait()

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def ask(self, *request: bytes | bytearray) -> bytes:
        """The answer to one or more messages. Raises Overrun or Lost, and then the process is closed."""
        deadline = time.monotonic() + self._patience
        try:
            for message in request:
                self._write(head(message), deadline)
                self._write(message, deadline)
            return self._read(deadline)
        except (EOFError, BrokenPipeError, TimeoutError) as e:
            raise self._ended(isinstance(e, TimeoutError)) from None

    def _write(self, data: bytes | bytearray, deadline: float) -> None:
        view = memoryview(data)
        while view:
            self._await(self._into, select.POLLOUT, deadline)
            view = view[os.write(self._into, view[:_PIECE_BYTES]) :]

    def _read(self, deadline: float) -> bytes:
        frames = Frames()
        while True:
            self._await(self._out, select.POLLIN, deadline)
            piece = os.read(self._out, _PIECE_BYTES)
            if not piece:
                raise EOFError
            for message in frames.feed(piece):
                return bytes(message)

    @staticmethod
    def _await(fd: int, what: int, deadline: float) -> None:
        poller = select.poll()
        poller.register(fd, what)
        left = deadline - time.monotonic()
        if left <= 0 or not poller.poll(left * 1000):
            raise TimeoutError

    def _ended(self, late: bool) -> Overrun | Lost:
        """The reason why there is no answer, as an exception to raise."""
        try:
            code = self._process.wait(0 if late else _REAP_SECONDS)
        except subprocess.TimeoutExpired:
            code = None
        self.close()
        if code is None:
            return Lost(f"it did not answer within {self._patience:g} s")
        if code > 0 or -code in _OWN_ENDS:
            return Overrun()
        return Lost(f"it was ended by {signal.Signals(-code).name}" if code else "it has exited")

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()


class Pool:
    """Processes of one kind, at most `count`. One is started when it is needed and all others are busy."""

    def __init__(self, name: str, count: int, start: Callable[[], LimitedProcess]):
        """start: makes a process that is ready for work; called on a thread. It may raise Lost."""
        self._start = start
        self._threads = ThreadPoolExecutor(count, name)
        self._idle: LifoQueue[LimitedProcess] = LifoQueue()

    async def ask(self, *request: bytes | bytearray) -> bytes:
        """Waits for a process, and for its answer. Raises Overrun or Lost."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, self.ask_now, *request)

    def ask_now(self, *request: bytes | bytearray) -> bytes:
        """The same, blocking; for as many threads as there may be processes."""
        process = self._take()
        try:
            answer = process.ask(*request)
        except BaseException:
            process.close()
            raise
        self._idle.put(process)
        return answer

    def _take(self) -> LimitedProcess:
        while True:
            try:
                process = self._idle.get_nowait()
            except Empty:
                return self._start()
            if process.alive:
                return process
            process.close()

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        while not self._idle.empty():
            self._idle.get().close()
