"""The slot tables of the CUDA device and the inputs of a step. Only queued work writes the device tables.

Slot `slots` belongs to no request (`nobody`). Padding rows name it. Its page tables are all zeros, so padding rows write into
page 0 and read no request's data. Host buffers are pinned, and each belongs to one launch (`StepBuffers`). So no buffer is
written while a copy still reads it.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from slipstream.log.batch import Batch
from slipstream.log.caches import Limits
from slipstream.log.request import Request
from slipstream.ops.cuda.launch import cdiv
from slipstream.ops.cuda.prepare import pages_kernel
from slipstream.ops.cuda.prompt_blocks import CHUNK_COLUMNS, COLUMNS, ROW_COLUMNS, Cutter, cut_chunks
from slipstream.ops.sampling import mix

_PAGES_TILE = 256
_U64 = 0xFFFFFFFFFFFFFFFF


def pinned(count: int) -> Tensor:
    return torch.zeros(count, dtype=torch.int32, pin_memory=True)


def round_up(n: int, unit: int) -> int:
    return -(-n // unit) * unit


class StepBuffers:
    """One launch's pinned memory: changes of page tables, the step's rows, and its outcome."""

    def __init__(self, pages: int, inputs: int, outcome: int):
        self.pages, self.inputs, self.outcome = pinned(4 * pages), pinned(inputs), pinned(outcome)
        self.pages_view = self.pages.numpy().reshape(-1, 4)
        self.inputs_view = self.inputs.numpy()
        self.outcome_view = self.outcome.numpy()


class CudaTables:
    """Loop-carried data of every slot."""

    def __init__(self, limits: Limits, device: torch.device):
        slots, max_len = limits.slots, limits.max_len
        self.slots, self.max_len, self.width = slots, max_len, limits.width
        self.columns = round_up(max_len // limits.page_size + 1, 16)
        self.places = len(limits.tables) * slots * self.columns  # the most places that a step can write
        options = {"dtype": torch.int32, "device": device}
        self.tokens = torch.zeros((slots + 1, round_up(max_len + 1, 16)), **options)
        self.pages = torch.zeros((len(limits.tables), slots + 1, self.columns), **options)
        self.by_table = list(self.pages)
        self.next = torch.zeros(slots + 1, **options)  # the first position that the slot's next decode row computes
        self.limits = torch.zeros(slots + 1, **options)  # tokens of prompt and answer; read where rows verify drafts
        self.temperatures = torch.zeros(slots + 1, dtype=torch.float32, device=device)
        self.bases = torch.zeros(slots + 1, dtype=torch.int64, device=device)  # of the draw's key: everything but the position
        self._places = torch.zeros(4 * self.places, **options)
        self._prompts = [pinned(max_len + 4) for _ in range(slots)]
        self._sent = [torch.cuda.Event() for _ in range(slots)]

    def init_slot(self, slot: int, request: Request) -> None:
        """Queues a new request's prompt and parameters, and clears the slot's page tables.

        The slot's host buffer is reused if the last copy from it has ended. Otherwise a new one is pinned, which takes
        milliseconds.
        """
        n, sampling = request.prompt_len, request.sampling
        base = mix(mix(sampling.seed & _U64) ^ sampling.choice)
        if not self._sent[slot].query():
            self._prompts[slot], self._sent[slot] = pinned(self.max_len + 4), torch.cuda.Event()
        host = self._prompts[slot][: n + 4]
        view = host.numpy()
        view[:2] = np.array([base], np.uint64).view(np.int32)
        view[2:3] = np.array([sampling.temperature], np.float32).view(np.int32)
        view[3] = n + request.max_tokens
        view[4:] = np.frombuffer(request.prompt, "<i4")
        self.tokens[slot, :n].copy_(host[4:], non_blocking=True)
        self.bases[slot : slot + 1].copy_(host[:2].view(torch.int64), non_blocking=True)
        self.temperatures[slot : slot + 1].copy_(host[2:3].view(torch.float32), non_blocking=True)
        if self.width > 1:
            self.limits[slot : slot + 1].copy_(host[3:4], non_blocking=True)
        self._sent[slot].record()
        self.pages[:, slot].zero_()

    def write_pages(self, places: np.ndarray, buffers: StepBuffers) -> None:
        """Queues pages[table, slot, column] = page for int32 [n, 4] places (table, slot, column, page)."""
        n = len(places)
        if n:
            buffers.pages_view[:n] = places
            self._places[: 4 * n].copy_(buffers.pages[: 4 * n], non_blocking=True)
            pages_kernel[(cdiv(n, _PAGES_TILE),)](
                self._places, self.pages, n, self.pages.stride(0), self.columns, B=_PAGES_TILE
            )  # fmt: skip


@dataclass(frozen=True)
class Layout:
    """The place of each column of a step's inputs in one int32 buffer, so that one copy moves them all."""

    tokens: int
    judged: int  # tokens
    parts: int
    rows: int = 0  # prompt rows, and ...
    chunks: int = 0  # ... the chunks that layers with state cut them into; none without such layers

    @property
    def _sizes(self) -> tuple[int, ...]:
        return (
            self.tokens, self.tokens, self.judged, self.judged, self.judged, COLUMNS * self.parts, ROW_COLUMNS * self.rows,
            CHUNK_COLUMNS * self.chunks, 6,
        )  # fmt: skip

    @property
    def size(self) -> int:
        return sum(self._sizes)

    def split(self, buffer):
        """Views (slots, positions, sample token, sample slot, sample position, parts, rows, chunks, counts) of a NumPy or torch
        buffer.
        """
        ends = np.cumsum(self._sizes).tolist()
        return tuple(buffer[end - size : end] for size, end in zip(self._sizes, ends, strict=True))


