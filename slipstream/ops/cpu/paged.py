"""Paged attention in plain PyTorch, and the layout of a step that it needs.

The cache of a layer is one tensor [pages + 1, block, 2 * key heads, head_dim]: keys, then values, of a token side by side, so
that one write and one gather serve both. Page 0 is the null page: nobody's, always zero here, what padding columns read.

Rows of one token attend together over gathered pages; a longer row attends to what its request had before (gathered, no mask)
and to itself (causal), and the two are joined by their log-sum-exp, so no mask of tokens times context is ever made.
"""

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from slipstream.ops.interface import Attention

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_PAST_TOKENS = 64  # what a chunk reads of the cache is padded to a multiple of this
_WIDE = 16  # pages from which rows of very different lengths are no longer padded to one length


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
    mask: Tensor  # [n, 1, 1, width * block] 0 or -inf


@dataclass(frozen=True, eq=False)
class Chunk:
    """A row of several tokens: tokens [first, last) of the step, with `start` tokens of its request in the cache before."""

    first: int
    last: int
    start: int
    pages: Tensor  # int64 [n]: those of the tokens before, then the null page up to a multiple of `_PAST_TOKENS`
    mask: Tensor | None  # [1, 1, 1, n * block] 0 or -inf; None where the tokens before fill their pages


@dataclass(eq=False)
class PagedStep:
    """One step as the plain operations read it (an `ops.interface.Step`)."""

    ids: Tensor  # int64 [T]
    positions: Tensor  # int64 [T]
    caches: list[Tensor]  # per layer [pages + 1, block, 2 keys, head_dim]
    write_at: Tensor  # int64 [T]: page * block + offset of each token
    singles: list[Singles]
    chunks: list[Chunk]
    rotations: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)  # by id of the rotary table


def build_step(
    ids: np.ndarray,
    slots: np.ndarray,
    starts: np.ndarray,
    counts: np.ndarray,
    block_table: np.ndarray,
    caches: list[Tensor],
    dtype: torch.dtype,
    page_size: int,
) -> PagedStep:
    """The layout of a step: rows as in `log.batch.Batch`, `ids` their tokens in a row, `block_table` [slots, columns]."""
    of_row = np.repeat(np.arange(len(slots)), counts)
    firsts = np.cumsum(counts) - counts
    positions = np.arange(len(of_row)) - firsts[of_row] + starts[of_row]
    column, offset = np.divmod(positions, page_size)
    write_at = block_table[slots[of_row], column].astype(np.int64) * page_size + offset
    one = np.flatnonzero(counts == 1)
    return PagedStep(
        ids=torch.from_numpy(ids.astype(np.int64)),
        positions=torch.from_numpy(positions.astype(np.int64)),
        caches=caches,
        write_at=torch.from_numpy(write_at),
        singles=_singles(one, firsts, slots, starts, block_table, dtype, page_size, len(one) == len(of_row)),
        chunks=[
            _chunk(int(f), int(n), int(s), block_table[slot], dtype, page_size)
            for f, n, s, slot in zip(firsts, counts, starts, slots, strict=True)
            if n > 1
        ],
    )


