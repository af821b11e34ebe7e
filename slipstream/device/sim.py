"""The `sim` device: no arithmetic, an exact stream. A step lasts `step_us` + `token_us` per token; tokens come from a hash.

For load, protocol and fault tests at scale, and to measure the host's cost. A token depends on the request's prompt, seed,
choice and the token's position, so every mode, batch and rank gives the same ones.
"""

import ctypes
import dataclasses
import json
import os
import pathlib
import struct
import time
import zlib
from collections import deque
from collections.abc import Mapping

import numpy as np

from slipstream.config import EngineConfig
from slipstream.device.executor import Batch, Capacity, DeviceProgress, Outcome
from slipstream.errors import ConfigError
from slipstream.log.request import Request, TokenLogprobs

NO_MASKS: Mapping[int, np.ndarray] = {}
DEAD_END = "the grammar allows no token here, or finding one costs more than it may"
DEFAULT_VOCAB = 32_000
DEFAULT_MAX_LEN = 32_768
PAGE_SIZE = 16  # tokens of a page unless the user says otherwise
DEFAULT_PAGES = 65_536
PAGE_BYTES = 4096  # what a page counts for under --kv-cache-memory-bytes


class SimTokens:
    """The tokens of the `sim` device, as a function of each slot's request."""

    def __init__(self, slots: int, vocab: int):
        self.vocab = vocab
        self.base = np.zeros(slots, np.uint64)
        self.requests: dict[int, Request] = {}

    def admit(self, slot: int, request: Request) -> None:
        sampling = request.sampling
        seed = 0 if sampling.temperature == 0 else sampling.seed + 0x9E3779B9 * (sampling.choice + 1)
        self.base[slot] = (zlib.crc32(request.prompt) << 20) ^ (seed & (2**63 - 1))
        self.requests[slot] = request

    def sample(self, batch: Batch, masks: Mapping[int, np.ndarray] = NO_MASKS) -> Outcome:
        """The batch's outcome. A token that a mask forbids gives way to the next allowed id; an empty mask is a dead end."""
        rows = batch.samples
        slots = batch.slots[rows]
        x = self.base[slots] + (batch.starts[rows] + batch.counts[rows]).astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        x ^= x >> np.uint64(31)
        x *= np.uint64(0xBF58476D1CE4E5B9)
        x ^= x >> np.uint64(29)
        tokens = (x % np.uint64(self.vocab)).astype(np.int32)
        errors = {}
        if masks:
            for i, slot in enumerate(slots.tolist()):
                if slot in masks:
                    tokens[i] = self._allowed(int(tokens[i]), masks[slot])
                    if tokens[i] < 0:
                        errors[i] = DEAD_END
        logprobs = {}
        for i, slot in enumerate(slots.tolist()):
            wanted = self.requests[slot].sampling.logprobs
            if wanted >= 0:
                ids = [(int(tokens[i]) + k) % self.vocab for k in range(wanted)]
                logprobs[i] = TokenLogprobs(-1.0, 1, ids, [-1.0 - k for k in range(wanted)])
        return Outcome(batch.seq, tokens, logprobs, errors=errors)

    def _allowed(self, token: int, mask: np.ndarray) -> int:
        bits = np.unpackbits(mask.view(np.uint8), bitorder="little")[: self.vocab]
        ids = np.flatnonzero(bits)
        return int(ids[np.searchsorted(ids, token) % len(ids)]) if len(ids) else -1


class Timer:
    """A kernel timer as a descriptor, readable once a point of `time.monotonic()` has passed."""

    def __init__(self):
        self._libc = ctypes.CDLL(None, use_errno=True)
        self.fd = self._libc.timerfd_create(time.CLOCK_MONOTONIC, os.O_NONBLOCK | os.O_CLOEXEC)
        if self.fd < 0:
            raise OSError(ctypes.get_errno(), "timerfd_create")

    def set(self, at: float) -> None:
        seconds = int(at)
        value = _ITIMERSPEC.pack(0, 0, seconds, max(int((at - seconds) * 1e9), 1))
        if self._libc.timerfd_settime(self.fd, 1, value, None):
            raise OSError(ctypes.get_errno(), "timerfd_settime")

    def clear(self) -> None:
        try:
            os.read(self.fd, 8)
        except BlockingIOError:
            pass


