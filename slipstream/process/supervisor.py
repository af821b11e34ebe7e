"""The supervisor: parent of all processes of a server. It starts and watches them, restarts a poisoned group, and shuts down.

It imports neither PyTorch nor the HTTP stack and holds no request. It decides only by the board and by ends of processes.
"""

import contextlib
import os
import queue
import selectors
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

from slipstream.errors import ConfigError
from slipstream.process.board import Board
from slipstream.process.control import Control
from slipstream.process.group import STACK_PRINT_S, Group, Member, Spec, State, child_environment
from slipstream.process.protocol import Attach, Down, Drain, Hello, Lost, ToSupervisor
from slipstream.system.folders import cache_folder
from slipstream.system.say import say

TICK_S = 0.1  # between looks at the board
MAX_FAILED_STARTS = 6  # starts in a row that may fail without a token served in between
BACKOFF_S = (0.0, 0.5, 1.0, 2.0, 5.0, 10.0)  # before the next start, by starts that failed in a row
SAME_SIGNAL_S = 0.0005  # requests to stop within this time count as one
EXIT_GRACE_S = 5.0  # a drained front end has this long to exit ...
FORCED_EXIT_GRACE_S = 3.0  # ... or this long after a second request to stop; its last messages may take two seconds


Deliver = Callable[[Attach, socket.socket], None]


@dataclass
class FrontEnd:
    """One front-end process. `listening` is set when it can answer requests."""

    process: subprocess.Popen
    control: Control
    pidfd: int
    listening: bool = False


