"""A worker process: one group of components that are plain step functions. One thread for the loop.

`python -m slipstream.graph.worker FD PARENT`, a child of the supervisor like a rank: the same control socket and messages, with
a `WorkerSpec` as the setup's role and the arena as its last descriptor. What it imports beyond the standard library and numpy
is what its components' builders import.
"""

import os
import select
import socket
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np

from slipstream.errors import ConfigError, ModelError
from slipstream.graph.messages import (
    INLINE_BYTES,
    ROOM_WAIT_SECONDS,
    Done,
    Failed,
    Feed,
    Forget,
    Frames,
    Piece,
    Stored,
    ToGroup,
    encode,
    with_value,
)
from slipstream.graph.model import Model
from slipstream.graph.placement import resolve
from slipstream.graph.rows import Row
from slipstream.graph.work import Work
from slipstream.log.caches import Limits
from slipstream.process.board import Board, BoardWriter
from slipstream.process.control import MAX_REASON_CHARS, Control, begin_member, report_ready
from slipstream.process.protocol import Fault, Front, Loaded, Setup
from slipstream.transport.arena import Arena
from slipstream.transport.base import TransportError, TransportFull

FRONT = 0  # the conductor's peer number

NO_CACHE = Limits((), slots=0, max_len=0)  # a worker of components does not take part in a log


class WorkerSpec(msgspec.Struct, frozen=True):
    """A worker's configuration, besides its descriptors."""

    model: str  # "package.module:NAME" of the model's value
    components: tuple[str, ...]
    settings: dict[str, dict[str, Any]]  # by component; these override the model's
    peer: int
    peers: dict[str, int]  # by component: the process that holds it (default: the conductor's)
    threads: int = 1  # threads of the arithmetic libraries


