"""The board: anonymous shared memory in which every rank shows its progress.

The supervisor creates it as a memfd, which has no name in /dev/shm, and hands the descriptor to ranks and front ends. Each rank
writes only its own block. Readers tolerate a torn record. The board outlives a `kill -9` of its writers, so it is the flight
recorder: the supervisor and `/debug/timeline` read the rings.
"""

import mmap
import os
import struct
import time
from dataclasses import dataclass

import numpy as np

STATES = ("absent", "starting", "ready", "failed")
PHASES = ("idle", "plan", "publish", "launch", "settle", "device", "wait")  # idle: the loop has not turned yet
PHASE_ID = {name: i for i, name in enumerate(PHASES)}

RING_SPANS = 8192  # spans kept per ring, a power of two
SPAN = np.dtype(
    [("start", "<i8"), ("end", "<i8"), ("entry", "<i8"), ("phase", "<i4"), ("collective", "<i4"), ("digest", "<u8")]
)
_SPAN = struct.Struct("<qqqiiQ")

# int64 words of a rank's block, by name
WORDS = (
    "pid", "group", "rank", "incarnation", "state", "weight_bytes",
    "applied",  # last entry applied
    "launched", "launched_ns",  # last entry whose step was queued, and when
    "arrived", "arrived_ns",  # last entry whose outcome has arrived
    "settled",  # last entry whose outcome was settled
    "beat_ns",  # last turn of the loop
    "phase",  # index into PHASES of what the loop is in
    "collective",  # collectives entered so far on the device; on CUDA written while a step takes long
    "waits_for",  # 1 + the rank whose answer this one waits for, 0 for none
    "sums_with",  # 1 + the rank that the device waits for in a collective, 0 for none
    "digest",
    "loop_spans", "device_spans",  # spans ever written to each ring
)  # fmt: skip
_OFFSET = {name: 8 * i for i, name in enumerate(WORDS)}
_HEAD = 4096
_BLOCK = _HEAD + 2 * RING_SPANS * SPAN.itemsize


@dataclass(frozen=True)
class RankState:
    """One rank's block, read at one moment."""

    group: int
    rank: int
    incarnation: int
    pid: int
    state: str
    weight_bytes: int
    applied: int
    launched: int
    launched_ns: int
    arrived: int
    arrived_ns: int
    settled: int
    beat_ns: int
    phase: str
    collective: int
    waits_for: int | None
    sums_with: int | None
    digest: int


class Board:
    """Shared by all processes of a server: a head of words and two rings of spans for each rank.

    Times are `time.monotonic_ns()`.
    """

    def __init__(self, fd: int):
        self.fd = fd
        self._map = mmap.mmap(fd, 0)
        self._words = memoryview(self._map).cast("q")  # one load or store each; struct clears a word before it writes it
        self.blocks = len(self._map) // _BLOCK

    @classmethod
    def create(cls, blocks: int) -> "Board":
        fd = os.memfd_create("slipstream-board", os.MFD_CLOEXEC)
        os.ftruncate(fd, blocks * _BLOCK)
        return cls(fd)

    def writer(self, block: int) -> "BoardWriter":
        return BoardWriter(self._map, block * _BLOCK)

    def clear(self, block: int) -> None:
        """Clears a dead rank's words. Its spans stay for the flight record until they are overwritten."""
        keep = (self._word(block, "loop_spans"), self._word(block, "device_spans"))
        self._map[block * _BLOCK : block * _BLOCK + 8 * len(WORDS)] = bytes(8 * len(WORDS))
        for name, value in zip(("loop_spans", "device_spans"), keep, strict=True):
            self._words[(block * _BLOCK + _OFFSET[name]) // 8] = value

    def _word(self, block: int, name: str) -> int:
        return self._words[(block * _BLOCK + _OFFSET[name]) // 8]

    def state(self, block: int) -> RankState:
        """A rank's words now; all zeros and "absent" where there is no rank."""
        w = {name: self._word(block, name) for name in WORDS}
        return RankState(
            group=w["group"],
            rank=w["rank"],
            incarnation=w["incarnation"],
            pid=w["pid"],
            state=STATES[w["state"] % len(STATES)],
            weight_bytes=w["weight_bytes"],
            applied=w["applied"],
            launched=w["launched"],
            launched_ns=w["launched_ns"],
            arrived=w["arrived"],
            arrived_ns=w["arrived_ns"],
            settled=w["settled"],
            beat_ns=w["beat_ns"],
            phase=PHASES[w["phase"] % len(PHASES)],
            collective=w["collective"],
            waits_for=w["waits_for"] - 1 if w["waits_for"] else None,
            sums_with=w["sums_with"] - 1 if w["sums_with"] else None,
            digest=w["digest"] & (2**64 - 1),
        )

    def ranks(self) -> list[RankState]:
        """Every rank that has begun and was not cleared since."""
        return [s for s in map(self.state, range(self.blocks)) if s.pid]

    def spans(self, block: int, seconds: float) -> np.ndarray:
        """Spans of the last `seconds`, a SPAN array ordered by start time, both rings together."""
        base = block * _BLOCK + _HEAD
        since = time.monotonic_ns() - int(seconds * 1e9)
        parts = []
        for i, counter in enumerate(("loop_spans", "device_spans")):
            written = min(self._word(block, counter), RING_SPANS)
            ring = np.frombuffer(self._map, SPAN, RING_SPANS, base + i * RING_SPANS * SPAN.itemsize)[:written].copy()
            parts.append(ring[(ring["end"] >= since) & (ring["end"] >= ring["start"])])
        spans = np.concatenate(parts)
        return spans[np.argsort(spans["start"], kind="stable")]


class BoardWriter:
    """Writes one rank's block. Only the loop's thread calls `span`; only the device's thread calls `device_span`."""

    def __init__(self, memory: mmap.mmap, base: int):
        self._map = memory
        self._words = memoryview(memory)[base : base + 8 * len(WORDS)].cast("q")
        self._base = base
        self._loop = self._read("loop_spans")
        self._device = self._read("device_spans")

    def _read(self, name: str) -> int:
        return self._words[_OFFSET[name] // 8]

    def begin(self, group: int, rank: int, incarnation: int) -> None:
        """Shows which rank this process is, and that it starts. The pid is written last: readers look for a pid."""
        for name, value in (("group", group), ("rank", rank), ("incarnation", incarnation)):
            self.set(name, value)
        self.set("state", STATES.index("starting"))
        self.set("pid", os.getpid())

    def set(self, name: str, value: int) -> None:
        self._words[_OFFSET[name] // 8] = value

    def set_digest(self, value: int) -> None:
        self.set("digest", value - (1 << 64) if value >= 1 << 63 else value)

    def span(self, phase: int, start: int, end: int, entry: int, digest: int = 0) -> None:
        at = self._base + _HEAD + (self._loop & (RING_SPANS - 1)) * SPAN.itemsize
        _SPAN.pack_into(self._map, at, start, end, entry, phase, self._read("collective"), digest)
        self._loop += 1
        self.set("loop_spans", self._loop)

    def device_span(self, start: int, end: int, entry: int, collective: int = 0) -> None:
        at = self._base + _HEAD + (RING_SPANS + (self._device & (RING_SPANS - 1))) * SPAN.itemsize
        _SPAN.pack_into(self._map, at, start, end, entry, PHASE_ID["device"], collective, 0)
        self._device += 1
        self.set("device_spans", self._device)
