"""The channel between a leader and its followers: entries one way, replies the other.

On one machine each direction is a ring in anonymous shared memory with one writer and one reader, and a bell that wakes a
sleeping reader. A message is delivered whole, or the writer learns that the reader is a whole ring behind.
"""

import mmap
import os
import struct
import time

import msgspec

from slipstream.errors import Diverged, EngineDown
from slipstream.log.entries import FromFollower, ToFollower
from slipstream.system.bell import Bell

_LEN = struct.Struct("<I")
_HEAD = 128  # bytes before the data: written at 0, read at 64, each alone on its cache line
SKIP = 0xFFFFFFFF  # instead of a length: the rest of the ring is empty, go on at its start


class Ring:
    """Bytes from one process to another. The descriptors are inherited; the memory has no name."""

    def __init__(self, memory: int, event: int):
        self.memory, self.bell = memory, Bell(event)
        self._map = mmap.mmap(memory, 0)
        self._words = memoryview(self._map)[:_HEAD].cast("Q")  # one store each; struct would clear a word before it writes it
        self._size = len(self._map) - _HEAD
        self._at = 0  # own position, in bytes ever written or read

    @staticmethod
    def create(size: int) -> tuple[int, int]:
        """Descriptors (memory, event) of a new ring of at least `size` bytes."""
        memory = os.memfd_create("slipstream-ring", os.MFD_CLOEXEC)
        os.ftruncate(memory, _HEAD + (size + 7) // 8 * 8)
        return memory, Bell.create()

    def _seen(self, offset: int) -> int:
        return self._words[offset // 8]

    def put(self, message: bytes) -> bool:
        """Writes one message and wakes the reader. Returns False if there is no room yet; ValueError if it can never fit."""
        need = (4 + len(message) + 7) // 8 * 8
        if 2 * need > self._size:
            raise ValueError(f"a message of {len(message)} bytes is too large for a ring of {self._size}")
        at = self._at % self._size
        skip = self._size - at if at + need > self._size else 0
        if self._at + skip + need - self._seen(64) > self._size:
            return False
        if skip:
            _LEN.pack_into(self._map, _HEAD + at, SKIP)
            self._at += skip
            at = 0
        _LEN.pack_into(self._map, _HEAD + at, len(message))
        self._map[_HEAD + at + 4 : _HEAD + at + 4 + len(message)] = message
        self._at += need
        self._words[0] = self._at  # after the data: x86 and the interpreter's locks keep this order
        self.bell.ring()
        return True

    def get(self) -> bytes | None:
        """The next message, or None."""
        written = self._seen(0)
        if self._at == written:
            return None
        at = self._at % self._size
        length = _LEN.unpack_from(self._map, _HEAD + at)[0]
        if length == SKIP:
            self._at += self._size - at
            at = 0
            length = _LEN.unpack_from(self._map, _HEAD)[0]
        message = self._map[_HEAD + at + 4 : _HEAD + at + 4 + length]
        self._at += (4 + length + 7) // 8 * 8
        self._words[64 // 8] = self._at
        return message


class LeaderEnd:
    """The leader's side: one pair of rings per follower."""

    def __init__(self, out: list[Ring], back: list[Ring], patience: float):
        self._out, self._back = out, back
        self.patience = patience  # seconds that a follower may take to read or to answer
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(FromFollower)

    def descriptors(self) -> list[int]:
        return [ring.bell.fileno() for ring in self._back]

    def send(self, message: ToFollower) -> int:
        """Delivers to all followers; returns the encoded size. Raises Diverged if one does not read for most of `patience`."""
        data = self._encoder.encode(message)
        for i, ring in enumerate(self._out):
            if not ring.put(data):
                self._insist(i, ring, data)
        return len(data)

    def _insist(self, i: int, ring: Ring, data: bytes) -> None:
        patience = 0.8 * self.patience  # while it waits here the leader does not turn; the supervisor must not blame it first
        end = time.monotonic() + patience
        while not ring.put(data):
            if time.monotonic() > end:
                raise Diverged(f"rank {i + 1} has not read its channel for {patience:g} s", i + 1, -1)
            time.sleep(0.0005)

    def receive(self) -> list[FromFollower]:
        replies = []
        for ring in self._back:
            ring.bell.clear()
            while (data := ring.get()) is not None:
                replies.append(self._decoder.decode(data))
        return replies


class FollowerEnd:
    """A follower's side."""

    def __init__(self, into: Ring, back: Ring):
        self._in, self._back = into, back
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(ToFollower)

    def descriptors(self) -> list[int]:
        return [self._in.bell.fileno()]

    def receive(self) -> list[ToFollower]:
        self._in.bell.clear()
        messages = []
        while (data := self._in.get()) is not None:
            messages.append(self._decoder.decode(data))
        return messages

    def answer(self, reply: FromFollower) -> None:
        """Sends a reply. The ring has room for far more replies than there are unanswered entries."""
        if not self._back.put(self._encoder.encode(reply)):
            raise EngineDown("the leader has stopped reading replies")
