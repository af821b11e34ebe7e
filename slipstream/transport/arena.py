"""Tensors between processes of one machine, through one anonymous shared-memory file (a memfd).

Nothing has a name in /dev/shm, so nothing can be left behind there: the memory is freed with its last process. The file is cut
into one segment per process. Only its owner allocates in a segment, so there is no lock; a reader gives a reference back by
setting a byte of its own, and the owner collects such bytes when it needs room. Ids carry a generation, so a stale one is an
error and does not read another tensor. Only one thread of a process may use the arena at a time.

The required memory order comes from the message that carries an id (a system call on both sides).
"""

import mmap
import os
import struct
import time
from collections.abc import Sequence

import numpy as np

from slipstream.transport.base import TransportError, TransportFull
from slipstream.transport.buddy import Buddy

MAX_DIMS = 6
ENTRIES = 4096  # tensors of one segment at a time; a power of two
MAX_PEERS = 16
_SWEEP = 2 << 20  # bytes, or 256 tensors, between two collections of released blocks, so that warm blocks are used again soon
_HEAD = struct.Struct("<8sqq")
_ENTRY = struct.Struct("<QQQ8sQ6Q")  # generation (0: free), offset, nbytes, dtype, ndim, shape
_STRIDE = 96
_MAGIC = b"slpstrm1"
_PAGE = 4096
_TABLE = ENTRIES * _STRIDE
_GENERATIONS = ENTRIES * 8  # the last generation of each entry, kept over a restart of the owner
_FLAGS = ENTRIES * MAX_PEERS


