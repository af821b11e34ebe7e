"""The CPU executor: one worker thread per rank is its in-order stream (docs/design.md, "The device").

Calls only put work into a queue. Only the worker thread touches the model, the cache and the slot tables. A bell announces
outcomes.
"""

import collections
import concurrent.futures
import queue
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from slipstream.config import EngineConfig
from slipstream.device.cpu.drafts import accept, make_proposer
from slipstream.device.cpu.memory import cache_memory, page_arrays, resolve_dtype, threads_per_rank
from slipstream.device.cpu.tables import PlacedRows, SlotTables
from slipstream.device.cpu.threads import Crew
from slipstream.device.executor import Batch, Capacity, DeviceProgress, Outcome, StepFailed
from slipstream.device.memory import MAX_PAGES, CacheNeeds, cache_dtype
from slipstream.device.state import SlotState
from slipstream.errors import ConfigError
from slipstream.log.caches import Limits, window_of, windows
from slipstream.log.request import Request, TokenLogprobs
from slipstream.models.registry import build
from slipstream.ops.collective import Collective
from slipstream.ops.cpu.ops import PlainOps
from slipstream.ops.cpu.paged import PagedStep, build_step
from slipstream.ops.cpu.rewind import rewind
from slipstream.ops.interface import JudgedRows
from slipstream.ops.sampler import Sampled, Sampler, SampleRow
from slipstream.shard import Shard
from slipstream.system.bell import Bell

T = TypeVar("T")
PAGE_SIZE = 16  # tokens of a page unless the user says otherwise
_PROMPT_ROWS = 64  # positions whose whole logits are held at once for prompt log probabilities


