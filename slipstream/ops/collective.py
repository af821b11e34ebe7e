"""Collectives between the ranks of a group on one machine's CPUs: sums and gathers through shared memory.

gloo costs 0.4 ms a sum there with a p99 of 7 ms, and a token needs two sums a layer; a double buffer with a flag costs
microseconds. All ranks must make the same calls with the same shapes in the same order. Every sum adds in rank order, so all
ranks hold the same bytes.
"""

import math
import mmap
import os
import select
import sys
import time
from collections.abc import Callable
from typing import Protocol

import numpy as np
import torch
from torch import Tensor


class Collective(Protocol):
    """The collective operations of a rank with its peers. `entered` counts the collectives entered so far."""

    rank: int
    size: int
    entered: int

    def all_reduce_sum(self, x: Tensor) -> Tensor:
        """Sums a contiguous tensor over the ranks, in place; returns it."""
        ...

    def all_gather(self, x: Tensor) -> Tensor:
        """[size, *x.shape], a copy, of tensors with the same shape and dtype on all ranks."""
        ...

    def all_gather_bytes(self, data: bytes) -> list[bytes]:
        """Every rank's bytes, of any length, in rank order."""
        ...


class Solo:
    """The group of one."""

    rank = 0
    size = 1
    entered = 0

    def all_reduce_sum(self, x: Tensor) -> Tensor:
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        return x.unsqueeze(0)

    def all_gather_bytes(self, data: bytes) -> list[bytes]:
        return [data]


class Abandoned(Exception):
    """`close` was called while this rank waited for its peers."""


_LINE = 64  # bytes of a rank's flag: a cache line of its own
_LOOKS = 300  # polls (a third of a millisecond) before the core is yielded, where each rank has a core
_YIELDS = 2000  # sched_yields before sleeping: some milliseconds
_REPORT_EVERY_S = 2.0  # between two lines on standard error


class SharedMemory:
    """A group over one shared anonymous file (a memfd that all ranks inherit).

    Layout: `size` flag lines, then two buffers, each with `max_bytes` for every rank. Call n uses buffer n % 2: a rank writes
    its part, raises its flag to n, and waits until all flags have reached n. Buffer n % 2 is written again in call n + 2, which
    a rank enters only after all have raised n + 1, that is after all have read the data of call n. Larger data go in pieces.

    This relies on stores becoming visible in order, as on x86. Other machines would need a barrier before the flag's store.
    """

    def __init__(self, fd: int, rank: int, size: int, max_bytes: int):
        """`fd` must hold `required_bytes(size, max_bytes)` bytes, all zero at first. It may be closed afterwards."""
        need = self.required_bytes(size, max_bytes)
        if os.fstat(fd).st_size < need:
            raise ValueError(f"the collectives' memory has {os.fstat(fd).st_size} bytes and needs {need} for {size} ranks")
        self.rank, self.size, self.entered = rank, size, 0
        self.max_bytes = _round_up(max_bytes)
        self.on_wait: Callable[[int | None], None] | None = None  # called with the awaited rank after a while, then with None
        self._map = mmap.mmap(fd, need)
        words = memoryview(self._map)[: size * _LINE].cast("q")
        self._flags = [words[r * _LINE // 8 : r * _LINE // 8 + 1] for r in range(size)]
        self._peers = [r for r in range(size) if r != rank]
        data = torch.from_numpy(np.frombuffer(self._map, np.uint8, offset=size * _LINE))
        self._data = data[: 2 * size * self.max_bytes].view(2, size, self.max_bytes)
        self._views: dict[tuple[int, torch.dtype], tuple[Tensor, Tensor]] = {}
        self._looks = _LOOKS if size <= len(os.sched_getaffinity(0)) else 1
        self._closed = False

    @staticmethod
    def required_bytes(size: int, max_bytes: int) -> int:
        return size * _LINE + 2 * size * _round_up(max_bytes)

    def close(self) -> None:
        """Makes a rank that waits here raise Abandoned."""
        self._closed = True

    def all_reduce_sum(self, x: Tensor) -> Tensor:
        if not x.numel():
            return x
        flat = x.view(-1)
        step = self.max_bytes // x.element_size()
        for piece in (flat,) if flat.numel() <= step else flat.split(step):
            parts = self._exchange(piece)
            if self.size == 2:
                torch.add(parts[0], parts[1], out=piece)
            else:
                torch.sum(parts, 0, out=piece)
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        out = torch.empty(self.size, *x.shape, dtype=x.dtype)
        if not x.numel():
            return out
        flat, into = x.contiguous().view(-1), out.view(self.size, -1)
        step = self.max_bytes // x.element_size()
        for i in range(0, flat.numel(), step):
            piece = flat[i : i + step]
            into[:, i : i + piece.numel()].copy_(self._exchange(piece))
        return out

    def all_gather_bytes(self, data: bytes) -> list[bytes]:
        lengths = self.all_gather(torch.tensor([len(data)], dtype=torch.int64)).view(-1).tolist()
        longest = max(lengths)
        if not longest:
            return [b""] * self.size
        padded = torch.frombuffer(bytearray(data.ljust(longest, b"\0")), dtype=torch.uint8)
        return [row[:n].numpy().tobytes() for row, n in zip(self.all_gather(padded), lengths, strict=True)]

    def _exchange(self, piece: Tensor) -> Tensor:
        """[size, n]: all ranks' pieces in the shared buffer; valid until the call after the next."""
        self.entered = turn = self.entered + 1
        n = piece.numel()
        key = (n << 1 | turn & 1, piece.dtype)
        views = self._views.get(key)
        if views is None:
            views = self._views[key] = self._view(turn & 1, n, piece.dtype)
        mine, parts = views
        mine.copy_(piece)
        flags = self._flags
        flags[self.rank][0] = turn
        for r in self._peers:
            if flags[r][0] < turn:
                self._wait(r, turn)
        return parts

    def _view(self, parity: int, n: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        if len(self._views) > 4096:
            self._views.clear()
        parts = self._data[parity].view(dtype)[:, :n]
        return parts[self.rank], parts

    def _wait(self, rank: int, turn: int) -> None:
        """Polls, then yields the core, then sleeps. So the wait is short while the peer computes, and cheap if it is gone."""
        flag = self._flags[rank]
        for _ in range(self._looks):
            for _ in range(8):
                if flag[0] >= turn:
                    return
            _release_interpreter()
        for _ in range(_YIELDS):
            os.sched_yield()
            _release_interpreter()
            if flag[0] >= turn:
                return
        self._wait_long(rank, turn)

    def _wait_long(self, rank: int, turn: int) -> None:
        flag, since, pause = self._flags[rank], time.monotonic(), 50e-6
        say = since + _REPORT_EVERY_S
        if self.on_wait:
            self.on_wait(rank)
        while flag[0] < turn:
            if self._closed:
                raise Abandoned(f"rank {self.rank} left collective {turn} while waiting for rank {rank}")
            time.sleep(pause)
            pause = min(pause * 1.2, 2e-3)
            now = time.monotonic()
            if now >= say:
                line = f"rank {self.rank} waits for rank {rank} in collective {turn} ({now - since:.0f} s)"
                print(f"slipstream: {line}", file=sys.stderr, flush=True)
                say = now + _REPORT_EVERY_S
        if self.on_wait:
            self.on_wait(None)


def _release_interpreter() -> None:
    """Lets the process's other threads run Python: half a microsecond, where `time.sleep(0)` takes fifty."""
    select.select((), (), (), 0)


def _round_up(n: int) -> int:
    return math.ceil(n / _LINE) * _LINE