_ITIMERSPEC = struct.Struct("@qqqq")  # interval, then value; seconds and nanoseconds each


class SimExecutor:
    """Implements `device.executor.Executor` in real time. A step's end is known when it is launched; a timer tells of it."""

    def __init__(self, config: EngineConfig, model: dict, board: DeviceProgress | None = None):
        self._step = config.sim_step_us * 1e-6
        self._token = config.sim_token_us * 1e-6
        self._vocab = int(model.get("vocab_size", DEFAULT_VOCAB))
        max_len = int(model.get("max_position_embeddings", DEFAULT_MAX_LEN))
        memory = config.kv_cache_memory_bytes
        pages = DEFAULT_PAGES if memory is None else memory // PAGE_BYTES
        if pages < 1:
            raise ConfigError(f"--kv-cache-memory-bytes {memory}: a page of the simulated device takes {PAGE_BYTES} bytes")
        spare = config.kv_offload_memory_bytes
        host_pages = pages // 4 if spare is None else spare // PAGE_BYTES
        page_size = config.block_size or PAGE_SIZE
        max_len = min(config.max_model_len or max_len, pages * page_size)
        self._capacity = Capacity(page_size, pages, config.max_num_seqs, max_len, 0, host_pages)
        self.copy_seconds = 0.0
        self._board = board
        self._queue: deque[tuple[float, float, Outcome]] = deque()  # (start, end, outcome)
        self._held: Batch | None = None
        self._free_at = 0.0
        self._timer = Timer()

    def capacity(self) -> Capacity:
        return self._capacity

    def start(self, pages: int, slots: int, max_len: int, host_pages: int = 0) -> None:
        self._tokens = SimTokens(slots, self._vocab)

    def admit(self, slot: int, request: Request) -> None:
        self._tokens.admit(slot, request)

    def offload(self, pages: tuple[int, ...], host: tuple[int, ...]) -> None:
        """Pages hold nothing here."""

    def restore(self, host: tuple[int, ...], pages: tuple[int, ...]) -> None:
        """Pages hold nothing here."""

    def launch(self, batch: Batch) -> None:
        self.launch_forward(batch)
        self.launch_sample(batch.seq, {}, frozenset())

    def launch_forward(self, batch: Batch) -> None:
        self._held = batch

    def launch_sample(self, seq: int, masks: dict[int, np.ndarray], discarded: frozenset[int]) -> None:
        batch = self._held
        assert batch is not None and batch.seq == seq
        self._held = None
        start = max(time.monotonic(), self._free_at)
        end = start + self._step + self._token * batch.tokens
        self._free_at = end
        outcome = dataclasses.replace(self._tokens.sample(batch, masks), seconds=end - start)
        self._queue.append((start, end, outcome))
        if len(self._queue) == 1:
            self._timer.set(end)

    def outcomes(self) -> list[Outcome]:
        out = []
        while self._queue and self._queue[0][1] <= time.monotonic():
            start, end, outcome = self._queue.popleft()
            out.append(outcome)
            if self._board is not None:
                self._board.device_span(int(start * 1e9), int(end * 1e9), outcome.seq)
        if out:
            self._timer.clear()
            if self._queue:
                self._timer.set(self._queue[0][1])
        return out

    def fileno(self) -> int:
        return self._timer.fd

    def close(self) -> None:
        os.close(self._timer.fd)


def sim_model(model_path: str) -> dict:
    """The model's config where it has one that is quick to read; the simulated device needs only its sizes."""
    file = pathlib.Path(model_path) / "config.json"
    if not file.is_file():
        return {}
    model = json.loads(file.read_text())
    return {**model, **model.get("text_config", {})}
