"""The CUDA executor: slot tables on the device, captured steps, outcomes from a ring (docs/design.md, "The device").

One stream carries everything in order; a second one copies outcomes. All calls of an executor come from one thread, queue work
and return. Between plan and settle no call waits for the device, reads from it, or allocates memory in a way that waits.
"""

import collections
import itertools
import os
import sys
import tempfile
import time
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from slipstream.config import EngineConfig
from slipstream.device.cuda import graphs
from slipstream.device.cuda.graphs import Graphs, decode_buckets, padded, token_buckets
from slipstream.device.cuda.memory import cache_memory, choose_device, page_arrays, resolve_dtype
from slipstream.device.cuda.offload import HostPages
from slipstream.device.cuda.sampler import CudaSampler, Extras
from slipstream.device.cuda.tables import CudaTables, Layout, StepBuffers, StepInputs, pinned, round_up
from slipstream.device.executor import Batch, Capacity, DeviceProgress, Executor, Outcome, StepFailed
from slipstream.device.memory import MAX_PAGES, CacheNeeds, cache_dtype
from slipstream.device.state import SlotState
from slipstream.errors import ConfigError
from slipstream.log.caches import Limits, TableLimits, window_of
from slipstream.log.request import Request
from slipstream.models.registry import build, runs_own_code
from slipstream.ops import sampler
from slipstream.ops.collective import SharedMemory
from slipstream.ops.cuda.ops import CudaOps, CudaStep, Tiles, check_attention, query_heads, scratch_heads
from slipstream.ops.cuda.prepare import decode_prepare_kernel, gather_kernel, ids_kernel
from slipstream.ops.cuda.prompt_blocks import CHUNK, ROWS, SPARE
from slipstream.ops.cuda.sample import NO_TOKEN
from slipstream.ops.cuda.symmetric import PROGRAMS, Symmetric
from slipstream.ops.interface import JudgedRows, Ops
from slipstream.ops.layers import Attention
from slipstream.shard import Shard, split_evenly
from slipstream.weights.packed import Packed

PAGE_SIZE = 64  # default tokens of a page: the copy engine loads as many at once (`attention.TILE`)
WIDTH = 1  # tokens that a row may give: there are no drafts on CUDA yet
DEPTH = 8  # launches that may be in flight, and places of the outcome ring
SLOW_STEP_S = 0.5  # a step that takes longer has its barriers reported
CUBLAS_WORKSPACE = ":0:0"  # none: with a workspace, cuBLAS splits K where that costs more (docs/gpu_log.md)
_CONNECT_TIMEOUT_S = 120.0  # the ranks of a group must find each other within this time


class OnDevice:
    """A checkpoint that reads its tensors directly onto a device."""

    def __init__(self, checkpoint: Any, device: torch.device):
        self._checkpoint, self._device = checkpoint, device

    def __getattr__(self, name: str) -> Any:
        return getattr(self._checkpoint, name)

    def tensor(self, *args: Any, **kwargs: Any) -> Tensor:
        return self._checkpoint.tensor(*args, **kwargs, device=self._device)

    def linear(self, *args: Any, **kwargs: Any) -> Packed:
        return self._checkpoint.linear(*args, **kwargs, device=self._device)


class LaunchBuffers:
    """One launch's host buffers and events, and the data for its outcome. It is used again when the outcome has been taken."""

    def __init__(self, pages: int, inputs: int, outcome: int):
        self.buffers = StepBuffers(pages, inputs, outcome)
        self.started = torch.cuda.Event(enable_timing=True)
        self.ended: torch.cuda.Event  # not reused with these buffers: the next step's time is measured from it
        self.arrived = torch.cuda.Event()
        self.seq = -1
        self.at = 0.0  # time of the launch, seconds
        self.judged = 0  # rows
        self.masked: frozenset[int] = frozenset()  # judged rows under a grammar's mask
        self.extras: Extras | None = None


