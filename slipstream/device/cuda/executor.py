"""The CUDA executor: slot tables on the device, captured steps, outcomes from a ring (docs/design.md, "The device").

One stream carries everything in order; a second one copies outcomes. All calls of an executor come from one thread, queue work
and return. Between plan and settle nothing waits for the device, allocates on it in a way that waits, or reads from it.
"""

import collections
import itertools
import os
import tempfile
import time
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from slipstream.config import EngineConfig
from slipstream.device.cuda.graphs import Graphs, decode_buckets, padded, token_buckets
from slipstream.device.cuda.memory import choose_device, pages_that_fit, resolve_dtype
from slipstream.device.cuda.offload import HostPages
from slipstream.device.cuda.sampler import CudaSampler, Extras
from slipstream.device.cuda.tables import CudaTables, Layout, StepBuffers, StepInputs, pinned, round_up
from slipstream.device.executor import Batch, Capacity, DeviceProgress, Executor, Outcome, StepFailed
from slipstream.device.memory import page_bytes
from slipstream.errors import ConfigError
from slipstream.log.request import Request
from slipstream.models.registry import build
from slipstream.ops import sampler
from slipstream.ops.collective import SharedMemory
from slipstream.ops.cuda.ops import CudaOps, CudaStep, check_shape
from slipstream.ops.cuda.prepare import decode_prepare_kernel, gather_kernel, ids_kernel
from slipstream.ops.cuda.prompt_blocks import ROWS, SPARE
from slipstream.ops.cuda.sample import NO_TOKEN
from slipstream.ops.cuda.symmetric import PROGRAMS, Symmetric
from slipstream.ops.interface import Ops
from slipstream.shard import Shard, split_evenly

PAGE_SIZE = 64  # tokens of a page unless the user says otherwise: what the copy engine brings at once (`triton_attention.TILE`)
DEPTH = 8  # places of the outcome ring, and launches that may be in flight
LONG = 0.5  # seconds after which a step's kernels are looked at
WORKSPACE = ":0:0"  # of cuBLAS: with room for partial products it splits K where that costs more (docs/gpu_log.md)
_CONNECT_TIMEOUT_S = 120.0  # seconds that the ranks of a group may take to find each other


class OnDevice:
    """A checkpoint whose tensors are read straight onto a device."""

    def __init__(self, checkpoint: Any, device: torch.device):
        self._checkpoint, self._device = checkpoint, device

    def __getattr__(self, name: str) -> Any:
        return getattr(self._checkpoint, name)

    def tensor(self, *args: Any, **kwargs: Any) -> Tensor:
        return self._checkpoint.tensor(*args, **kwargs, device=self._device)


class LaunchBuffers:
    """One launch: its host buffers, its events, what its outcome needs. Handed out again only after the outcome was taken."""

    def __init__(self, pages: int, inputs: int, outcome: int):
        self.buffers = StepBuffers(pages, inputs, outcome)
        self.started = torch.cuda.Event(enable_timing=True)
        self.ended: torch.cuda.Event  # outlives the flight: the next step is placed in time by it
        self.arrived = torch.cuda.Event()
        self.seq = -1
        self.at = 0.0  # of its launch, seconds
        self.samples = 0
        self.masked: frozenset[int] = frozenset()  # sampling rows under a grammar's mask
        self.extras: Extras | None = None