class CpuExecutor:
    """A `device.executor.Executor`. Loads the rank's part of the model when made."""

    def __init__(
        self, checkpoint: Any, config: EngineConfig, shard: Shard, collective: Collective, board: DeviceProgress | None = None
    ):
        """Raises ModelError for a model that cannot be built and ConfigError for a length beyond the model's own."""
        self.config, self.shard, self.collective, self.board = config, shard, collective, board
        self.page_size = config.block_size or PAGE_SIZE
        self.threads = threads_per_rank(shard.size)
        self.dtype = resolve_dtype(config.dtype)
        self.cache_dtype = cache_dtype(config.kv_cache_dtype, self.dtype)
        self.ops = PlainOps(self.dtype, shard, collective)
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="cpu-stream", daemon=True)
        self._thread.start()
        self.model = self._call(lambda: build(checkpoint, self.ops, config.max_model_len, config.model_impl))
        if config.max_model_len and config.max_model_len > self.model.max_len:
            raise ConfigError(f"--max-model-len {config.max_model_len} is more than the model's own {self.model.max_len}")
        self.sampler = Sampler(collective, self.model.vocab)
        self._arrived: collections.deque[Outcome] = collections.deque()
        self._failure: str | None = None
        self._pending: _Pending | None = None
        self.eager_steps: dict[str, int] = {}
        self._bell = Bell()

    def capacity(self) -> Capacity:
        c = self.config
        needs = CacheNeeds(
            self.model.caches, self.cache_dtype, self.page_size, c.max_num_seqs, c.max_model_len or self.model.max_len
        )
        given = c.kv_cache_memory_bytes
        most = needs.slots * -(-needs.max_len // self.page_size) if given is None else MAX_PAGES
        memory = cache_memory(needs, self.shard.size, given)
        limits = needs.limits(memory, most, c.enable_prefix_caching, c.kv_offload_memory_bytes)
        return Capacity(limits._replace(width=1 + c.most_drafts), self.ops.weight_bytes)

    def start(self, limits: Limits) -> None:
        layouts = self.model.caches
        self.tables = SlotTables(limits, limits.width - 1)
        self.proposer = make_proposer(self.config.speculative_method, self.tables)
        self.windows = windows(layouts)
        self.state = SlotState(layouts, limits.slots, limits.snapshots, self.ops.device)
        self.caches: list[tuple[Tensor, ...]] = []  # by layer
        self._pages: list[_PageArrays] = [_PageArrays([], []) for _ in limits.tables]
        for i, layout in enumerate(layouts):
            window = window_of(layout)
            if window is None:
                self.caches.append(self.state.arrays.get(i, ()))
                continue
            table = self.windows.index(window)
            sizes = limits.tables[table].pages + 1, limits.tables[table].host_pages
            device, host = (page_arrays(layout, n, limits.page_size, self.cache_dtype) for n in sizes)
            self.caches.append(device)
            self._pages[table].device.extend(device)
            self._pages[table].host.extend(host)
        self.copy_seconds = self._call(self._time_copies)

    def _time_copies(self) -> float:
        """Seconds that one page of each table takes to the host and back, here from memory to memory."""
        caches = [cache for pages in self._pages for cache in pages.device]
        samples = [torch.zeros_like(cache[0]) for cache in caches]
        begin = time.perf_counter()
        for cache, sample in zip(caches, samples, strict=True):
            cache[0].copy_(sample)  # the null page, which belongs to no request
        return 2 * (time.perf_counter() - begin)

    def _call(self, work: Callable[[], T]) -> T:
        """Runs `work` on the worker thread and waits for it: before the first step only.

        The worker does all tensor work. OpenMP keeps a team of threads for each thread that calls it. With more team members
        than cores, they sleep between operations instead of spinning, which costs a quarter of a step.
        """
        result: concurrent.futures.Future[T] = concurrent.futures.Future()

        def run() -> None:
            try:
                result.set_result(work())
            except BaseException as e:
                result.set_exception(e)

        self._work.put(run)
        return result.result()

    def init_slot(self, slot: int, request: Request) -> None:
        def work() -> None:
            self.tables.init_slot(slot, request)
            self.state.set(slot, 0)

        self._work.put(work)

    def set_state(self, slot: int, snapshot: int) -> None:
        self._work.put(lambda: self.state.set(slot, snapshot))

    def offload(self, table: int, pages: tuple[int, ...], host: tuple[int, ...]) -> None:
        self._work.put(lambda: _copy_pages(self._pages[table].device, pages, self._pages[table].host, host))

    def restore(self, table: int, host: tuple[int, ...], pages: tuple[int, ...]) -> None:
        self._work.put(lambda: _copy_pages(self._pages[table].host, host, self._pages[table].device, pages))

    def launch(self, batch: Batch) -> None:
        def work() -> None:
            self._forward(batch)
            self._sample(batch.seq, {}, frozenset())

        self._work.put(work)

    def launch_forward(self, batch: Batch) -> None:
        self._work.put(lambda: self._forward(batch))

    def launch_sample(self, seq: int, masks: dict[int, np.ndarray], discarded: frozenset[int]) -> None:
        self._work.put(lambda: self._sample(seq, masks, discarded))

    def outcomes(self) -> list[Outcome]:
        self._bell.clear()
        failure = self._failure  # read before the outcomes: those before the failure are there once it is
        out = []
        while self._arrived:
            out.append(self._arrived.popleft())
        if failure is not None:
            if not out:
                raise StepFailed(failure)
            self._bell.ring()
        return out

    def fileno(self) -> int:
        return self._bell.fileno()

    def close(self) -> None:
        """Ends the worker after its queued work. A worker that waits for a dead peer ends with the process."""
        self._work.put(None)
        if self._thread.is_alive():
            self._thread.join(5.0)
        if not self._thread.is_alive():
            self._bell.close()

    # The worker thread's own; everything below runs there.

    def _run(self) -> None:
        crew = Crew(self.threads)
        with torch.inference_mode():
            while (work := self._work.get()) is not None:
                try:
                    crew.run(work)
                except BaseException:
                    self._failure = traceback.format_exc()
                    self._bell.ring()
                    return

    def _forward(self, batch: Batch) -> None:
        start = time.monotonic_ns()
        tables = self.tables
        tables.write_pages(batch.pages)
        rows = tables.place(batch)
        ids = tables.ids(batch.slots, rows.starts, rows.counts)
        step = build_step(
            ids, batch.slots, rows.starts, rows.counts, tables.pages, self.windows, self.caches, self.dtype, self.page_size,
            batch.decodes,
        )  # fmt: skip
        hidden = self.model.forward(step)
        self.state.save(batch.saves)
        pending = _Pending(batch, rows, step, start)
        if len(pending.slots):
            slots, at = JudgedRows(torch.from_numpy(pending.slots.astype(np.int64))), pending.tokens_at
            every = len(at) == hidden.shape[0]
            pending.logits = self.model.logits(hidden if every else hidden[torch.from_numpy(at)], slots)
        self._prompt_logprobs(pending, step, hidden)
        self._pending = pending

    def _prompt_logprobs(self, pending: "_Pending", step: PagedStep, hidden: Tensor) -> None:
        """Position p of a prompt is judged by the logits of p - 1; the prompt's last row judges the first generated token."""
        at, rows = 0, pending.rows
        for slot, start, count in zip(pending.batch.slots.tolist(), rows.starts.tolist(), rows.counts.tolist(), strict=True):
            first, at = at, at + count
            top = self.tables.sampling[slot].prompt_logprobs
            judged = min(start + count, int(self.tables.prompt_len[slot]) - 1) - start
            if top < 0 or judged <= 0:
                continue
            found: list[TokenLogprobs] = []
            targets = self.tables.tokens[slot, start + 1 : start + 1 + judged]
            for i in range(0, judged, _PROMPT_ROWS):
                few = targets[i : i + _PROMPT_ROWS]
                part = slice(first + i, first + i + len(few))
                logits = self.model.logits(hidden[part], JudgedRows(step.slots[part]))
                self.sampler.prompt_logprobs(logits, slot, few, top, found)
            pending.prompt_logprobs[slot] = (start + 1, found)

    def _sample(self, seq: int, masks: dict[int, np.ndarray], discarded: frozenset[int]) -> None:
        """Draws a token at each judged position, accepts the drafts that are right, commits, and makes the next drafts."""
        pending, self._pending = self._pending, None
        assert pending is not None and pending.batch.seq == seq
        tables, own = self.tables, pending.batch.slots[pending.judged]
        counts = pending.rows.sampled[pending.judged]
        tokens = np.full((len(own), int(counts.max(initial=1))), -1, np.int32)
        accepted, errors, logprobs = np.ones(len(own), np.int32), {}, {}
        kept = [i for i, slot in enumerate(own.tolist()) if slot not in discarded]
        if kept:
            alive = slice(None) if len(kept) == len(own) else np.isin(pending.row_of, kept)
            sampled = self._draw(pending, alive, masks)
            row_of, places = pending.row_of[alive], pending.places[alive]
            tokens[row_of, places] = sampled.tokens
            if tokens.shape[1] > 1:
                accepted = accept(tokens, tables.drafts[own], counts)
            at = list(zip(row_of.tolist(), places.tolist(), strict=True))
            logprobs = {at[i]: found for i, found in sampled.logprobs.items() if at[i][1] < accepted[at[i][0]]}
            errors = {at[i][0]: why for i, why in sampled.errors.items() if not at[i][1]}
        rewind(pending.step, dict(zip(own.tolist(), accepted.tolist(), strict=True)))
        self.tables.commit(own[kept], pending.firsts[kept], tokens[kept], accepted[kept])
        drafts = self._propose(own[kept].tolist()) if tables.speculates else {}
        tokens, prompts = tokens[:, : int(accepted.max(initial=1))], pending.prompt_logprobs
        end = time.monotonic_ns()
        if self.board is not None:
            self.board.set("collective", self.collective.entered)
            self.board.device_span(pending.start, end, seq, self.collective.entered)
        seconds, verified = (end - pending.start) * 1e-9, counts - 1 if counts.max(initial=1) > 1 else None
        self._arrived.append(Outcome(seq, tokens, accepted, logprobs, prompts, errors, drafts, verified, seconds))
        self._bell.ring()

    def _draw(self, pending: "_Pending", alive: slice | np.ndarray, masks: dict[int, np.ndarray]) -> Sampled:
        """The token at each judged position of `alive`, as if all drafts before it were right."""
        tables, slots = self.tables, pending.slots[alive]
        assert pending.logits is not None
        logits = pending.logits if isinstance(alive, slice) else pending.logits[torch.from_numpy(alive)]
        if not masks and tables.greedy[slots].all():
            return self.sampler.greedy(logits)
        rows = [
            SampleRow(
                s,
                tables.sampling[s],
                int(tables.prompt_len[s]),
                tables.tokens[s, :end],
                masks[s][place] if s in masks else None,
            )
            for s, end, place in zip(slots.tolist(), pending.ends[alive].tolist(), pending.places[alive].tolist(), strict=True)
        ]
        return self.sampler.sample(logits, rows)

    def _propose(self, slots: list[int]) -> dict[int, tuple[int, ...]]:
        """Makes the next drafts of these slots; returns those of slots with a grammar, whose masks need them."""
        tables = self.tables
        self.proposer.propose(slots)
        return {s: tuple(tables.drafts[s, : tables.drafted[s]].tolist()) for s in slots if tables.bound[s]}


class _PageArrays(NamedTuple):
    """All arrays of one page table's layers, on the device and in the host memory for preempted requests, in one order."""

    device: list[Tensor]
    host: list[Tensor]


class _Pending:
    """A step between its forward and its sampling. The judged positions of a row are adjacent, and rows stand in order."""

    def __init__(self, batch: Batch, rows: PlacedRows, step: PagedStep, start: int):
        self.batch = batch
        self.rows = rows
        self.step = step
        self.start = start  # monotonic nanoseconds
        self.judged = np.flatnonzero(rows.sampled)
        counts = rows.sampled[self.judged]
        self.row_of = np.repeat(np.arange(len(counts)), counts)  # of each judged position: its row of the outcome ...
        self.places = np.arange(len(self.row_of)) - (np.cumsum(counts) - counts)[self.row_of]  # ... and its column there
        self.slots = batch.slots[self.judged][self.row_of]
        self.firsts = (rows.starts + rows.counts - rows.sampled + 1)[self.judged]  # where each row's first token will stand
        self.ends = self.firsts[self.row_of] + self.places  # tokens that each judged position has before it
        last = (np.cumsum(rows.counts) - rows.sampled)[self.judged]
        self.tokens_at = (last[self.row_of] + self.places).astype(np.int64)  # their places among the step's tokens
        self.logits: Tensor | None = None
        self.prompt_logprobs: dict[int, tuple[int, list[TokenLogprobs]]] = {}


def _copy_pages(source: list[Tensor], pages: tuple[int, ...], target: list[Tensor], into: tuple[int, ...]) -> None:
    """Copies pages between arrays, in every layer of a table."""
    take, put = torch.tensor(pages), torch.tensor(into)
    for a, b in zip(source, target, strict=True):
        if a.numel():
            b.index_copy_(0, put, a.index_select(0, take))
