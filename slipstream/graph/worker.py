"""A worker process: one group of components that are plain step functions. Its own process, one thread for the loop.

`python -m slipstream.graph.worker SPEC SOCKET ARENA`: a `WorkerSpec` as JSON and two inherited descriptors. It ends when the
socket does. What it imports beyond the standard library and numpy is what its components' builders import.
"""

import ctypes
import importlib
import os
import select
import signal
import socket
import sys
import time
from collections import deque
from typing import Any

import msgspec
import numpy as np

from slipstream.graph.messages import INLINE, Done, Failed, Feed, Forget, Frames, Piece, Stored, ToGroup, Up, encode, with_value
from slipstream.graph.model import Model
from slipstream.graph.work import Work
from slipstream.transport.arena import Arena
from slipstream.transport.base import TransportError, TransportFull

ROOM_WAIT = 30.0  # seconds that a piece waits for room before its request fails
FRONT = 0  # the conductor's peer number


class WorkerSpec(msgspec.Struct, frozen=True):
    """What a worker needs to know, beside its descriptors."""

    model: str  # "package.module:NAME" of the model's value
    components: tuple[str, ...]
    settings: dict[str, dict[str, Any]]  # by component; over the model's own
    peer: int
    peers: dict[str, int]  # by component: the process that holds it (the conductor's if it is not named)


def resolve(reference: str) -> Any:
    """The object that "package.module:NAME" names."""
    module, _, name = reference.partition(":")
    return getattr(importlib.import_module(module), name)


def build_steps(model: Model, components: tuple[str, ...], settings: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Each component's step function, built with its settings."""
    return {
        name: resolve(model.by_name[name].step)(**{**model.settings.get(name, {}), **settings.get(name, {})})
        for name in components
    }


class Worker:
    """The loop: read what has come, do one step, send what it made. Waits for room in the arena before it steps again."""

    def __init__(self, spec: WorkerSpec, sock: socket.socket, arena: Arena, work: Work):
        self.spec, self.sock, self.arena, self.work = spec, sock, arena, work
        self.frames = Frames(ToGroup)
        self.events: deque[Any] = deque()
        self.out = bytearray()
        self.since = 0.0  # when the first of the events began to wait

    def loop(self) -> None:
        self.sock.setblocking(False)
        while self.turn():
            pass

    def turn(self) -> bool:
        """False when the other side has gone."""
        full = self._flush()
        taken = None if self.events or len(self.out) > 1 << 20 else self.work.take()
        wait = 0 if taken else 0.002 if full else None
        readable, _, _ = select.select([self.sock], [self.sock] if self.out else [], [], wait)
        if readable and not self._read():
            return False
        if taken:
            self.work.settle(*taken, self.work.run(*taken))
        self.events += self.work.effects
        self.work.effects.clear()
        self._release()
        return True

    def _read(self) -> bool:
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
                pass  # its owner has ended, and a successor has swept it
        self.work.released.clear()

    def _flush(self) -> bool:
        """Encodes and sends. True if an event waits for room in the arena."""
        full = False
        while self.events:
            event = self.events[0]
            try:
                event = self._store(event)
            except TransportFull as e:
                if time.monotonic() - self.since < ROOM_WAIT:
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
            while self.out:
                del self.out[: self.sock.send(self.out)]
        except BlockingIOError:
            pass
        except OSError:
            self.out.clear()
        return full

    def _store(self, event: Any) -> Any:
        if not isinstance(event, Piece) or not isinstance(event.value, np.ndarray) or event.value.nbytes <= INLINE:
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


def die_with_parent() -> None:
    """Asks Linux to end this process when its parent does."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)


def main(argv: list[str]) -> int:
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    spec = msgspec.json.decode(argv[0], type=WorkerSpec)
    sock, arena = socket.socket(fileno=int(argv[1])), Arena(int(argv[2]), spec.peer)
    try:
        model = resolve(spec.model)
        work = Work(model, spec.components, build_steps(model, spec.components, spec.settings))
    except Exception as e:
        sock.sendall(encode(Up(f"{', '.join(spec.components)}: {type(e).__name__}: {e}")))
        return 1
    sock.sendall(encode(Up()))
    Worker(spec, sock, arena, work).loop()
    return 0


if __name__ == "__main__":
    os._exit(main(sys.argv[1:]))