class Supervisor:
    """Runs groups, and front ends where there is a server.

    `on_attach(group, socket)` and `on_down(group, reason)` serve a program that has the engine without HTTP.
    """

    def __init__(
        self,
        specs: list[Spec],
        board: Board,
        step_timeout: float,
        on_attach: Deliver | None = None,
        on_down: Callable[[Down], None] | None = None,
    ):
        self.board = board
        self.step_timeout = step_timeout
        self.groups = [Group(spec, board) for spec in specs]
        self.fronts: list[FrontEnd] = []
        self.on_attach, self.on_down = on_attach, on_down
        self.on_ready: Callable[[], None] | None = None
        self.drain_timeout = 20.0
        self.failed = {spec.index: 0 for spec in specs}  # failed starts in a row
        self.restart_at: dict[int, float] = {}
        self.code: int | None = None  # the exit code, once it is known
        self.draining_until: float | None = None
        self.hurried = False
        self._attached: dict[int, int] = {}  # group -> incarnation that front ends know of
        self._selector = selectors.DefaultSelector()
        self._asked_at = -1.0  # when `stop` was last obeyed
        self._asked: queue.SimpleQueue[Lost | None] = queue.SimpleQueue()  # None: to stop
        self._wake_read, self._wake_write = socket.socketpair()
        self._wake_read.setblocking(False)
        self._wake_write.setblocking(False)
        self._selector.register(self._wake_read, selectors.EVENT_READ, ("asked", None))

    # --- the loop

    def stop(self) -> None:
        """Asks for an orderly end. Any thread or signal handler may call it.

        The second call ends open answers with an error. The third call ends everything at once. Calls within SAME_SIGNAL_S
        count as one, because a signal may reach the process twice: by itself and through its group.
        """
        now = time.monotonic()
        if now - self._asked_at < SAME_SIGNAL_S:
            return
        self._asked_at = now
        self._ask(None)

    def reattach(self, lost: Lost) -> None:
        """Asks for a new link to a leader, for a program whose link is lost. Any thread may call it."""
        self._ask(lost)

    def _ask(self, what: Lost | None) -> None:
        self._asked.put(what)
        with contextlib.suppress(OSError):
            self._wake_write.send(b"?")

    def run(self) -> int:
        """Runs until the end; returns the exit code. No child outlives this call."""
        try:
            for group in self.groups:
                self._start(group)
            while self.code is None:
                for key, _ in self._selector.select(TICK_S):
                    self._on(*key.data)
                self._look()
            return self.code
        finally:
            self._end_all()

    def _on(self, kind: str, who) -> None:
        if kind == "asked":
            with contextlib.suppress(BlockingIOError):
                self._wake_read.recv(64)
            while not self._asked.empty():
                lost = self._asked.get()
                if lost is None:
                    self._stop_now()
                elif self.on_attach is not None:
                    self._reattach(lost, self.on_attach)
        elif kind == "rank":
            group, member = who
            group.on_message(member)
        elif kind == "rank end":
            group, member = who
            self._selector.unregister(member.pidfd)
            group.on_exit(member)
        elif kind == "front":
            got = who.control.receive()
            if got is None:
                self._selector.unregister(who.control)
            elif isinstance(got[0], Lost):
                self._reattach(got[0], self._deliver_to(who))
            else:
                who.listening = True
                self._announce()
        elif kind == "front end":
            self._front_ended(who)

    def _stop_now(self) -> None:
        if not self.fronts or self.hurried:
            self.code = 0  # no front end has requests to end, or this is the third request to stop
        elif self.draining_until is not None:
            self.hurried = True
            self._drain(0.0, FORCED_EXIT_GRACE_S)
        else:
            self._drain(self.drain_timeout, EXIT_GRACE_S)

    def _look(self) -> None:
        now = time.monotonic()
        for group in self.groups:
            was = group.state
            group.check(self.step_timeout)
            if group.failure is not None and group.members:
                self._poison(group)
            elif group.state is State.READY and group.spec.index not in self._attached:
                self._attach(group)
            elif was is State.POISONED and now >= self.restart_at.get(group.spec.index, now) and self.code is None:
                self._start(group)
        if self.draining_until is not None and (not self.fronts or now > self.draining_until):
            self.code = 0

    # --- groups

    def _start(self, group: Group) -> None:
        if self.draining_until is not None:
            return
        group.start()
        for member in group.members:
            self._selector.register(member.control, selectors.EVENT_READ, ("rank", (group, member)))
            self._selector.register(member.pidfd, selectors.EVENT_READ, ("rank end", (group, member)))

    def _attach(self, group: Group) -> None:
        self._attached[group.spec.index] = group.incarnation
        for deliver in (*(self._deliver_to(f) for f in self.fronts), *([self.on_attach] if self.on_attach else [])):
            self._link(group, deliver)
        self._announce()

    def _link(self, group: Group, deliver: Deliver) -> None:
        """Gives the leader and a front end the two ends of a new stream."""
        assert group.begin is not None
        limits = group.begin.limits
        message = Attach(group.spec.index, group.incarnation, limits.pages, limits.slots, limits.max_len)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        group.give_front(theirs.fileno())
        theirs.close()
        deliver(message, ours)

    def _reattach(self, lost: Lost, deliver: Deliver) -> None:
        """Gives a front end a new stream to a leader that still runs. For an ended one, `_poison` and `_attach` follow."""
        for group in self.groups:
            if (group.spec.index, group.incarnation) == (lost.group, lost.incarnation) and group.state is State.READY:
                say(f"a front end has lost its link to group {lost.group} and gets another")
                self._link(group, deliver)

    @staticmethod
    def _deliver_to(front: FrontEnd) -> Deliver:
        def deliver(message: Attach, sock: socket.socket) -> None:
            front.control.send(message, [sock.fileno()])
            sock.close()

        return deliver

    def _poison(self, group: Group) -> None:
        """Handles a poisoned group: informs the front ends first, keeps the evidence, ends the ranks, and plans a restart."""
        index = group.spec.index
        served = any(self.board.state(group.spec.first_block + m.rank).settled > 0 for m in group.members)
        self.failed[index] = 1 if served else self.failed[index] + 1
        wait = BACKOFF_S[min(self.failed[index] - 1, len(BACKOFF_S) - 1)]
        down = Down(index, group.incarnation, group.failure or "", 2.0 + wait)
        for front in self.fronts:
            front.control.send(down)
        if self.on_down is not None:
            self.on_down(down)
        self._attached.pop(index, None)
        say(f"group {index} is down: {group.failure}")
        if not group.refused:
            group.stacks()
            time.sleep(STACK_PRINT_S)
            try:
                say(f"flight record: {group.record(cache_folder() / 'flight')}")
            except (OSError, ConfigError) as e:
                say(f"no flight record was written: {e}")
        for member in group.members:
            self._forget(member)
        group.kill()
        if group.refused or self.failed[index] >= MAX_FAILED_STARTS:
            say("giving up" if not group.refused else "nothing was started")
            self.code = 2 if group.refused else 1
        else:
            self.restart_at[index] = time.monotonic() + wait

    def _forget(self, member: Member) -> None:
        for thing in (member.control, member.pidfd):
            try:
                self._selector.unregister(thing)
            except KeyError:
                pass

    # --- front ends

    def add_front(self, module: str, hello: Hello, descriptors: list[int]) -> None:
        """Starts a front-end process. It gets an Attach for each group when the group is ready."""
        control, theirs = Control.pair(ToSupervisor)
        process = subprocess.Popen(
            [sys.executable, "-m", module, "--control-fd", str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            env=child_environment(),
        )
        theirs.close()
        control.send(hello, descriptors)
        front = FrontEnd(process, control, os.pidfd_open(process.pid))
        self.fronts.append(front)
        self._selector.register(control, selectors.EVENT_READ, ("front", front))
        self._selector.register(front.pidfd, selectors.EVENT_READ, ("front end", front))

    def _front_ended(self, front: FrontEnd) -> None:
        self._selector.unregister(front.pidfd)
        code = front.process.wait()
        os.close(front.pidfd)
        self.fronts.remove(front)
        if self.draining_until is None:
            say(f"a front end ended with {code}; shutting down")
            self.code = 1

    def _announce(self) -> None:
        """Calls `on_ready` once, when all groups and front ends are ready."""
        if self.on_ready and all(f.listening for f in self.fronts) and len(self._attached) == len(self.groups):
            self.on_ready()
            self.on_ready = None

    def _drain(self, timeout: float, grace: float) -> None:
        self.draining_until = time.monotonic() + timeout + grace
        say("asked again: ending what still runs" if self.hurried else f"draining for up to {timeout:g} s")
        for front in self.fronts:
            front.control.send(Drain(timeout))

    def _end_all(self) -> None:
        for front in self.fronts:
            front.process.kill()
            front.process.wait()
            front.control.close()
        for group in self.groups:
            group.kill()
        self._selector.close()
