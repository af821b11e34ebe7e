"""An encoder's process: `python -m slipstream.embed.worker FD PARENT`, a child of the supervisor like a rank.

The same control socket and board as a rank's, and a stream socket to each front end. One thread: read messages, compute one
batch, send what is complete.
"""

import os
import pathlib
import select
import socket
import sys
import time
import traceback
from collections.abc import Callable

import msgspec
import numpy as np

from slipstream import config
from slipstream.embed.kinds import EncoderSpec
from slipstream.embed.messages import Encoded, FromEncoder, ToEncoder
from slipstream.embed.queue import Queue, Text
from slipstream.errors import ConfigError, ModelError
from slipstream.log.caches import Limits
from slipstream.process.board import Board, BoardWriter
from slipstream.process.control import MAX_REASON_CHARS, Control, begin_member, report_ready
from slipstream.process.protocol import Abort, Fault, Finished, Front, Load, Loaded, Refused, Setup
from slipstream.system.framing import BadFrame, Frames, frame

_IDLE_S = 1.0  # between turns when nothing comes; /health checks that turns go on
_READ_BYTES = 1 << 18
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(ToEncoder).decode


class Peer:
    """One front end."""

    def __init__(self, sock: socket.socket):
        sock.setblocking(False)
        self.sock = sock
        self.frames = Frames()
        self.out = bytearray()

    def send(self, message: FromEncoder) -> None:
        self.out += frame(_encode(message))

    def flush(self) -> None:
        try:
            while self.out:
                del self.out[: self.sock.send(self.out)]
        except BlockingIOError:
            pass
        except OSError:
            self.out.clear()  # its end is seen when it is read


class Worker:
    """The loop. `encode` computes a batch; `board` shows each as a step, so that the supervisor sees one that hangs."""

    def __init__(
        self,
        encode: Callable[[list[Text]], np.ndarray],
        width: int,
        engine: config.EngineConfig,
        control: Control,
        board: BoardWriter,
    ):
        self._encode, self._control, self._board = encode, control, board
        self._max_texts, self._max_bytes = engine.max_queue, engine.queue_memory_bytes
        self._queue = Queue(width, engine.max_num_batched_tokens, engine.max_num_seqs)
        self._peers: list[Peer] = []
        self._steps = 0
        self._idle = False  # whether the peers know that nothing runs

    def loop(self) -> None:
        turns = 0
        while self.turn():
            turns += 1
            self._board.set("applied", turns)
            self._board.set("beat_ns", time.monotonic_ns())

    def turn(self) -> bool:
        """False when the supervisor has gone."""
        readers = [self._control, *(peer.sock for peer in self._peers)]
        writers = [peer.sock for peer in self._peers if peer.out]
        readable, _, _ = select.select(readers, writers, [], 0 if len(self._queue) else _IDLE_S)
        if self._control in readable:
            got = self._control.receive()
            if got is None:
                return False
            if isinstance(got[0], Front):
                self._peers.append(Peer(socket.socket(fileno=got[1][0])))
        for peer in [peer for peer in self._peers if peer.sock in readable]:
            if not self._read(peer):
                self._queue.drop_of(peer)
                self._peers.remove(peer)
                peer.sock.close()
        batch = self._queue.take()
        if batch:
            self._step(batch)
        self._report([sum(len(text.ids) for text in batch)] if batch else [])
        for peer in self._peers:
            peer.flush()
        return True

    def _read(self, peer: Peer) -> bool:
        """Takes all that has come, since aborts and refusals must not wait for a batch. False at the peer's end."""
        try:
            while data := peer.sock.recv(_READ_BYTES):
                for message in peer.frames.feed(data):
                    self._take(peer, _decode(message))
        except BlockingIOError:
            return True
        except (OSError, BadFrame, msgspec.MsgspecError):
            return False
        return False

    def _take(self, peer: Peer, message: ToEncoder) -> None:
        if isinstance(message, Abort):
            self._queue.drop(message.id)
        elif self._queue.texts and self._queue.texts + len(message.rows) > self._max_texts:
            text = f"{self._queue.texts} texts wait already, and --max-queue is {self._max_texts}; try again later"
            peer.send(Refused(message.id, 429, text))
        elif self._queue.bytes > self._max_bytes:
            peer.send(Refused(message.id, 429, "waiting requests take --queue-memory-bytes; try again later"))
        else:
            self._queue.add(message.id, message, peer)

    def _step(self, batch: list[Text]) -> None:
        begun = time.monotonic_ns()
        self._steps += 1
        self._board.set("launched_ns", begun)
        self._board.set("launched", self._steps)
        try:
            results = self._encode(batch)
            for key, waiting in self._queue.settle(batch, results):
                waiting.owner.send(Encoded(key, waiting.results.tobytes()))  # type: ignore[arg-type]
        except (RuntimeError, MemoryError) as e:  # for instance no memory on the device: these requests end, others go on
            traceback.print_exc()
            self._fail(batch, f"the batch could not be computed: {type(e).__name__}")
        ended = time.monotonic_ns()
        for word in ("arrived", "settled"):
            self._board.set(word, self._steps)
        self._board.set("arrived_ns", ended)
        self._board.device_span(begun, ended, self._steps)

    def _fail(self, batch: list[Text], reason: str) -> None:
        for key in {text.key: None for text in batch}:
            owner = self._queue.owner_of(key)
            if owner is not None:
                self._queue.drop(key)
                owner.send(Finished(key, "error", reason))  # type: ignore[arg-type]

    def _report(self, step_tokens: list[int]) -> None:
        """Gauges after each batch, and once when nothing is left."""
        if self._idle and not step_tokens:
            return
        self._idle = not len(self._queue)
        load = Load(
            running=0,
            waiting=len(self._queue),
            pages_used=0,
            pages_total=0,
            steps={},
            host_seconds={},
            step_tokens=step_tokens,
            prefix_queries=0,
            prefix_hits=0,
            preemptions=0,
            eager_steps={},
            pages_copied={},
        )
        for peer in self._peers:
            peer.send(load)


def main(argv: list[str]) -> int:
    begun = begin_member(int(argv[0]), int(argv[1]))
    if begun is None:
        return 0
    control, setup, fds = begun
    try:
        run(control, setup, fds)
        return 0
    except (ConfigError, ModelError, MemoryError) as e:
        control.send(Fault(0, -1, str(e)[:MAX_REASON_CHARS] or "out of memory", refusal=True))
    except Exception as e:
        traceback.print_exc()
        control.send(Fault(0, -1, f"the encoder: {type(e).__name__}: {e}"[:MAX_REASON_CHARS]))
    return 1


def run(control: Control, setup: Setup, fds: list[int]) -> None:
    """Loads, reports ready, and serves front ends until the supervisor's end is closed."""
    spec = EncoderSpec.decoded(setup.role)
    assert spec is not None
    board = Board(fds[0]).writer(setup.block)
    board.begin(setup.group, setup.rank, setup.incarnation)
    from slipstream.embed.encoder import Encoder  # torch, after the board shows that the process starts

    engine = config.from_json(config.EngineConfig, setup.engine)
    encoder = Encoder(pathlib.Path(setup.model_path), spec, engine)
    board.set("weight_bytes", encoder.weight_bytes)
    control.send(Loaded(Limits((), slots=engine.max_num_seqs, max_len=spec.max_len), encoder.weight_bytes, setup.role))
    if control.receive() is None:
        return
    board.set("beat_ns", time.monotonic_ns())
    report_ready(control, board)
    Worker(encoder.encode, spec.width, engine, control, board).loop()


if __name__ == "__main__":
    os._exit(main(sys.argv[1:]))