class Arena:
    """One process's end of the arena. `create` makes the file; `Arena(fd, peer)` joins it as peer number `peer`.

    Joining reclaims the tensors of an earlier process with the same number; all of its ids are stale afterwards.
    """

    def __init__(self, fd: int, peer: int):
        self.fd = fd
        self.peer = peer
        self._map = mmap.mmap(fd, 0)
        magic, self.peers, self.segment_bytes = _HEAD.unpack_from(self._map, 0)
        if magic != _MAGIC or not 0 <= peer < self.peers:
            raise TransportError(f"descriptor {fd} is not an arena with a peer {peer}")
        self._span = _TABLE + _GENERATIONS + _FLAGS + self.segment_bytes
        self._buddy = Buddy(self.segment_bytes)
        self._flags = [
            np.frombuffer(self._map, np.uint8, _FLAGS, self._base(p) + _TABLE + _GENERATIONS).reshape(ENTRIES, MAX_PEERS)
            for p in range(self.peers)
        ]
        self._generations = np.frombuffer(self._map, np.uint64, ENTRIES, self._base(peer) + _TABLE)
        self._pending = np.zeros((ENTRIES, MAX_PEERS), np.uint8)  # readers whose release has not been seen
        self._live = np.zeros(ENTRIES, bool)
        self._offsets = [0] * ENTRIES
        self._entries = list(range(ENTRIES - 1, -1, -1))  # free entries
        self._extra: dict[int, int] = {}  # references of this process beyond the first
        self._unswept = 0
        self._map[self._base(peer) : self._base(peer) + _TABLE] = bytes(_TABLE)
        self._flags[peer][:] = 0

    @classmethod
    def create(cls, peers: int, segment_bytes: int = 64 << 20) -> int:
        """A new arena's descriptor, to be inherited or sent. `segment_bytes` is a power of two; pages are added on touch."""
        if not 1 <= peers <= MAX_PEERS:
            raise ValueError(f"peers: must be from 1 to {MAX_PEERS}, not {peers}")
        Buddy(segment_bytes)  # checks the size
        fd = os.memfd_create("slipstream-arena", os.MFD_CLOEXEC)
        os.ftruncate(fd, _PAGE + peers * (_TABLE + _GENERATIONS + _FLAGS + segment_bytes))
        os.pwrite(fd, _HEAD.pack(_MAGIC, peers, segment_bytes), 0)
        return fd

    def _base(self, peer: int) -> int:
        return _PAGE + peer * self._span

    @property
    def live(self) -> int:
        """This process's tensors that a reader may still read."""
        self._collect()
        return ENTRIES - len(self._entries)

    @property
    def free_bytes(self) -> int:
        self._collect()
        return self._buddy.free_bytes

    def put(self, arrays: Sequence[np.ndarray], readers: Sequence[int], wait: float = 0.0) -> list[int]:
        mask = np.zeros(MAX_PEERS, np.uint8)
        for reader in readers:
            if not 0 <= reader < self.peers:
                raise TransportError(f"reader {reader} is not one of the arena's {self.peers} peers")
            mask[reader] = 1
        if not mask.any():
            raise TransportError("a tensor needs at least one reader")
        deadline = time.monotonic() + wait
        taken: list[int] = []
        try:
            return [self._put(array, mask, deadline, taken) for array in arrays]
        except BaseException:
            for entry in taken:
                self._drop(entry)
            raise

    def _put(self, array: np.ndarray, mask: np.ndarray, deadline: float, taken: list[int]) -> int:
        if array.dtype.hasobject or array.dtype.fields or array.ndim > MAX_DIMS or len(array.dtype.str) > 8:
            raise TransportError(f"a tensor of {array.dtype} with {array.ndim} dimensions cannot be sent")
        entry, offset = self._room(array.nbytes, deadline)
        taken.append(entry)
        self._offsets[entry] = offset
        base = self._base(self.peer)
        target = np.frombuffer(self._map, np.uint8, array.nbytes, base + self._span - self.segment_bytes + offset)
        np.copyto(target.view(array.dtype).reshape(array.shape) if array.nbytes else target, array if array.nbytes else target)
        generation = int(self._generations[entry]) % 0xFFFFFFFF + 1
        self._generations[entry] = generation
        self._flags[self.peer][entry] = 0
        self._pending[entry] = mask
        shape = array.shape + (0,) * (MAX_DIMS - array.ndim)
        _ENTRY.pack_into(
            self._map, base + entry * _STRIDE, generation, offset, array.nbytes, array.dtype.str.encode(), array.ndim, *shape
        )
        return self.peer << 48 | entry << 32 | generation

    def _room(self, nbytes: int, deadline: float) -> tuple[int, int]:
        """A free entry and a block. Waits for readers until the deadline."""
        if nbytes > self.segment_bytes:
            raise TransportError(f"a tensor of {nbytes} bytes is larger than a segment of {self.segment_bytes}")
        self._unswept += nbytes + _SWEEP // 256
        if self._unswept >= _SWEEP:
            self._collect()
        pause = 20e-6
        while True:
            offset = self._buddy.alloc(nbytes) if self._entries else None
            if offset is None:
                self._collect()
                offset = self._buddy.alloc(nbytes) if self._entries else None
            if offset is not None:
                entry = self._entries.pop()
                self._live[entry] = True
                return entry, offset
            if time.monotonic() >= deadline:
                held = ENTRIES - len(self._entries)
                raise TransportFull(
                    f"no room for {nbytes} bytes: {held} tensors are unread, {self._buddy.free_bytes} bytes free"
                )
            time.sleep(pause)
            pause = min(2 * pause, 2e-3)

    def _collect(self) -> None:
        self._unswept = 0
        unread = self._pending.view(np.uint64) & ~self._flags[self.peer].view(np.uint64)  # bytes of 0 and 1, eight at a time
        for entry in np.flatnonzero(self._live & ((unread[:, 0] | unread[:, 1]) == 0)):
            self._drop(int(entry))

    def _drop(self, entry: int) -> None:
        at = self._base(self.peer) + entry * _STRIDE
        self._map[at : at + 8] = bytes(8)
        self._pending[entry] = 0
        self._live[entry] = False
        self._buddy.free(self._offsets[entry])
        self._entries.append(entry)

    def _find(self, id: int) -> tuple[int, int, tuple]:
        """(owner, entry, fields) of an id that is live, else raises."""
        owner, entry, generation = id >> 48, id >> 32 & 0xFFFF, id & 0xFFFFFFFF
        if not (0 <= owner < self.peers and entry < ENTRIES and generation):
            raise TransportError(f"{id} is not a tensor id")
        fields = _ENTRY.unpack_from(self._map, self._base(owner) + entry * _STRIDE)
        if fields[0] != generation or self._flags[owner][entry, self.peer]:
            raise TransportError(f"tensor {id} was released")
        return owner, entry, fields

    def get(self, ids: Sequence[int]) -> list[np.ndarray]:
        out = []
        for id in ids:
            owner, _, (_, offset, nbytes, dtype, ndim, *shape) = self._find(id)
            raw = np.frombuffer(self._map, np.uint8, nbytes, self._base(owner) + self._span - self.segment_bytes + offset)
            array = raw.view(np.dtype(dtype.rstrip(b"\0").decode())) if nbytes else np.empty(0, dtype.rstrip(b"\0").decode())
            array = array.reshape(shape[:ndim])
            array.flags.writeable = False
            out.append(array)
        return out

    def retain(self, ids: Sequence[int]) -> None:
        for id in ids:
            self._find(id)
        for id in ids:
            self._extra[id] = self._extra.get(id, 0) + 1

    def release(self, ids: Sequence[int]) -> None:
        found = [self._find(id) for id in ids]
        for id, (owner, entry, _) in zip(ids, found, strict=True):
            extra = self._extra.pop(id, 0)
            if extra > 1:
                self._extra[id] = extra - 1
            if not extra:
                self._flags[owner][entry, self.peer] = 1

    def forget(self, peer: int) -> None:
        self._pending[:, peer] = 0
        self._collect()
