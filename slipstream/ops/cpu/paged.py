"""Paged attention in plain PyTorch, and the layout of a step that it needs.

The cache of a layer is one tensor [pages + 1, page_size, 2 * key heads, head_dim]: keys, then values, of a token side by
side, so that one write and one gather serve both. Page 0 is the null page. It belongs to no request and is always zero here;
padding columns read it.

Rows of one token attend together over gathered pages. A longer row attends to the earlier tokens of its request (gathered,
without a mask) and to itself (causal). The two results are joined by their log-sum-exp, so a mask of tokens times context is
never made. In a layer with a window, a longer row attends under a mask to the pages that its window reaches.
"""

import functools
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from slipstream.ops.layers import Attention

flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_PAST_TOKENS = 64  # the cached tokens that a chunk reads are padded to a multiple of this
_WIDE = 16  # pages; from here on, rows of very different lengths are not padded to one length


def padded_rows(rows: int) -> int:
    """The number of rows that is computed in place of `rows`: the same up to 16, eight sizes an octave above.

    oneDNN keeps the kernels of each size that it has met, many of them for ever: with prompts of mixed lengths the process
    would grow without end. The planner's step sizes (`schedule/budget.py`) are among these, so its full steps need no padding.
    """
    grain = 1 << max(0, (rows - 1).bit_length() - 4)
    return -(-rows // grain) * grain


@dataclass(frozen=True, eq=False)
class Singles:
    """Rows of one token that are padded to one length. `rows` index the step's tokens; None where they are all of them."""

    rows: Tensor | None  # int64 [n]
    count: int
    pages: Tensor  # int64 [n * width]
    mask: Tensor  # [n, 1, 1, width * page_size] 0 or -inf


@dataclass(frozen=True, eq=False)
class Chunk:
    """A row of several tokens: tokens [first, last) of the step, of a request with `start` tokens in the cache before."""

    first: int
    last: int
    start: int
    pages: Tensor  # int64 [n]: those that hold cached positions [begin, start), null pages up to a multiple of `_PAST_TOKENS`
    begin: int  # 0, or the first position of the first page that the window reaches
    mask: Tensor | None  # [1, 1, 1, n * page_size] 0 or -inf; None where the cached positions fill the pages


@dataclass(frozen=True, eq=False)
class TableRows:
    """A step's rows as the layers of one page table see them."""

    window: int  # tokens that a row reads at most, 0: all
    write_at: Tensor  # int64 [T]: page * page_size + offset of each token
    singles: list[Singles]
    chunks: list[Chunk]


@dataclass(eq=False)
class PagedStep:
    """One step as the plain operations read it (an `ops.interface.ForwardStep`)."""

    ids: Tensor  # int64 [T]
    positions: Tensor  # int64 [T]
    slots: Tensor  # int64 [T]
    rows: list[tuple[int, int, int]]  # (slot, first, last): tokens [first, last) of the step are the slot's
    caches: list[tuple[Tensor, ...]]  # by layer: pages, or the arrays [slots + 1, ...] of its state
    tables: list[TableRows]
    verifies: int = 0  # the first rows are this many that verify drafts, if one of them has any
    kept: list[Any] = field(default_factory=list[Any])  # `rewind.Kept` of recurrent layers
    parts: list[tuple[Tensor, "PagedStep"]] = field(default_factory=list[tuple[Tensor, "PagedStep"]])  # of `rewind.by_token`
    rotations: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)  # by id of the rotary table

    @functools.cached_property
    def singles(self) -> tuple[Tensor, Tensor]:
        """Rows of one token: int64 [n] where they stand in the step, and [n] their slots."""
        at = torch.tensor([first for _, first, last in self.rows if last - first == 1], dtype=torch.int64)
        return at, self.slots.index_select(0, at)

    @functools.cached_property
    def chunks(self) -> list[tuple[int, int, int]]:
        """The `rows` of several tokens."""
        return [row for row in self.rows if row[2] - row[1] > 1]


