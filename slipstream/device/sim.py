"""The `sim` device: no arithmetic, an exact stream. A step lasts `step_us` + `token_us` per token; tokens come from a hash.

For load, protocol and fault tests at scale, and to measure the host's cost. A token depends on the request's prompt, seed,
choice and the token's position, so every mode, batch and rank gives the same ones.
"""

import json
import os
import pathlib
import threading
import time
import zlib
from collections import deque

import numpy as np

from slipstream.config import EngineConfig
from slipstream.device.executor import Batch, Capacity, Outcome
from slipstream.log.request import Request, TokenLogprobs
from slipstream.rank.board import BoardWriter

DEFAULT_VOCAB = 32_000
DEFAULT_MAX_LEN = 32_768
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

    def sample(self, batch: Batch) -> Outcome:
        rows = batch.samples
        slots = batch.slots[rows]
        x = self.base[slots] + (batch.starts[rows] + batch.counts[rows]).astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        x ^= x >> np.uint64(31)
        x *= np.uint64(0xBF58476D1CE4E5B9)
        x ^= x >> np.uint64(29)
        tokens = (x % np.uint64(self.vocab)).astype(np.int32)
        logprobs = {}
        for i, slot in enumerate(slots.tolist()):
            wanted = self.requests[slot].sampling.logprobs
            if wanted >= 0:
                ids = [(int(tokens[i]) + k) % self.vocab for k in range(wanted)]
                logprobs[i] = TokenLogprobs(-1.0, 1, ids, [-1.0 - k for k in range(wanted)])
        return Outcome(batch.seq, tokens, logprobs)


class SimExecutor:
    """Implements `device.executor.Executor` in real time; one thread tells when steps end."""

    def __init__(self, config: EngineConfig, model: dict, board: BoardWriter | None = None):
        self._step = config.sim_step_us * 1e-6
        self._token = config.sim_token_us * 1e-6
        self._vocab = int(model.get("vocab_size", DEFAULT_VOCAB))
        max_len = int(model.get("max_position_embeddings", DEFAULT_MAX_LEN))
        memory = config.kv_cache_memory_bytes
        pages = DEFAULT_PAGES if memory is None else memory // PAGE_BYTES
        self._capacity = Capacity(pages, config.max_num_seqs, config.max_model_len or max_len, 0)
        self._board = board
        self._queue: deque[tuple[float, float, Outcome]] = deque()  # (start, end, outcome)
        self._held: Batch | None = None
        self._free_at = 0.0
        self._event = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._changed = threading.Condition()
        self._told = 0  # steps of the queue whose end was told
        self._closed = False

    def capacity(self) -> Capacity:
        return self._capacity

    def start(self, pages: int, slots: int, max_len: int) -> None:
        self._tokens = SimTokens(slots, self._vocab)
        threading.Thread(target=self._tell, name="sim", daemon=True).start()

    def admit(self, slot: int, request: Request) -> None:
        self._tokens.admit(slot, request)

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
        with self._changed:
            self._queue.append((start, end, self._tokens.sample(batch)))
            self._changed.notify()

    def _tell(self) -> None:
        """Signals the descriptor at the end of each step."""
        while True:
            with self._changed:
                while self._told >= len(self._queue) and not self._closed:
                    self._changed.wait()
                if self._closed:
                    return
                end = self._queue[self._told][1]
                self._told += 1
            time.sleep(max(0.0, end - time.monotonic()))
            os.eventfd_write(self._event, 1)

    def outcomes(self) -> list[Outcome]:
        try:
            os.eventfd_read(self._event)
        except BlockingIOError:
            pass
        out = []
        now = time.monotonic()
        with self._changed:
            while self._queue and self._told and self._queue[0][1] <= now:
                start, end, outcome = self._queue.popleft()
                self._told -= 1
                out.append(outcome)
                if self._board is not None:
                    self._board.device_span(int(start * 1e9), int(end * 1e9), outcome.seq)
        return out

    def fileno(self) -> int:
        return self._event

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify()


def sim_model(model_path: str) -> dict:
    """The model's config where it has one that is quick to read; the simulated device needs only its sizes."""
    file = pathlib.Path(model_path) / "config.json"
    if not file.is_file():
        return {}
    model = json.loads(file.read_text())
    return {**model, **model.get("text_config", {})}