def build_steps(model: Model, components: tuple[str, ...], settings: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Each component's step function, built with its settings."""
    return {
        name: resolve(model.by_name[name].step)(**{**model.settings.get(name, {}), **settings.get(name, {})})
        for name in components
    }


class Worker:
    """The loop: read messages, do one step, send its outputs. Waits for room in the arena before the next step.

    One front end at a time: a new one begins with no requests. `board` shows the loop's beat, and each step as launched,
    arrived and settled, so that the supervisor sees a step that hangs.
    """

    def __init__(self, spec: WorkerSpec, control: Control, arena: Arena, make_work: Callable[[], Work], board: BoardWriter):
        self.spec, self.control, self.arena, self.board = spec, control, arena, board
        self.make_work = make_work
        self.sock: socket.socket | None = None
        self.steps = 0
        self._begin(None)

    def _begin(self, sock: socket.socket | None) -> None:
        if self.sock:
            self.sock.close()
        if sock:
            sock.setblocking(False)
        self.sock, self.work, self.frames = sock, self.make_work(), Frames(ToGroup)
        self.events: deque[Any] = deque()
        self.out = bytearray()
        self.since = 0.0  # when the first of the events began to wait

    def loop(self) -> None:
        turns = 0
        while self.turn():
            turns += 1
            self.board.set("applied", turns)  # like an idle leader's empty entries: /health checks progress
            self.board.set("beat_ns", time.monotonic_ns())

    def turn(self) -> bool:
        """False when the supervisor has gone."""
        full = self._flush()
        taken = None if self.events or len(self.out) > 1 << 20 else self.work.take()
        wait = 0 if taken else 0.002 if full else 1.0
        readers = [self.control, self.sock] if self.sock else [self.control]
        writers = [self.sock] if self.sock and self.out else []
        readable, _, _ = select.select(readers, writers, [], wait)
        if self.control in readable:
            got = self.control.receive()
            if got is None:
                return False
            if isinstance(got[0], Front):
                self._begin(socket.socket(fileno=got[1][0]))
                return True
        if self.sock in readable and not self._read():
            self._begin(None)
            return True
        if taken:
            self._step(*taken)
        self.events += self.work.effects
        self.work.effects.clear()
        self._release()
        return True

    def _step(self, name: str, rows: list[Row]) -> None:
        begun = time.monotonic_ns()
        self.steps += 1
        self.board.set("launched_ns", begun)
        self.board.set("launched", self.steps)
        self.work.settle(rows, self.work.run(name, rows))
        ended = time.monotonic_ns()
        for word in ("arrived", "settled"):
            self.board.set(word, self.steps)
        self.board.set("arrived_ns", ended)
        self.board.device_span(begun, ended, self.steps)

    def _read(self) -> bool:
        assert self.sock
        try:
            data = self.sock.recv(1 << 18)
        except BlockingIOError:
            return True
        except OSError:
            return False
        for message in self.frames.feed(data):
            if isinstance(message, Forget):
                self.arena.forget(message.peer)
            elif isinstance(message, Feed) and isinstance(message.value, Stored):
                self._feed(message, message.value.id)
            else:
                self.work.on(message)
        return bool(data)

    def _feed(self, message: Feed, id: int) -> None:
        try:
            (value,) = self.arena.get([id])
        except TransportError as e:
            self.work.fail(message.id, self.spec.components[0], str(e))
            return
        self.work.on(with_value(message, value, id))

    def _release(self) -> None:
        for id in self.work.released:
            try:
                self.arena.release([id])
            except TransportError:
                pass  # its owner has ended, and a successor has reclaimed it
        self.work.released.clear()

    def _flush(self) -> bool:
        """Encodes and sends. True if an event waits for room in the arena."""
        full = False
        while self.events:
            event = self.events[0]
            try:
                event = self._store(event)
            except TransportFull as e:
                if time.monotonic() - self.since < ROOM_WAIT_SECONDS:
                    full = True
                    break
                event = self._give_up(event, e)
            except TransportError as e:
                event = self._give_up(event, e)
            self.since = time.monotonic()
            self.events.popleft()
            if event is None:
                continue
            self.out += encode(event)
        try:
            while self.out and self.sock:
                del self.out[: self.sock.send(self.out)]
        except BlockingIOError:
            pass
        except OSError:
            self.out.clear()
        return full

    def _store(self, event: Any) -> Any:
        if not isinstance(event, Piece) or not isinstance(event.value, np.ndarray) or event.value.nbytes <= INLINE_BYTES:
            return event
        reader = self.spec.peers.get(event.to, FRONT)
        return with_value(event, Stored(self.arena.put([event.value], [reader])[0]))

    def _give_up(self, event: Any, error: TransportError) -> None:
        """The piece is not sent, and its request, if it has not ended yet, fails."""
        if event.id in self.work.requests:
            self.work.fail(event.id, self.spec.components[0], str(error))
            self.events += self.work.effects
            self.work.effects.clear()
            return
        for i, later in enumerate(self.events):
            if isinstance(later, Done) and later.id == event.id:
                self.events[i] = Failed(event.id, self.spec.components[0], str(error))


def main(argv: list[str]) -> int:
    begun = begin_member(int(argv[0]), int(argv[1]))
    if begun is None:
        return 0
    control, setup, fds = begun
    try:
        return run(control, setup, fds)
    except (ConfigError, ModelError) as e:
        control.send(Fault(0, -1, str(e)[:MAX_REASON_CHARS], refusal=True))
    except Exception as e:
        traceback.print_exc()
        control.send(Fault(0, -1, f"{setup.role[:200]}: {type(e).__name__}: {e}"[:MAX_REASON_CHARS]))
    return 1


def run(control: Control, setup: Setup, fds: list[int]) -> int:
    """Loads, reports ready, and serves front ends until the supervisor's end is closed."""
    spec = msgspec.json.decode(setup.role, type=WorkerSpec)
    board = Board(fds[0]).writer(setup.block)
    board.begin(setup.group, setup.rank, setup.incarnation)
    for library in ("OMP", "MKL"):
        os.environ[f"{library}_NUM_THREADS"] = str(spec.threads)  # read when the components' builders import them
    model = resolve(spec.model)
    steps = build_steps(model, spec.components, spec.settings)
    arena = Arena(fds[-1], spec.peer)
    control.send(Loaded(NO_CACHE, weight_bytes=0, stamp=",".join(spec.components)))
    if control.receive() is None:
        return 0
    board.set("beat_ns", time.monotonic_ns())
    report_ready(control, board)
    Worker(spec, control, arena, lambda: Work(model, spec.components, steps), board).loop()
    return 0


if __name__ == "__main__":
    os._exit(main(sys.argv[1:]))
