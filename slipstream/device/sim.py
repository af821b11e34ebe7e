"""The `sim` device: no arithmetic, an exact stream. A step lasts `step_us` + `token_us` per token; tokens come from a hash.

It is for load, protocol and fault tests at scale, and for measuring the host's cost. A token depends only on the request's
prompt, seed and choice, and on the token's position. So every mode, batch and rank gives the same tokens.
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
from slipstream.log.caches import Limits, TableLimits
from slipstream.log.request import Request, TokenLogprobs

NO_MASKS: Mapping[int, np.ndarray] = {}
DEAD_END = "the grammar allows no token here, or finding one costs more than it may"
DEFAULT_VOCAB = 32_000
DEFAULT_MAX_LEN = 32_768
PAGE_SIZE = 16  # tokens of a page unless the user says otherwise
DEFAULT_PAGES = 65_536
PAGE_BYTES = 4096  # of a page, as --kv-cache-memory-bytes counts them
SNAPSHOTS = 64  # of per-slot state, where the simulated model has any
RIGHT_DRAFT_SHARE = 0.7  # share of a draft's positions at which it is right

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def _mixed(x: np.ndarray) -> np.ndarray:
    """Spreads the bits of uint64 numbers (the finalizer of splitmix64, shortened)."""
    x = x ^ (x >> np.uint64(31))
    x = x * np.uint64(0xBF58476D1CE4E5B9)
    return x ^ (x >> np.uint64(29))


class SimTokens:
    """The tokens and drafts of the `sim` device, as a function of each slot's request and of positions.

    A draft is right or wrong by a hash of the request and its position, so neither a token nor, at one width, an accepted count
    depends on mode, batch or rank. `length` is the device's own count of known tokens: the truth where drafts are in flight.
    """

    def __init__(self, slots: int, vocab: int, ahead: int = 0):
        """`ahead`: drafts that the device makes for a slot's next row."""
        self.vocab = vocab
        self.ahead = ahead
        self.base = np.zeros(slots, np.uint64)
        self.length = np.zeros(slots, np.int64)
        self.limit = np.zeros(slots, np.int64)
        self.wanted = np.full(slots, -1)  # log probabilities
        self.requests: dict[int, Request] = {}

    def init_slot(self, slot: int, request: Request) -> None:
        sampling = request.sampling
        seed = 0 if sampling.temperature == 0 else sampling.seed + 0x9E3779B9 * (sampling.choice + 1)
        self.base[slot] = (zlib.crc32(request.prompt) << 20) ^ (seed & (2**63 - 1))
        self.length[slot] = request.prompt_len
        self.limit[slot] = request.prompt_len + request.max_tokens
        self.wanted[slot] = sampling.logprobs
        self.requests[slot] = request

    def draw(self, slots: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """int32: the token of each slot at each position, before masks."""
        return (_mixed(self.base[slots] + positions.astype(np.uint64) * _GOLDEN) % np.uint64(self.vocab)).astype(np.int32)

    def drafts(self, slots: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """int32: the draft for each slot at each position: the drawn token if the draft is right, else the next id."""
        hashed = _mixed(_mixed(self.base[slots] ^ _GOLDEN) + positions.astype(np.uint64) * _GOLDEN)
        wrong = hashed % np.uint64(1000) >= np.uint64(int(RIGHT_DRAFT_SHARE * 1000))
        return (self.draw(slots, positions) + wrong) % np.int32(self.vocab)

    def sample(self, batch: Batch, masks: Mapping[int, np.ndarray] = NO_MASKS) -> Outcome:
        """The batch's outcome. Moves `length` past the accepted tokens.

        A token that a mask forbids is replaced by the next allowed id. A row is a dead end if its first mask is empty.
        """
        judged = batch.judged
        slots, sampled = batch.slots[judged].astype(np.intp), batch.sampled[judged]
        first = self.length[slots]
        if batch.width <= 1:
            tokens, accepted = self.draw(slots, first)[:, None], np.ones(len(slots), np.int32)
            if masks:
                self._mask(slots, tokens, masks)
        else:
            tokens, accepted = self._verify(slots, sampled, first, masks)
        self.length[slots] += accepted
        errors = {i: DEAD_END for i in np.flatnonzero(tokens[:, 0] < 0).tolist()} if masks else {}
        drafts = self._sent_home(slots)
        found = self._logprobs(slots, tokens, accepted)
        verified = sampled - 1 if batch.width > 1 else None
        return Outcome(batch.seq, tokens, accepted, found, errors=errors, drafts=drafts, verified=verified)

    def _verify(
        self, slots: np.ndarray, sampled: np.ndarray, first: np.ndarray, masks: Mapping[int, np.ndarray]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Tokens [rows, width], and each row's accepted count: the drafts that equal the drawn tokens, and the token after."""
        places = np.arange(int(sampled.max(initial=1)))
        positions = first[:, None] + places
        rows = np.broadcast_to(slots[:, None], positions.shape)
        tokens = self.draw(rows, positions)
        if masks:
            self._mask(slots, tokens, masks)
        right = (tokens == self.drafts(rows, positions)) & (tokens >= 0)
        right &= places < np.minimum(sampled, self.limit[slots] - first)[:, None] - 1
        accepted = (1 + np.cumprod(right, axis=1).sum(axis=1)).astype(np.int32)
        dead = (
            tokens[np.arange(len(slots)), accepted - 1] < 0
        )  # behind a right draft: the next row meets it again, as its first
        return tokens, accepted - (dead & (accepted > 1)).astype(np.int32)

    def _mask(self, slots: np.ndarray, tokens: np.ndarray, masks: Mapping[int, np.ndarray]) -> None:
        for i, slot in enumerate(slots.tolist()):
            for j, mask in enumerate(masks.get(slot, ())):
                tokens[i, j] = self._allowed(int(tokens[i, j]), mask)

    def _sent_home(self, slots: np.ndarray) -> dict[int, tuple[int, ...]]:
        """The drafts of the next rows of slots with a grammar, as many as the device makes."""
        if self.ahead == 0:
            return {}
        bound = [s for s in slots.tolist() if self.requests[s].grammar]
        ahead = np.arange(self.ahead)
        return {s: tuple(self.drafts(np.full(self.ahead, s), self.length[s] + ahead).tolist()) for s in bound}

    def _logprobs(self, slots: np.ndarray, tokens: np.ndarray, accepted: np.ndarray) -> dict[tuple[int, int], TokenLogprobs]:
        found: dict[tuple[int, int], TokenLogprobs] = {}
        for i in np.flatnonzero(self.wanted[slots] >= 0).tolist():
            wanted = int(self.wanted[slots[i]])
            for j in range(int(accepted[i])):
                ids = [(int(tokens[i, j]) + k) % self.vocab for k in range(wanted)]
                found[i, j] = TokenLogprobs(-1.0, 1, ids, [-1.0 - k for k in range(wanted)])
        return found

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
    """Implements `device.executor.Executor` in real time. A step's end is known when it is launched; a timer reports it."""

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
        if config.sim_snapshot_tokens % page_size:
            raise ConfigError(
                f"--sim-snapshot-tokens {config.sim_snapshot_tokens} is not a multiple of the page size, {page_size}"
            )
        windows = (0, config.sim_window) if config.sim_window else (0,)
        self._limits = Limits(
            tables=tuple(TableLimits(pages, window, host_pages) for window in windows),
            slots=config.max_num_seqs,
            max_len=min(config.max_model_len or max_len, pages * page_size),
            page_size=page_size,
            caching=config.enable_prefix_caching,
            snapshots=SNAPSHOTS if config.sim_snapshot_tokens else 0,
            snapshot_tokens=config.sim_snapshot_tokens,
            width=1 + config.sim_drafts,
        )
        self.copy_seconds = 0.0
        self.eager_steps: dict[str, int] = {}
        self._board = board
        self._queue: deque[tuple[float, float, Outcome]] = deque()  # (start, end, outcome)
        self._held: Batch | None = None
        self._free_at = 0.0
        self._timer = Timer()

    def capacity(self) -> Capacity:
        return Capacity(self._limits, 0)

    def start(self, limits: Limits) -> None:
        self._tokens = SimTokens(limits.slots, self._vocab, limits.width - 1)

    def init_slot(self, slot: int, request: Request) -> None:
        self._tokens.init_slot(slot, request)

    def set_state(self, slot: int, snapshot: int) -> None:
        """Slots have no state here."""

    def offload(self, table: int, pages: tuple[int, ...], host: tuple[int, ...]) -> None:
        """Pages hold nothing here."""

    def restore(self, table: int, host: tuple[int, ...], pages: tuple[int, ...]) -> None:
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
    """The model's config if it is quick to read. The simulated device needs only its sizes."""
    file = pathlib.Path(model_path) / "config.json"
    if not file.is_file():
        return {}
    model = json.loads(file.read_text())
    return {**model, **model.get("text_config", {})}
