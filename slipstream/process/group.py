"""One group as the supervisor sees it: its rank processes from start to end, and the verdict when one of them fails.

Imports neither PyTorch nor the HTTP stack.
"""

import enum
import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, field

import numpy as np

from slipstream import config
from slipstream.log.caches import least
from slipstream.process.board import PHASES, Board, RankState
from slipstream.process.channel import Ring
from slipstream.process.control import Control
from slipstream.process.protocol import Begin, Fault, FromRank, Front, Loaded, Ready, Setup
from slipstream.system.child import python_environment

STACK_PRINT_S = 0.3  # ranks have this long to print their stacks before they are killed
SUM_BYTES = 4 << 20  # a rank's part of each of the two buffers that ranks sum in; larger sums go in pieces
BODY_BYTES = 6 << 20  # of a request besides its prompt: a bias for each id of a large vocabulary, a grammar
MAX_UNREAD_REPLIES = 256  # of a follower: a few times the number of entries that may lack a reply
SPANS_KEPT_S = 60.0  # spans in a flight record


class State(enum.Enum):
    STARTING = "starting"
    READY = "ready"
    POISONED = "poisoned"


@dataclass(frozen=True)
class Spec:
    """The ranks of a group and how they are started."""

    index: int
    engine: config.EngineConfig
    model_path: str
    size: int
    first_block: int  # of the board; one block per rank
    module: str = "slipstream.rank.worker"
    role: str = ""  # what a module of another kind needs to know
    descriptors: tuple[int, ...] = ()  # handed to every rank after the others


@dataclass
class Member:
    """One rank process."""

    rank: int
    process: subprocess.Popen
    control: Control
    pidfd: int
    loaded: Loaded | None = None
    ready: bool = False