class CudaExecutor:
    """A `device.executor.Executor`. Loads this rank's part of the model when made."""

    def __init__(
        self, checkpoint: Any, config: EngineConfig, shard: Shard, device: torch.device, meeting: str = "",
        board: DeviceProgress | None = None,
    ):  # fmt: skip
        """`meeting` names a file in which the ranks of a group find each other.

        Raises ModelError for a model that cannot be built and ConfigError for settings that it does not allow.
        """
        if config.max_num_seqs > PROGRAMS:
            raise ConfigError(f"--max-num-seqs {config.max_num_seqs}: at most {PROGRAMS} on CUDA")
        self.config, self.shard, self.device, self.board = config, shard, device, board
        self.page_size = config.block_size or PAGE_SIZE
        torch.cuda.set_device(device)
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", WORKSPACE)
        self.stream, self._side = torch.cuda.Stream(device), torch.cuda.Stream(device)
        torch.cuda.set_stream(self.stream)
        self.symmetric = Symmetric(device, shard.rank, shard.size)
        if shard.size > 1:
            self.symmetric.connect(meeting, _CONNECT_TIMEOUT_S)
        self.ops = CudaOps(resolve_dtype(config.dtype), device, shard, self.symmetric)
        before = torch.cuda.memory_allocated(device)
        self.model = build(OnDevice(checkpoint, device), cast(Ops, self.ops), config.max_model_len)
        self.weight_bytes = torch.cuda.memory_allocated(device) - before
        if config.max_model_len and config.max_model_len > self.model.max_len:
            raise ConfigError(f"--max-model-len {config.max_model_len} is more than the model's own {self.model.max_len}")
        heads = self.model.layers[0].attention.heads
        check_shape(self.model.cache.head_dim, heads.num_q_heads, heads.num_kv_heads)
        self._most = round_up(max(config.max_num_batched_tokens, config.max_num_seqs), 64)
        if shard.size > 1:
            part = -(-self.model.vocab // shard.size)
            self.symmetric.allocate(self._most, self.model.config.hidden, self.ops.dtype, config.max_num_seqs, part)
        self.copy_seconds = 0.0
        self._look, self._meetings, self._looked_at = torch.cuda.Stream(device), pinned(1), 0.0
        self._flying: collections.deque[LaunchBuffers] = collections.deque()
        self._clock: tuple[torch.cuda.Event, int] | None = None

    # --- before the first step

    def capacity(self) -> Capacity:
        c, page_size = self.config, self.page_size
        max_len = c.max_model_len or self.model.max_len
        each = page_bytes(self.model.cache, page_size, self.ops.dtype)
        step = self._profile(max_len)
        pages = pages_that_fit(c, each, self.weight_bytes, step, self.device)
        host_pages = (c.kv_offload_memory_bytes or 0) // each if each else 0  # pinning takes seconds: none unless asked for
        return Capacity(page_size, pages, c.max_num_seqs, min(max_len, pages * page_size), self.weight_bytes, host_pages)

    def _profile(self, max_len: int) -> int:
        """Bytes that the largest step takes beside weights and cache: measured by running it on nobody's rows."""
        self._allocate(0, self.config.max_num_seqs, min(max_len, 1024))
        torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_allocated(self.device)
        self._forward_mixed(self._most)
        self._head_and_sample(self.config.max_num_seqs)
        torch.cuda.synchronize(self.device)
        step = torch.cuda.max_memory_allocated(self.device) - before
        self.caches, self.tiles = [], None
        torch.cuda.empty_cache()
        return step

    def start(self, pages: int, slots: int, max_len: int, host_pages: int = 0) -> None:
        """Allocates everything that outlives a step, compiles by running the largest shapes, then captures."""
        self._allocate(pages, slots, max_len)
        self._graphs = Graphs(self.stream, self.config.enforce_eager)
        self._decode_buckets, self._token_buckets = decode_buckets(slots), token_buckets(self._most)
        for work in (lambda: self._forward_mixed(self._most), lambda: self._forward_decode(slots)):
            work()
            self._head_and_sample(slots)
        torch.cuda.synchronize(self.device)
        self._graphs.capture("tokens", self._token_buckets, self._forward_mixed)
        self._graphs.capture("decode", self._decode_buckets, self._forward_decode)
        self._graphs.capture("sample", self._decode_buckets, self._head_and_sample)
        torch.cuda.synchronize(self.device)
        self._steps = int(self.counter.item())
        if self.symmetric.fault.item():
            raise ConfigError("the ranks did not meet within 20 s while they warmed up; one of them was far slower to compile")
        self._host = HostPages(host_pages, self.caches)
        self.copy_seconds = self._host.seconds()

    def _allocate(self, pages: int, slots: int, max_len: int) -> None:
        shape, page_size, device = self.model.cache, self.page_size, self.device
        size = (pages + 1, shape.heads, page_size, shape.head_dim)
        make = lambda: torch.zeros(size, dtype=self.ops.dtype, device=device)
        self.caches = [(make(), make()) for _ in range(shape.layers)]
        self.tiles = self.ops.tile_caches(self.caches, page_size)
        self.slots, self.nobody = slots, slots
        self.tables = CudaTables(slots, max_len, page_size, device)
        self.layout = Layout(self._most, slots, -(-self._most // ROWS) + min(slots, self._most) + SPARE)
        self.inputs = StepInputs(self.layout, self.ops.cutter(self.model.layers[0].attention.heads.num_q_heads), device)
        self.inputs.slots.fill_(self.nobody)
        self.inputs.sample_slot.fill_(self.nobody)
        self.everyone = torch.full((1,), 1 << 30, dtype=torch.int32, device=device)
        self.hidden = torch.zeros((slots, self.model.config.hidden), dtype=self.ops.dtype, device=device)
        self.ring = torch.zeros((DEPTH, slots + 1), dtype=torch.int32, device=device)
        self.counter = torch.zeros(1, dtype=torch.int32, device=device)
        self.scratch = self.ops.scratch(slots, shape.heads, shape.head_dim)
        self.prompt_scratch = self.ops.prompt_scratch(shape.head_dim)
        parts = split_evenly(self.model.vocab, self.shard.size)
        self.sampler = CudaSampler(
            self.tables, self.inputs, self.symmetric, self.model.vocab, parts, self.ring, self.counter, self.model.logits,
            self.ops.barrier,
        )  # fmt: skip
        self._free = collections.deque(
            LaunchBuffers(slots * self.tables.columns, self.layout.size, slots + 1) for _ in range(DEPTH)
        )  # fmt: skip
        self._ends = itertools.cycle([torch.cuda.Event(enable_timing=True) for _ in range(2 * DEPTH)])
        self._plain = np.ones(slots, bool)
        self._resident: tuple[np.ndarray, bool] | None = None  # the decode rows that the device holds; whether all are plain
        self._pending: tuple[LaunchBuffers, Batch] | None = None

    # --- the work of a step, captured or not

    def _step(self, tokens: int, decode_rows: int, prompts: bool, decodes: Tensor) -> CudaStep:
        i = self.inputs
        return CudaStep(
            i.ids[:tokens], i.positions[:tokens], i.slots[:tokens], self.tables.pages, self.caches, self.tiles,
            self.scratch, self.prompt_scratch, self.page_size, decode_rows, decodes, prompts, i.parts, i.counts[1:3],
        )  # fmt: skip

    def _forward_decode(self, rows: int) -> None:
        i, t = self.inputs, self.tables
        decode_prepare_kernel[(-(-rows // 128),)](
            i.slots, t.next, t.tokens, i.ids, i.positions, i.sample_token, i.sample_slot, i.sample_position, rows,
            t.tokens.stride(0), B=128,
        )  # fmt: skip
        self._gather(self._forward(self._step(rows, rows, False, self.everyone)), rows)

    def _forward_mixed(self, tokens: int) -> Tensor:
        i, t = self.inputs, self.tables
        ids_kernel[(-(-tokens // 128),)](i.slots, i.positions, t.tokens, i.ids, tokens, t.tokens.stride(0), B=128)
        hidden = self._forward(self._step(tokens, min(self.slots, tokens), True, i.counts[0:1]))
        self._gather(hidden, self.slots)
        return hidden

    def _forward(self, step: CudaStep) -> Tensor:
        self.ops.begin(step)
        return self.model.forward(step)

    def _gather(self, hidden: Tensor, rows: int) -> None:
        width = hidden.shape[1]
        gather_kernel[(rows, -(-width // 1024))](hidden, self.inputs.sample_token, self.hidden, H=width, B=1024)

    def _head_and_sample(self, rows: int) -> None:
        """The output layer, this rank's best of each row, and the exchange; for rows that need nothing else."""
        self.sampler.sample(self.model.logits(self.hidden[:rows]), rows)

    # --- the interface

    def admit(self, slot: int, request: Request) -> None:
        self._plain[slot] = request.sampling.plain
        self.sampler.admit(slot, request)
        self.tables.admit(slot, request)

    def offload(self, pages: tuple[int, ...], host: tuple[int, ...]) -> None:
        self._host.save(pages, host)

    def restore(self, host: tuple[int, ...], pages: tuple[int, ...]) -> None:
        self._host.load(host, pages)

    def launch(self, batch: Batch) -> None:
        self.launch_forward(batch)
        self.launch_sample(batch.seq, {}, frozenset())

    def launch_forward(self, batch: Batch) -> None:
        flight = self._free.popleft()
        flight.seq, flight.extras, flight.masked = batch.seq, None, frozenset()
        flight.at = time.monotonic()
        flight.ended = next(self._ends)
        flight.started.record(self.stream)
        self.tables.write_pages(batch.pages, flight.buffers)
        rows = len(batch.slots)
        if batch.decodes == rows:
            self._launch_decode(batch, rows, flight)
        else:
            self._launch_mixed(batch, flight)
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
        hidden = self._forward_mixed(size)
        if judged:
            flight.extras = self.sampler.judge(hidden, judged)

    def launch_sample(self, seq: int, masks: dict[int, np.ndarray], discarded: frozenset[int]) -> None:
        assert self._pending is not None
        (flight, batch), self._pending = self._pending, None
        assert flight.seq == seq
        if self._resident is not None:
            flight.samples, plain = len(batch.slots), self._resident[1]
        else:
            slots = batch.slots[batch.samples]
            flight.samples, plain = len(slots), bool(self._plain[slots].all())
        if flight.samples:
            self._sample(flight, batch, masks, plain)
        flight.ended.record(self.stream)
        with torch.cuda.stream(self._side):
            self._side.wait_event(flight.ended)
            if flight.samples:
                place = (self._steps - 1) % DEPTH
                flight.buffers.outcome.copy_(self.ring[place], non_blocking=True)
            if flight.extras is not None:
                flight.extras.bring_home()
            flight.arrived.record(self._side)
        self._flying.append(flight)

    def _sample(self, flight: LaunchBuffers, batch: Batch, masks: dict[int, np.ndarray], plain: bool) -> None:
        bucket = padded(self._decode_buckets, flight.samples)
        assert bucket is not None
        self._steps += 1
        if plain and not masks:
            self._graphs.run("sample", bucket)
            return
        if masks:
            flight.masked = frozenset(i for i, slot in enumerate(batch.slots[batch.samples].tolist()) if slot in masks)
        logits = self.model.logits(self.hidden[:bucket])
        flight.extras = self.sampler.sample_each(logits, batch, masks, flight.samples, flight.extras)

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
        """Where a step takes long, tells the board to how many meetings of the ranks this one's kernels have come.

        Of ranks that wait for one another, the one with the fewest is the one that hangs. The copy has a stream of its own, so
        it does not wait for the step.
        """
        now = time.monotonic()
        if self.board is None or now < max(flight.at, self._looked_at) + LONG or not self._look.query():
            return
        self.board.set("collective", int(self._meetings.numpy()[0]))
        self._looked_at = now
        with torch.cuda.stream(self._look):
            self._meetings.copy_(self.symmetric.counts[:1], non_blocking=True)

    def _outcome(self, flight: LaunchBuffers) -> Outcome:
        view = flight.buffers.outcome_view
        if flight.samples and view[-1]:
            raise StepFailed("a rank did not arrive at a sum; this one stopped waiting for it")
        tokens = view[: flight.samples].copy()
        milliseconds = flight.started.elapsed_time(flight.ended)
        outcome = Outcome(flight.seq, tokens, seconds=milliseconds * 1e-3)
        if flight.samples and tokens.min() < 0:
            for i in np.flatnonzero(tokens < 0).tolist():
                nothing = sampler.DEAD_END if i in flight.masked else sampler.NO_TOKEN
                outcome.errors[i] = nothing if tokens[i] == NO_TOKEN else sampler.NOT_FINITE
            np.maximum(tokens, -1, out=tokens)
        if flight.extras is not None:
            flight.extras.add_to(outcome)
        if self.board is not None:
            self._span(flight, int(milliseconds * 1e6))
        return outcome

    def _span(self, flight: LaunchBuffers, length: int) -> None:
        """The step's place on the host's clock: lengths and gaps are the device's, anchored when an idle one resumed."""
        assert self.board is not None
        now = time.monotonic_ns()
        end = now
        if self._clock is not None:
            last, at = self._clock
            side_messages = at + int(last.elapsed_time(flight.ended) * 1e6)
            end = side_messages if abs(side_messages - now) < 5_000_000 else now
        self.board.device_span(end - length, end, flight.seq)
        self._clock = flight.ended, end

    def fileno(self) -> None:
        """Outcomes are polled: a query costs a microsecond, waking a thread tens."""
        return None

    def close(self) -> None:
        torch.cuda.synchronize(self.device)
        self._graphs.clear()
        self.symmetric.close()


def build_cuda(
    config: EngineConfig, model_path: str, rank: int, size: int, collective: int, board: DeviceProgress | None
) -> tuple[Executor, dict]:
    """One rank's executor and the model's config. `collective` is the memory through which the ranks agree where to meet."""
    from slipstream.weights.checkpoint import open_checkpoint

    # multicast needs rights that shared hosts do not give
    os.environ |= {"TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NCCL_NVLS_ENABLE": "0", "NVSHMEM_DISABLE_NVLS": "1"}
    device = choose_device(rank, size)
    meeting = ""
    if size > 1:
        room = os.fstat(collective).st_size - SharedMemory.required_bytes(size, 0)
        talk = SharedMemory(collective, rank, size, room // (2 * size) // 4096 * 4096)
        mine = os.path.join(tempfile.mkdtemp(prefix="slipstream-"), "meeting") if rank == 0 else ""
        meeting = talk.all_gather_bytes(mine.encode())[0].decode()
    checkpoint = open_checkpoint(model_path, config.load_format, config.seed)
    return CudaExecutor(checkpoint, config, Shard(rank, size), device, meeting, board), checkpoint.config