class StepInputs:
    """The device's columns of a step. counts: tokens of decode rows, the result of `Cutter.cut`, prompt rows and chunks, 0.

    A row has `width` places among the judged tokens. Places that it does not use get the slot `nobody`.
    """

    def __init__(self, layout: Layout, cutter: Cutter, width: int, device: torch.device):
        self.layout, self.cutter, self.width = layout, cutter, width
        self.buffer = torch.zeros(layout.size, dtype=torch.int32, device=device)
        (
            self.slots, self.positions, self.sample_token, self.sample_slot, self.sample_position, self.parts, rows, chunks,
            self.counts,
        ) = layout.split(self.buffer)  # fmt: skip
        self.rows, self.chunks = rows.view(-1, ROW_COLUMNS), chunks.view(-1, CHUNK_COLUMNS)
        self.ids = torch.zeros(layout.tokens, dtype=torch.int32, device=device)
        # the slots of the rows of a pure decode step; `slots` has one value for each token
        self.row_slots = self.slots if width == 1 else torch.zeros(layout.judged // width, dtype=torch.int32, device=device)

    def upload_slots(self, slots: np.ndarray, padded: int, nobody: int, buffers: StepBuffers) -> None:
        """Queues the rows of a pure decode step. All other inputs come from the tables."""
        view = buffers.inputs_view
        view[: len(slots)] = slots
        view[len(slots) : padded] = nobody
        self.row_slots[:padded].copy_(buffers.inputs[:padded], non_blocking=True)

    def upload_step(self, batch: Batch, padded: int, nobody: int, buffers: StepBuffers) -> None:
        """Queues all columns of a step with prompt chunks, padded to `padded` tokens."""
        view = self.layout.split(buffers.inputs_view)
        slots, positions, sample_token, sample_slot, sample_position, parts, rows, chunks, counts = view
        ends = np.cumsum(batch.counts)
        firsts = ends - batch.counts
        total = int(ends[-1])
        slots[:total] = np.repeat(batch.slots, batch.counts)
        positions[:total] = np.arange(total, dtype=np.int32) + np.repeat(batch.starts - firsts, batch.counts)
        slots[total:padded] = nobody
        positions[total:padded] = 0
        judged, column = batch.judged, np.arange(self.width)
        n = len(judged) * self.width
        used = column < batch.sampled[judged, None]
        at = np.where(used, (ends - batch.sampled)[judged, None] + column, 0).reshape(-1)
        sample_token[:n] = at
        sample_slot[:n] = np.where(used, batch.slots[judged, None], nobody).reshape(-1)
        sample_position[:n] = positions[at] + 1
        sample_token[n:], sample_slot[n:], sample_position[n:] = 0, nobody, 0
        prompts = np.stack([batch.slots, batch.starts, firsts, batch.counts], 1)[batch.decodes :]
        decode_tokens = firsts[batch.decodes]
        counts[:3] = decode_tokens, *self.cutter.cut(prompts.tolist(), parts.reshape(-1, COLUMNS))
        if self.layout.rows:
            counts[3:5] = cut_chunks(prompts, rows.reshape(-1, ROW_COLUMNS), chunks.reshape(-1, CHUNK_COLUMNS))
        self.buffer.copy_(buffers.inputs, non_blocking=True)