def build_step(
    ids: np.ndarray,
    slots: np.ndarray,
    starts: np.ndarray,
    counts: np.ndarray,
    page_tables: np.ndarray,
    windows: tuple[int, ...],
    caches: list[tuple[Tensor, ...]],
    dtype: torch.dtype,
    page_size: int,
    decodes: int = 0,
) -> PagedStep:
    """The layout of a step: rows as in `log.batch.Batch`, `ids` their tokens in a row.

    `page_tables` [tables, slots, columns], each with its window, or 0. `decodes`: the first rows are this many decode rows;
    those of several tokens verify drafts.
    """
    of_row = np.repeat(np.arange(len(slots)), counts)
    ends = np.cumsum(counts)
    firsts = ends - counts
    positions = np.arange(len(of_row)) - firsts[of_row] + starts[of_row]
    of_slot = slots[of_row]
    return PagedStep(
        ids=torch.from_numpy(ids.astype(np.int64)),
        positions=torch.from_numpy(positions.astype(np.int64)),
        slots=torch.from_numpy(of_slot.astype(np.int64)),
        rows=list(zip(slots.tolist(), firsts.tolist(), ends.tolist(), strict=True)),
        caches=caches,
        tables=[
            _table_rows(slots, starts, counts, firsts, of_slot, positions, table, window, dtype, page_size)
            for table, window in zip(page_tables, windows, strict=True)
        ],
        verifies=decodes if (counts[:decodes] > 1).any() else 0,
    )


