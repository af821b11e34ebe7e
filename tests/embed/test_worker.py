"""The encoder's loop by its sockets, without a model: answers, a full queue, failures, and front ends that leave."""

import socket

import msgspec
import numpy as np
import pytest

from slipstream.config import EngineConfig
from slipstream.embed.messages import Encode, Encoded, FromEncoder
from slipstream.embed.worker import Worker
from slipstream.process.board import Board
from slipstream.process.control import Control
from slipstream.process.protocol import Abort, Finished, FromRank, Front, Load, Refused, ToRank
from slipstream.system.framing import Frames, frame


class Loop:
    """A worker whose result for a text is its number of ids. `sizes`: of the batches that were computed."""

    def __init__(self, **engine):
        self.sizes: list[int] = []
        self.broken = False
        ours, theirs = Control.pair(FromRank)
        self.supervisor = ours
        self.board = Board.create(1)
        self.worker = Worker(self.encode, 1, EngineConfig(**engine), Control(theirs, ToRank), self.board.writer(0))

    def encode(self, batch):
        self.sizes.append(len(batch))
        if self.broken:
            raise RuntimeError("out of memory")
        return np.array([[len(text.ids)] for text in batch], np.float32)

    def front(self):
        ours, theirs = socket.socketpair()
        self.supervisor.send(Front(), [theirs.fileno()])
        theirs.close()
        self.worker.turn()
        return Peer(ours)


class Peer:
    def __init__(self, sock):
        self.sock, self.frames = sock, Frames()
        sock.setblocking(False)

    def send(self, *messages):
        self.sock.sendall(b"".join(frame(msgspec.msgpack.encode(m)) for m in messages))

    def got(self):
        """The messages so far, reports of the load aside."""
        try:
            data = self.sock.recv(1 << 20)
        except BlockingIOError:
            return []
        found = [msgspec.msgpack.decode(m, type=FromEncoder) for m in self.frames.feed(data)]
        return [m for m in found if not isinstance(m, Load)]


def asked(id, *lengths):
    return Encode(id, tuple(np.zeros(n, np.int32).tobytes() for n in lengths))


@pytest.fixture
def loop():
    return Loop(max_num_batched_tokens=16, max_queue=6)


def values(message):
    assert isinstance(message, Encoded)
    return np.frombuffer(message.data, np.float32).tolist()


def test_each_front_end_gets_the_answers_to_its_own_requests(loop):
    one, two = loop.front(), loop.front()
    one.send(asked(1, 3, 5))
    two.send(asked(2, 4))
    assert loop.worker.turn()
    assert [values(m) for m in one.got()] == [[3, 5]] and [values(m) for m in two.got()] == [[4]]
    assert loop.sizes == [3] and loop.board.state(0).settled == 1


def test_a_full_queue_refuses_with_429_and_takes_requests_again_when_there_is_room(loop):
    front = loop.front()
    front.send(asked(1, *[16] * 5), asked(2, 1, 1), asked(3, 1))
    loop.worker.turn()
    (refused,) = front.got()
    assert isinstance(refused, Refused) and (refused.id, refused.status) == (2, 429) and "--max-queue is 6" in refused.message
    while len(loop.worker._queue):
        loop.worker.turn()
    assert [m.id for m in front.got()] == [3, 1]
    front.send(asked(4, *[1] * 20))  # more than the queue holds, but it is empty
    loop.worker.turn()
    assert not any(isinstance(m, Refused) for m in front.got())


def test_an_aborted_request_is_not_computed(loop):
    front = loop.front()
    front.send(asked(1, 16, 16, 16), asked(2, 16))
    loop.worker.turn()
    front.send(Abort(1))
    loop.worker.turn()
    assert [m.id for m in front.got()] == [2] and not len(loop.worker._queue) and loop.sizes == [1, 1]


def test_a_batch_that_fails_ends_its_requests_with_an_error_and_no_others(loop):
    front = loop.front()
    front.send(asked(1, 16), asked(2, 16))
    loop.broken = True
    loop.worker.turn()
    loop.broken = False
    loop.worker.turn()
    failed, done = front.got()
    assert isinstance(failed, Finished) and (failed.id, failed.reason) == (1, "error") and "RuntimeError" in failed.error
    assert values(done) == [16]


@pytest.mark.parametrize("end", ["close", "nonsense"])
def test_a_front_end_that_leaves_takes_its_requests_with_it(loop, end):
    front, other = loop.front(), loop.front()
    front.send(asked(1, 16, 16))
    loop.worker.turn()
    front.sock.close() if end == "close" else front.sock.sendall(b"\xff" * 8)
    other.send(asked(2, 3))
    loop.worker.turn()
    assert [values(m) for m in other.got()] == [[3]] and len(loop.worker._queue) == 0


def test_the_loop_ends_with_its_supervisor(loop):
    loop.supervisor.close()
    assert not loop.worker.turn()