@dataclass
class Group:
    """`failure` is None until the group is poisoned; then it says which rank stopped at which entry, and why."""

    spec: Spec
    board: Board
    incarnation: int = 0
    state: State = State.STARTING
    failure: str | None = None
    refused: bool = False  # the failure is a mistake of the configuration
    members: list[Member] = field(default_factory=list)
    begin: Begin | None = None
    started_ns: int = 0  # of the monotonic clock, this incarnation

    # --- start

    def start(self) -> None:
        """Starts the processes of a new incarnation. `on_message` and `check` handle the rest of the start."""
        spec = self.spec
        self.incarnation += 1
        self.started_ns = time.monotonic_ns()
        self.state, self.failure, self.refused, self.begin = State.STARTING, None, False, None
        shared = os.memfd_create("slipstream-sums", os.MFD_CLOEXEC)
        os.ftruncate(shared, 4096 + 2 * spec.size * SUM_BYTES)
        largest = 4 * (spec.engine.max_model_len or 1 << 20) + BODY_BYTES
        out = [Ring.create(2 * largest) for _ in range(spec.size - 1)]
        back = [Ring.create(MAX_UNREAD_REPLIES * (spec.engine.max_num_seqs + 64)) for _ in range(spec.size - 1)]
        self.members = []
        for rank in range(spec.size):
            self.board.clear(spec.first_block + rank)
            pairs = [fd for i in range(spec.size - 1) if rank in (0, i + 1) for fd in (*out[i], *back[i])]
            self.members.append(self._spawn(rank, [self.board.fd, shared, *pairs, *spec.descriptors]))
        for fd in (shared, *(fd for pair in out + back for fd in pair)):
            os.close(fd)

    def _spawn(self, rank: int, descriptors: list[int]) -> Member:
        spec = self.spec
        control, theirs = Control.pair(FromRank)
        process = subprocess.Popen(
            [sys.executable, "-m", spec.module, str(theirs.fileno()), str(os.getpid())],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            env=rank_environment(),
        )
        theirs.close()
        engine = config.to_json(spec.engine)
        setup = Setup(
            engine, spec.model_path, spec.index, self.incarnation, rank, spec.size, spec.first_block + rank, spec.role
        )
        if not control.send(setup, descriptors):
            self.refused = True
            self.fail(
                f"rank {rank} of {spec.size} could not be sent its configuration: it has {len(engine)} bytes and "
                f"{len(descriptors)} descriptors go with it; a --chat-template can be a file, and one group is for few ranks"
            )
        return Member(rank, process, control, os.pidfd_open(process.pid))

    # --- what happens

    def on_message(self, member: Member) -> None:
        """Reads one message of a rank."""
        got = member.control.receive()
        if got is None:
            return  # its end is seen by its pidfd
        message = got[0]
        if isinstance(message, Loaded):
            member.loaded = message
            self._agree()
        elif isinstance(message, Ready):
            member.ready = True
            if all(m.ready for m in self.members):
                self.state = State.READY
        elif isinstance(message, Fault):
            self.refused = self.refused or message.refusal
            self.fail(message.reason)

    def _agree(self) -> None:
        """Every capacity is the minimum over the ranks, agreed before the first entry."""
        loaded = [m.loaded for m in self.members]
        if any(x is None for x in loaded):
            return
        stamps = [x.stamp for x in loaded if x is not None]
        if len(set(stamps)) > 1:
            odd = next(i for i, s in enumerate(stamps) if s != stamps[0])
            self.refused = True
            self.fail(f"rank {odd} differs from rank 0 in versions or configuration: {stamps[odd]!r} against {stamps[0]!r}")
            return
        if self.begin is None:
            try:
                self.begin = Begin(least([x.limits for x in loaded if x is not None]))
            except ValueError as e:
                self.refused = True
                self.fail(str(e))
                return
            for m in self.members:
                m.control.send(self.begin)

    def on_exit(self, member: Member) -> None:
        """Fails the group after a rank process has ended by itself."""
        while self._readable(member):  # its last words
            self.on_message(member)
        if self.failure is None:
            code = member.process.wait()
            how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with {code}"
            self.fail(f"rank {member.rank} {how}; {self.where(member.rank)}")

    def _readable(self, member: Member) -> bool:
        try:
            return bool(member.control.sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT))
        except OSError:
            return False

    def check(self, timeout: float) -> None:
        """Fails the group when a rank has made no progress for `timeout` seconds. /health follows the same words."""
        if self.state is not State.READY:
            return
        now = time.monotonic_ns()
        states = [self.board.state(self.spec.first_block + m.rank) for m in self.members]
        s = min(states, key=lambda s: s.beat_ns)  # the others may stand still because this one does
        if now - s.beat_ns <= timeout * 1e9:
            hangs = any(self._step_hangs(s, now, timeout) for s in states)
            s = min(states, key=lambda s: (s.arrived, s.sums_with is not None, s.collective)) if hangs else None
        if s is not None:
            self.fail(f"rank {s.rank} has made no progress for {timeout:g} s; {self.where(s.rank)}")

    @staticmethod
    def _step_hangs(s: RankState, now: int, timeout: float) -> bool:
        return s.launched > s.arrived and now - max(s.launched_ns, s.arrived_ns) > timeout * 1e9

    def where(self, rank: int) -> str:
        """Describes where a rank stands."""
        s = self.board.state(self.spec.first_block + rank)
        return (
            f"it stood at entry {s.applied} in {s.phase}, had launched {s.launched} and settled {s.settled}, "
            f"and had entered {s.collective} collectives"
        )

    def fail(self, reason: str) -> None:
        if self.failure is None:
            self.failure = reason
            self.state = State.POISONED

    # --- end

    def give_front(self, descriptor: int) -> bool:
        """Hands the leader a stream to a front end."""
        return self.members[0].control.send(Front(), [descriptor])

    def stacks(self) -> None:
        """Asks the ranks that can run to print their stacks."""
        for m in self.members:
            if m.process.poll() is None:
                m.process.send_signal(signal.SIGUSR1)

    def kill(self) -> None:
        """Ends and reaps every rank process; afterwards nothing of this incarnation is left."""
        for m in self.members:
            if m.process.poll() is None:
                m.process.kill()
        for m in self.members:
            m.process.wait()
            os.close(m.pidfd)
            m.control.close()
        self.members = []

    def record(self, folder: pathlib.Path) -> pathlib.Path:
        """Writes every rank's flight record (words and latest spans) as JSON; returns the file.

        Raises OSError and leaves no file if it cannot be written whole. The board still has spans of the previous incarnation,
        which also counted its entries from 0. These spans are left out.
        """
        ranks = []
        for rank in range(self.spec.size):
            block = self.spec.first_block + rank
            spans = self.board.spans(block, SPANS_KEPT_S)
            spans = [flight_of(span) for span in spans[spans["start"] >= self.started_ns][-2000:]]
            ranks.append({**vars(self.board.state(block)), "spans": spans})
        file = folder / f"flight-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}-g{self.spec.index}-i{self.incarnation}.json"
        folder.mkdir(parents=True, exist_ok=True)
        draft = file.with_suffix(".draft")
        try:
            draft.write_text(json.dumps({"reason": self.failure, "ranks": ranks}))
            draft.rename(file)
        finally:
            draft.unlink(missing_ok=True)
        for old in sorted(folder.glob("flight-*.json"))[:-20]:
            old.unlink(missing_ok=True)
        return file


def flight_of(span: np.void) -> dict[str, int | str]:
    """A span in the form of a flight record. `digest` is the replica's after the last entry that the rank had answered."""
    numbers = {name: int(span[name]) for name in ("entry", "start", "end", "collective")}
    return {"phase": PHASES[span["phase"]], **numbers, "digest": f"{int(span['digest']):016x}"}


def child_environment() -> dict[str, str]:
    """The environment of ranks and front ends: that of this process without the API key."""
    return {k: v for k, v in python_environment().items() if k != "SLIPSTREAM_API_KEY"}


def rank_environment() -> dict[str, str]:
    """The environment of a rank. Variables that the caller has set are kept.

    Weights lie in huge pages where glibc can ask for them, which makes a CPU's step a seventh shorter. glibc asks for them only
    in its first arena, so a rank has no other arena. Threads that wait for each other sleep soon (`device/cpu/threads.py` says
    why). PyTorch's OpenMP would otherwise spin for milliseconds.
    """
    environment = child_environment()
    environment.setdefault("GLIBC_TUNABLES", "glibc.malloc.hugetlb=1:glibc.malloc.arena_max=1")
    environment.setdefault("GOMP_SPINCOUNT", "10000")
    return environment