class CudaExecutor:
    """A `device.executor.Executor`. The constructor loads this rank's part of the model."""

    def __init__(
        self, checkpoint: Any, config: EngineConfig, shard: Shard, device: torch.device, file: str = "",
        board: DeviceProgress | None = None,
    ):  # fmt: skip
        """`file` names a file in which the ranks of a group find each other.

        Raises ModelError for a model that cannot be built and ConfigError for settings that it does not allow.
        """
        if config.max_num_seqs > PROGRAMS:
            raise ConfigError(f"--max-num-seqs {config.max_num_seqs}: at most {PROGRAMS} on CUDA")
        self.config, self.shard, self.device, self.board = config, shard, device, board
        self.page_size = config.block_size or PAGE_SIZE
        torch.cuda.set_device(device)
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", CUBLAS_WORKSPACE)
        self.stream, self._side = torch.cuda.Stream(device), torch.cuda.Stream(device)
        torch.cuda.set_stream(self.stream)
        self.symmetric = Symmetric(device, shard.rank, shard.size)
        if shard.size > 1:
            self.symmetric.connect(file, _CONNECT_TIMEOUT_S)
        self.ops = CudaOps(resolve_dtype(config.dtype), device, shard, self.symmetric)
        self.cache_dtype = cache_dtype(config.kv_cache_dtype, self.ops.dtype)
        before = torch.cuda.memory_allocated(device)
        self.model = build(OnDevice(checkpoint, device), cast(Ops, self.ops), config.max_model_len, config.model_impl)
        self.weight_bytes = torch.cuda.memory_allocated(device) - before
        if config.max_model_len and config.max_model_len > self.model.max_len:
            raise ConfigError(f"--max-model-len {config.max_model_len} is more than the model's own {self.model.max_len}")
        for spec in self.model.attentions:
            check_attention(spec)
        self._most = round_up(max(config.max_num_batched_tokens, config.max_num_seqs), 64)
        if shard.size > 1:
            part = -(-self.model.vocab // shard.size)
            self.symmetric.allocate(self._most, self.model.hidden, self.ops.dtype, config.max_num_seqs * WIDTH, part)
        self.copy_seconds = 0.0
        self._model_config: dict = checkpoint.config
        self._uncaptured = False  # whether no graph could be captured
        self.eager_steps: dict[str, int] = dict.fromkeys(graphs.EAGER_REASONS, 0)
        self._look, self._barriers, self._looked_at = torch.cuda.Stream(device), pinned(1), 0.0
        self._flying: collections.deque[LaunchBuffers] = collections.deque()
        self._clock: tuple[torch.cuda.Event, int] | None = None

    # --- before the first step

    def capacity(self) -> Capacity:
        c = self.config
        needs = CacheNeeds(
            self.model.caches, self.cache_dtype, self.page_size, c.max_num_seqs, c.max_model_len or self.model.max_len
        )
        memory = cache_memory(c, needs, self.weight_bytes, self._profile(needs), self.device)
        host = c.kv_offload_memory_bytes or 0  # pinning takes seconds: none unless asked for
        limits = needs.limits(memory, MAX_PAGES, c.enable_prefix_caching, host)
        return Capacity(limits._replace(width=WIDTH), self.weight_bytes)

    def _profile(self, needs: CacheNeeds) -> int:
        """Bytes that the largest step takes besides weights and caches, measured by running it on padding rows."""
        tables = tuple(TableLimits(0, window) for window in needs.windows)
        self._allocate(Limits(tables, needs.slots, min(needs.max_len, 1024), self.page_size, width=WIDTH))
        torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_allocated(self.device)
        self._forward_mixed(self._most)
        self._head_and_sample(needs.slots)
        torch.cuda.synchronize(self.device)
        step = torch.cuda.max_memory_allocated(self.device) - before
        del self.caches, self.tiles, self.state
        torch.cuda.empty_cache()
        return step

    def start(self, limits: Limits) -> None:
        """Allocates all that outlives a step, compiles kernels by running the largest shapes, then captures the graphs."""
        self._allocate(limits)
        slots = limits.slots
        self._graphs = Graphs(self.stream, self.config.enforce_eager)
        self._decode_buckets, self._token_buckets = decode_buckets(slots), token_buckets(self._most)
        for work in (lambda: self._forward_mixed(self._most), lambda: self._forward_decode(slots)):
            work()
            self._head_and_sample(slots)
        if limits.tables:  # else the first request waits while this kernel is compiled
            self.tables.write_pages(np.array([[0, self.nobody, 0, 0]], np.int32), self._free[0].buffers)
        torch.cuda.synchronize(self.device)
        self._capture()
        torch.cuda.synchronize(self.device)
        self._steps = int(self.counter.item())
        if self.symmetric.fault.item():
            raise ConfigError("a rank took over 20 s longer than another to compile its kernels; start again: they are cached")
        self._host = [
            HostPages(t.host_pages, self._arrays(t.window), self.device) for t in limits.tables
        ]  # fmt: skip
        self.copy_seconds = sum(host.seconds() for host in self._host)

    def _capture(self) -> None:
        """Captures all graphs. Code that is not ours may wait for the device, which no graph can hold: it then runs without."""
        work = (
            ("tokens", self._token_buckets, self._forward_mixed),
            ("decode", self._decode_buckets, self._forward_decode),
            ("sample", self._decode_buckets, self._head_and_sample),
        )
        try:
            for kind, sizes, function in work:
                self._graphs.capture(kind, sizes, function)
        except ConfigError as e:
            if runs_own_code(self._model_config, self.config.model_impl):
                raise
            if self.shard.rank == 0:
                print(f"slipstream: the model's steps run without graphs, which is slow at few rows: {e}", file=sys.stderr)
            self._uncaptured = True
            self._graphs = Graphs(self.stream, eager=True)
            for kind, sizes, function in work:
                self._graphs.capture(kind, sizes, function)

    def _arrays(self, window: int) -> list[Tensor]:
        """All arrays of the page table with this rule."""
        each = zip(self.model.caches, self.caches, strict=True)
        return [array for layout, arrays in each if window_of(layout) == window for array in arrays]

    def _allocate(self, limits: Limits) -> None:
        model, device, slots = self.model, self.device, limits.slots
        width, judged = limits.width, limits.slots * limits.width
        self.width = width
        self.slots, self.nobody = slots, slots
        self._allocate_caches(limits)
        self.tables = CudaTables(limits, device)
        prompts = min(slots, self._most)  # rows
        rows, chunks = (prompts, self._most // CHUNK + prompts) if self.state.arrays else (0, 0)
        self.layout = Layout(self._most, judged, -(-self._most // ROWS) + prompts + SPARE, rows, chunks)
        cutter = self.ops.cutter(max([1, *(query_heads(a) for a in model.attentions)]))
        self.inputs = StepInputs(self.layout, cutter, width, device)
        self.inputs.slots.fill_(self.nobody)
        self.inputs.row_slots.fill_(self.nobody)
        self.inputs.sample_slot.fill_(self.nobody)
        self.everyone = torch.full((1,), 1 << 30, dtype=torch.int32, device=device)
        self.hidden = torch.zeros((judged, model.hidden), dtype=self.ops.dtype, device=device)
        outcome = judged + (slots if width > 1 else 0) + 1  # tokens, accepted counts, the fault: see `exchange_kernel`
        self.ring = torch.zeros((DEPTH, outcome), dtype=torch.int32, device=device)
        self.counter = torch.zeros(1, dtype=torch.int32, device=device)
        self.windows = tuple(t.window for t in limits.tables)
        widest: dict[tuple[int, int], int] = {}  # values of a head's output, by key heads and window
        for a in model.attentions:
            heads, dim = scratch_heads(a)
            key = heads, self.windows[a.table]
            widest[key] = max(widest.get(key, 0), dim)
        self.scratch = {key: self.ops.scratch(judged, key[0], dim) for key, dim in widest.items() if key[0]}
        self.prompt_scratch = self.ops.prompt_scratch(max([0, *widest.values()]))
        parts = split_evenly(self.model.vocab, self.shard.size)
        self.sampler = CudaSampler(
            self.tables, self.inputs, self.symmetric, self.model.vocab, parts, self.ring, self.counter, self.model.logits,
            self.ops.barrier,
        )  # fmt: skip
        self._free = collections.deque(
            LaunchBuffers(self.tables.places, self.layout.size, outcome) for _ in range(DEPTH)
        )  # fmt: skip
        self._ends = itertools.cycle([torch.cuda.Event(enable_timing=True) for _ in range(2 * DEPTH)])
        self._plain, self._ones = np.ones(slots, bool), np.ones(slots, np.int32)
        self._resident: tuple[np.ndarray, bool] | None = None  # the decode rows that the device holds; whether all are plain
        self._pending: tuple[LaunchBuffers, Batch] | None = None

    def _allocate_caches(self, limits: Limits) -> None:
        layouts = self.model.caches
        pages = {t.window: t.pages + 1 for t in limits.tables}
        self.state = SlotState(layouts, limits.slots, limits.snapshots, self.device)
        self.caches: list[tuple[Tensor, ...]] = []  # by layer
        for i, layout in enumerate(layouts):
            window = window_of(layout)
            self.caches.append(
                self.state.arrays.get(i, ())
                if window is None
                else page_arrays(layout, pages[window], limits.page_size, self.cache_dtype, self.device)
            )
        self.tiles: list[Tiles | None] = [None] * len(layouts)
        for spec in self.model.attentions:
            if isinstance(spec, Attention):
                self.tiles[spec.cache] = self.ops.tiles_of(self.caches[spec.cache], limits.page_size)

    # --- the work of a step, captured or not

    def _step(self, tokens: int, decode_rows: int, prompts: bool, decodes: Tensor) -> CudaStep:
        i = self.inputs
        return CudaStep(
            i.ids[:tokens], i.positions[:tokens], i.slots[:tokens], self.tables.by_table, self.caches, self.tiles, self.windows,
            self.scratch, self.prompt_scratch, self.page_size, self.nobody, decode_rows, decodes, prompts, i.parts,
            i.counts[1:3], i.rows[:tokens], i.chunks[: tokens // CHUNK + len(i.rows)], i.counts[3:5],
        )  # fmt: skip

    def _forward_decode(self, rows: int) -> None:
        i, t, tokens = self.inputs, self.tables, rows * self.width
        decode_prepare_kernel[(-(-tokens // 128),)](
            i.row_slots, t.next, t.limits, t.tokens, i.slots, i.ids, i.positions, i.sample_token, i.sample_slot,
            i.sample_position, rows, t.tokens.stride(0), self.nobody, WIDTH=self.width, B=128,
        )  # fmt: skip
        self._gather(self._forward(self._step(tokens, tokens, False, self.everyone)), tokens)

    def _forward_mixed(self, tokens: int) -> Tensor:
        i, t = self.inputs, self.tables
        ids_kernel[(-(-tokens // 128),)](i.slots, i.positions, t.tokens, i.ids, tokens, t.tokens.stride(0), B=128)
        hidden = self._forward(self._step(tokens, min(self.layout.judged, tokens), True, i.counts[0:1]))
        self._gather(hidden, self.layout.judged)
        return hidden

    def _forward(self, step: CudaStep) -> Tensor:
        self.ops.begin(step)
        return self.model.forward(step)

    def _gather(self, hidden: Tensor, judged: int) -> None:
        size = hidden.shape[1]
        gather_kernel[(judged, -(-size // 1024))](hidden, self.inputs.sample_token, self.hidden, H=size, B=1024)

    def _head_and_sample(self, rows: int) -> None:
        """The output layer, this rank's best id of each row, and the exchange, for rows that need only that."""
        self.sampler.sample(self._logits(rows), rows)

    def _logits(self, rows: int) -> Tensor:
        judged = rows * self.width
        return self.model.logits(self.hidden[:judged], JudgedRows(self.inputs.sample_slot[:judged]))

    # --- the interface

    def init_slot(self, slot: int, request: Request) -> None:
        self._plain[slot] = request.sampling.plain
        self.sampler.init_slot(slot, request)
        self.tables.init_slot(slot, request)
        self.state.set(slot, 0)

    def set_state(self, slot: int, snapshot: int) -> None:
        self.state.set(slot, snapshot)

    def offload(self, table: int, pages: tuple[int, ...], host: tuple[int, ...]) -> None:
        self._host[table].save(pages, host)

    def restore(self, table: int, host: tuple[int, ...], pages: tuple[int, ...]) -> None:
        self._host[table].load(host, pages)

    def launch(self, batch: Batch) -> None:
        self.launch_forward(batch)
        self.launch_sample(batch.seq, {}, frozenset())

    def launch_forward(self, batch: Batch) -> None:
        flight = self._free.popleft()
        flight.seq, flight.extras, flight.masked = batch.seq, None, frozenset()
        flight.at = time.monotonic()
        flight.ended = next(self._ends)
        flight.started.record(self.stream)
        self.eager_steps[graphs.ENFORCED] += self.config.enforce_eager
        self.eager_steps[graphs.FOREIGN] += self._uncaptured
        self.tables.write_pages(batch.pages, flight.buffers)
        rows = len(batch.slots)
        if batch.decodes == rows:
            self._launch_decode(batch, rows, flight)
        else:
            self._launch_mixed(batch, flight)
        self.state.save(batch.saves)
        self._pending = flight, batch

    def _launch_decode(self, batch: Batch, rows: int, flight: LaunchBuffers) -> None:
        bucket = padded(self._decode_buckets, rows)
        assert bucket is not None
        if self._resident is None or self._resident[0] is not batch.slots:
            self.inputs.upload_slots(batch.slots, bucket, self.nobody, flight.buffers)
            self._resident = batch.slots, bool(self._plain[batch.slots].all())
        self._graphs.run("decode", bucket)

    def _launch_mixed(self, batch: Batch, flight: LaunchBuffers) -> None:
        self._resident = None
        tokens = batch.tokens
        bucket = padded(self._token_buckets, tokens)
        judged = self.sampler.judged(batch)
        size = bucket if bucket is not None else round_up(tokens, 64)
        self.inputs.upload_step(batch, size, self.nobody, flight.buffers)
        if bucket is not None and not judged:
            self._graphs.run("tokens", bucket)
            return
        self.eager_steps[graphs.LARGE] += bucket is None
        self.eager_steps[graphs.PROMPT_LOGPROBS] += bool(judged)
        hidden = self._forward_mixed(size)
        if judged:
            flight.extras = self.sampler.judge(hidden, judged)

    def launch_sample(self, seq: int, masks: dict[int, np.ndarray], discarded: frozenset[int]) -> None:
        assert self._pending is not None
        (flight, batch), self._pending = self._pending, None
        assert flight.seq == seq
        if self._resident is not None:
            flight.judged, plain = len(batch.slots), self._resident[1]
        else:
            slots = batch.slots[batch.judged]
            flight.judged, plain = len(slots), bool(self._plain[slots].all())
        if flight.judged:
            self._sample(flight, batch, masks, plain)
        flight.ended.record(self.stream)
        with torch.cuda.stream(self._side):
            self._side.wait_event(flight.ended)
            if flight.judged:
                place = (self._steps - 1) % DEPTH
                flight.buffers.outcome.copy_(self.ring[place], non_blocking=True)
            if flight.extras is not None:
                flight.extras.copy_to_host()
            flight.arrived.record(self._side)
        self._flying.append(flight)

    def _sample(self, flight: LaunchBuffers, batch: Batch, masks: dict[int, np.ndarray], plain: bool) -> None:
        bucket = padded(self._decode_buckets, flight.judged)
        assert bucket is not None
        self._steps += 1
        if plain and not masks:
            self._graphs.run("sample", bucket)
            return
        self.eager_steps[graphs.SAMPLING] += not plain
        self.eager_steps[graphs.GRAMMAR] += bool(masks)
        if masks:
            flight.masked = frozenset(i for i, slot in enumerate(batch.slots[batch.judged].tolist()) if slot in masks)
        logits = self._logits(bucket)
        flight.extras = self.sampler.sample_each(logits, batch, masks, flight.judged, flight.extras)

    def outcomes(self) -> list[Outcome]:
        out = []
        try:
            while self._flying and self._flying[0].arrived.query():
                flight = self._flying.popleft()
                out.append(self._outcome(flight))
                self._free.append(flight)
            if self._flying and not out:
                self._look_at(self._flying[0])
        except RuntimeError as e:
            raise StepFailed(f"CUDA: {e}") from e
        return out

    def _look_at(self, flight: LaunchBuffers) -> None:
        """While a step takes long, reports to the board how many barriers this rank's kernels have passed.

        The rank with the fewest barriers is the one that hangs; the others wait for it. The copy has its own stream, so it does
        not wait for the step.
        """
        now = time.monotonic()
        if self.board is None or now < max(flight.at, self._looked_at) + SLOW_STEP_S or not self._look.query():
            return
        self.board.set("collective", int(self._barriers.numpy()[0]))
        self._looked_at = now
        with torch.cuda.stream(self._look):
            self._barriers.copy_(self.symmetric.counts[:1], non_blocking=True)

    def _outcome(self, flight: LaunchBuffers) -> Outcome:
        view = flight.buffers.outcome_view
        if flight.judged and view[-1]:
            raise StepFailed("a rank did not arrive at a sum; this one stopped waiting for it")
        rows, judged = flight.judged, flight.judged * self.width
        tokens = view[:judged].reshape(rows, self.width).copy()
        accepted = self._ones[:rows]
        if self.width > 1:
            accepted = view[self.layout.judged : self.layout.judged + rows].copy()
        milliseconds = flight.started.elapsed_time(flight.ended)
        outcome = Outcome(flight.seq, tokens, accepted, seconds=milliseconds * 1e-3)
        if rows and tokens.min() < 0:
            for i in np.flatnonzero(tokens[:, 0] < 0).tolist():
                nothing = sampler.DEAD_END if i in flight.masked else sampler.NO_TOKEN
                outcome.errors[i] = nothing if tokens[i, 0] == NO_TOKEN else sampler.NOT_FINITE
            np.maximum(tokens, -1, out=tokens)
        if flight.extras is not None:
            flight.extras.add_to(outcome)
        if self.board is not None:
            self._span(flight, int(milliseconds * 1e6))
        return outcome

    def _span(self, flight: LaunchBuffers, length: int) -> None:
        """Writes the step's span to the board in host time.

        Lengths and gaps are the device's times. They are anchored to the host's clock when the device resumes after a pause.
        """
        assert self.board is not None
        now = time.monotonic_ns()
        end = now
        if self._clock is not None:
            last, at = self._clock
            by_device = at + int(last.elapsed_time(flight.ended) * 1e6)
            end = by_device if abs(by_device - now) < 5_000_000 else now
        self.board.device_span(end - length, end, flight.seq)
        self._clock = flight.ended, end

    def fileno(self) -> None:
        """None: outcomes are polled. A query takes a microsecond; waking a thread takes tens of them."""
        return None

    def close(self) -> None:
        torch.cuda.synchronize(self.device)
        self._graphs.clear()
        self.symmetric.close()


def build_cuda(
    config: EngineConfig, model_path: str, rank: int, size: int, collective: int, board: DeviceProgress | None
) -> tuple[Executor, dict]:
    """One rank's executor and the model's config. The ranks agree through the memory `collective` on a file to connect by."""
    from slipstream.weights.checkpoint import open_checkpoint

    # NVLink multicast needs permissions that shared hosts do not give
    os.environ |= {"TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NCCL_NVLS_ENABLE": "0", "NVSHMEM_DISABLE_NVLS": "1"}
    device = choose_device(rank, size)
    file = ""
    if size > 1:
        room = os.fstat(collective).st_size - SharedMemory.required_bytes(size, 0)
        talk = SharedMemory(collective, rank, size, room // (2 * size) // 4096 * 4096)
        mine = os.path.join(tempfile.mkdtemp(prefix="slipstream-"), "ranks") if rank == 0 else ""
        file = talk.all_gather_bytes(mine.encode())[0].decode()
    checkpoint = open_checkpoint(model_path, config.load_format, config.seed)
    return CudaExecutor(checkpoint, config, Shard(rank, size), device, file, board), checkpoint.config