def _chunk(first: int, count: int, start: int, pages: np.ndarray, dtype: torch.dtype, page_size: int) -> Chunk:
    filled, grain = -(-start // page_size), max(1, _PAST_TOKENS // page_size)
    past = np.zeros(-(-filled // grain) * grain, np.int64)
    past[:filled] = pages[:filled]
    mask = None
    if start < len(past) * page_size:
        mask = torch.zeros(1, 1, 1, len(past) * page_size, dtype=dtype)
        mask[..., start:] = -torch.inf
    return Chunk(first, first + count, start, torch.from_numpy(past), mask)


def _singles(one, firsts, slots, starts, block_table, dtype, page_size, alone) -> list[Singles]:
    """Groups of rows of one token: one group, unless padding to the longest would at least double some rows' reads."""
    need = starts[one] // page_size + 1
    groups = []
    left = np.argsort(-need, kind="stable") if len(one) and need.max() > _WIDE else np.arange(len(one))
    while len(left):
        widest = int(need[left].max())
        close = need[left] * 2 > widest if widest > _WIDE else np.ones(len(left), bool)
        rows, left = one[left[close]], left[~close]
        width = np.arange(widest)
        pages = np.where(width < (starts[rows] // page_size + 1)[:, None], block_table[slots[rows], :widest], 0)
        mask = np.where(np.arange(widest * page_size) <= starts[rows][:, None], np.float32(0), np.float32(-np.inf))
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
    cache = step.caches[spec.layer]
    cache.view(-1, 2 * keys, dim).index_copy_(0, step.write_at, x[:, num_q_heads:])
    if len(step.singles) == 1 and step.singles[0].rows is None:
        return _attend_singles(x, spec, step.singles[0], cache)
    out = x.new_empty(x.shape[0], num_q_heads * dim)
    for group in step.singles:
        assert group.rows is not None
        out.index_copy_(0, group.rows, _attend_singles(x.index_select(0, group.rows), spec, group, cache))
    for chunk in step.chunks:
        _attend_chunk(x[chunk.first : chunk.last], spec, chunk, cache, out[chunk.first : chunk.last])
    return out


def _attend_singles(x: Tensor, spec: Attention, group: Singles, cache: Tensor) -> Tensor:
    """The queries of one key head stand as rows of one attention, so keys need no expansion. x [n, any heads, head_dim]."""
    n, keys, dim = group.count, spec.heads.num_kv_heads, spec.head_dim
    share, row = spec.heads.num_q_heads // keys, 2 * keys * dim
    past = cache.index_select(0, group.pages)
    length = past.shape[0] * past.shape[1] // n
    size, stride = (n, keys, length, dim), (length * row, dim, row, 1)
    q = x.as_strided((n, keys, share, dim), (x.stride(0), share * dim, dim, 1))
    k, v = past.as_strided(size, stride), past.as_strided(size, stride, keys * dim)
    out, _ = _flash(q, k, v, 0.0, False, attn_mask=group.mask, scale=spec.scale)
    return out.reshape(n, -1)


def _attend_chunk(x: Tensor, spec: Attention, chunk: Chunk, cache: Tensor, out: Tensor) -> None:
    count, num_q_heads, keys, dim = x.shape[0], spec.heads.num_q_heads, spec.heads.num_kv_heads, spec.head_dim
    n, share = padded_rows(count), num_q_heads // keys
    if n > count:
        x = torch.cat([x, x[: n - count]])  # after the last row, where no row looks
    q = x[:, :num_q_heads].transpose(0, 1)  # [queries, n, dim]
    k, v = (part.transpose(0, 1).repeat_interleave(share, 0) for part in (x[:, num_q_heads:-keys], x[:, -keys:]))
    own, own_lse = _flash(q[None], k[None], v[None], 0.0, True, scale=spec.scale)
    if chunk.start:
        past = cache.index_select(0, chunk.pages).view(-1, 2 * keys, dim)
        past[chunk.start :] = 0  # what lies there may be another's, and not finite
        past = past.transpose(0, 1)
        rows = q.reshape(1, keys, share * n, dim)
        old, old_lse = _flash(rows, past[None, :keys], past[None, keys:], 0.0, False, attn_mask=chunk.mask, scale=spec.scale)
        own = _join(
            own, own_lse.view(1, num_q_heads, n, 1), old.reshape(1, num_q_heads, n, dim), old_lse.reshape(1, num_q_heads, n, 1)
        )
    out.view(count, num_q_heads, dim).copy_(own[0, :, :count].transpose(0, 1))


def _join(a: Tensor, a_lse: Tensor, b: Tensor, b_lse: Tensor) -> Tensor:
    """The attention over two disjoint sets of keys from that over each."""
    share = torch.sigmoid(a_lse - b_lse)
    return torch.lerp(b.to(share.dtype), a.to(share.dtype), share)