def _table_rows(slots, starts, counts, firsts, of_slot, positions, table, window, dtype, page_size) -> TableRows:
    column, offset = np.divmod(positions, page_size)
    write_at = table[of_slot, column].astype(np.int64) * page_size + offset
    one = np.flatnonzero(counts == 1)
    begins = np.maximum(starts - window + 1, 0) // page_size if window else np.zeros(len(starts), np.int64)  # columns
    return TableRows(
        window=window,
        write_at=torch.from_numpy(write_at),
        singles=_singles(one, firsts, slots, starts, begins, table, window, dtype, page_size, len(one) == len(of_slot)),
        chunks=[
            _chunk(f, n, s, table[slot, b : -(-s // page_size)], b * page_size, dtype, page_size)
            for f, n, s, slot, b in zip(*(c.tolist() for c in (firsts, counts, starts, slots, begins)), strict=True)
            if n > 1
        ],
    )


def _chunk(first: int, count: int, start: int, pages: np.ndarray, begin: int, dtype: torch.dtype, page_size: int) -> Chunk:
    grain = max(1, _PAST_TOKENS // page_size)
    padded = np.zeros(-(-len(pages) // grain) * grain, np.int64)
    padded[: len(pages)] = pages
    mask = None
    if start - begin < len(padded) * page_size:
        mask = torch.zeros(1, 1, 1, len(padded) * page_size, dtype=dtype)
        mask[..., start - begin :] = -torch.inf
    return Chunk(first, first + count, start, torch.from_numpy(padded), begin, mask)


def _singles(one, firsts, slots, starts, begins, table, window, dtype, page_size, alone) -> list[Singles]:
    """Groups of rows of one token: one group, unless padding to the longest would at least double some rows' reads."""
    need = starts[one] // page_size + 1 - begins[one]
    groups = []
    left = np.argsort(-need, kind="stable") if len(one) and need.max() > _WIDE else np.arange(len(one))
    while len(left):
        widest = int(need[left].max())
        close = need[left] * 2 > widest if widest > _WIDE else np.ones(len(left), bool)
        picked, left = left[close], left[~close]
        rows, columns = one[picked], np.arange(widest)
        at = np.arange(widest * page_size)
        if window:
            found = table[slots[rows, None], np.minimum(begins[rows, None] + columns, table.shape[1] - 1)]
            at = at + begins[rows, None] * page_size
            seen = (at <= starts[rows, None]) & (at > starts[rows, None] - window)
        else:
            found = table[slots[rows], :widest]
            seen = at <= starts[rows][:, None]
        pages = np.where(columns < need[picked][:, None], found, 0)
        mask = np.where(seen, np.float32(0), np.float32(-np.inf))
        whole = alone and len(rows) == len(one) and widest <= _WIDE
        groups.append(
            Singles(
                rows=None if whole else torch.from_numpy(firsts[rows].astype(np.int64)),
                count=len(rows),
                pages=torch.from_numpy(pages.astype(np.int64).reshape(-1)),
                mask=torch.from_numpy(mask)[:, None, None, :].to(dtype),
            )
        )
    return groups


def paged_attention(x: Tensor, spec: Attention, step: PagedStep) -> Tensor:
    """x [T, queries + 2 keys, head_dim], rotated; writes its keys and values, returns [T, queries * head_dim]."""
    num_q_heads, keys, dim = spec.heads.num_q_heads, spec.heads.num_kv_heads, spec.head_dim
    (cache,), table = step.caches[spec.cache], step.tables[spec.table]
    fresh = x[:, num_q_heads:].to(cache.dtype)
    cache.view(-1, 2 * keys, dim).index_copy_(0, table.write_at, fresh)
    if cache.dtype != x.dtype:  # a chunk reads of itself what later rows will read of it
        x[:, num_q_heads:] = fresh
    if len(table.singles) == 1 and table.singles[0].rows is None:
        return _attend_singles(x, spec, table.singles[0], cache)
    out = x.new_empty(x.shape[0], num_q_heads * dim)
    for group in table.singles:
        assert group.rows is not None
        out.index_copy_(0, group.rows, _attend_singles(x.index_select(0, group.rows), spec, group, cache))
    for chunk in table.chunks:
        attend = _attend_windowed if table.window else _attend_chunk
        attend(x[chunk.first : chunk.last], spec, chunk, cache, out[chunk.first : chunk.last], table.window)
    return out


def _attention(
    q: Tensor, k: Tensor, v: Tensor, spec: Attention, causal: bool = False, mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """q [n, heads, rows, head_dim] over k and v [n, heads, keys, head_dim]: the result, and its log-sum-exp [n, heads, rows].

    Causal: row i sees the keys up to the i-th.
    """
    if not spec.softcap:
        return flash(q, k, v, 0.0, causal, attn_mask=mask, scale=spec.scale)
    scores = torch.matmul(q.float(), k.float().transpose(-1, -2)).mul_(spec.scale / spec.softcap).tanh_().mul_(spec.softcap)
    if causal:
        scores.masked_fill_(torch.ones(scores.shape[-2:], dtype=torch.bool).triu_(1), -torch.inf)
    if mask is not None:
        scores += mask
    lse = scores.logsumexp(-1)
    return torch.matmul((scores - lse[..., None]).exp_().to(v.dtype), v), lse


def _sink(out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """Gives each head's sink its share of the softmax; out [..., head_dim], lse and sinks [...]."""
    return out * torch.sigmoid(lse - sinks).to(out.dtype)[..., None]


def _attend_singles(x: Tensor, spec: Attention, group: Singles, cache: Tensor) -> Tensor:
    """The queries of one key head stand as rows of one attention, so keys need no expansion. x [n, any heads, head_dim]."""
    n, keys, dim = group.count, spec.heads.num_kv_heads, spec.head_dim
    share, row = spec.heads.num_q_heads // keys, 2 * keys * dim
    past = cache.index_select(0, group.pages).to(x.dtype)
    length = past.shape[0] * past.shape[1] // n
    size, stride = (n, keys, length, dim), (length * row, dim, row, 1)
    q = x.as_strided((n, keys, share, dim), (x.stride(0), share * dim, dim, 1))
    k, v = past.as_strided(size, stride), past.as_strided(size, stride, keys * dim)
    out, lse = _attention(q, k, v, spec, mask=group.mask)
    if spec.sinks is not None:
        out = _sink(out, lse, spec.sinks.view(keys, share))
    return out.reshape(n, -1)


def padded_chunk(x: Tensor) -> Tensor:
    """The rows of a chunk and some more behind them, where no row of it looks."""
    return torch.cat([x, x[: padded_rows(len(x)) - len(x)]])


def _past(chunk: Chunk, cache: Tensor, x: Tensor) -> Tensor:
    """Cached keys and values [n, 2 * key heads, head_dim] of a chunk, from `begin` on; zeros where its own begin."""
    past = cache.index_select(0, chunk.pages).to(x.dtype).view(-1, *cache.shape[2:])
    past[chunk.start - chunk.begin :] = 0  # what lies there may be another's, and not finite
    return past


def _attend_chunk(x: Tensor, spec: Attention, chunk: Chunk, cache: Tensor, out: Tensor, _: int) -> None:
    num_q_heads, keys, dim = spec.heads.num_q_heads, spec.heads.num_kv_heads, spec.head_dim
    x = padded_chunk(x)
    n, share = x.shape[0], num_q_heads // keys
    q = x[:, :num_q_heads].transpose(0, 1)  # [queries, n, dim]
    k, v = (part.transpose(0, 1).repeat_interleave(share, 0) for part in (x[:, num_q_heads:-keys], x[:, -keys:]))
    own, lse = _attention(q[None], k[None], v[None], spec, causal=True)
    if chunk.start:
        past = _past(chunk, cache, x).transpose(0, 1)
        old, old_lse = _attention(
            q.reshape(1, keys, share * n, dim), past[None, :keys], past[None, keys:], spec, mask=chunk.mask
        )  # fmt: skip
        own, lse = join_parts(own, lse, old.reshape(own.shape), old_lse.reshape(lse.shape))
    _finish_chunk(own, lse, spec, out)


def _attend_windowed(x: Tensor, spec: Attention, chunk: Chunk, cache: Tensor, out: Tensor, window: int) -> None:
    """A chunk's tokens over the cached ones that the window of the first reaches, and over themselves."""
    num_q_heads, keys = spec.heads.num_q_heads, spec.heads.num_kv_heads
    x, past = padded_chunk(x), _past(chunk, cache, x)
    n, cached = len(x), chunk.start - chunk.begin
    both = torch.cat([past, x[:, num_q_heads:]]).transpose(0, 1)
    k, v = (part.repeat_interleave(num_q_heads // keys, 0) for part in (both[:keys], both[keys:]))
    own = torch.arange(cached, cached + n)  # positions after `begin`
    behind = own[:, None] - torch.cat([torch.arange(len(past)), own])
    hidden = (behind < 0) | (behind >= window)
    hidden[:, cached : len(past)] = True
    mask = torch.zeros(behind.shape, dtype=x.dtype).masked_fill_(hidden, -torch.inf)
    q = x[:, :num_q_heads].transpose(0, 1)
    found, lse = _attention(q[None], k[None], v[None], spec, mask=mask[None, None])
    _finish_chunk(found, lse, spec, out)


def _finish_chunk(found: Tensor, lse: Tensor, spec: Attention, out: Tensor) -> None:
    """Writes the first rows of found [1, queries, rows, head_dim] to out [count, queries * head_dim]."""
    if spec.sinks is not None:
        found = _sink(found, lse, spec.sinks[:, None])
    out.view(len(out), *found.shape[1::2]).copy_(found[0, :, : len(out)].transpose(0, 1))


def join_parts(a: Tensor, a_lse: Tensor, b: Tensor, b_lse: Tensor) -> tuple[Tensor, Tensor]:
    """The attention over two disjoint sets of keys, and its log-sum-exp, from that over each."""
    share = torch.sigmoid(a_lse - b_lse)[..., None]
    return torch.lerp(b.to(share.dtype), a.to(share.dtype), share), torch.logaddexp(a_lse, b_lse)
