"""Multi-head latent attention in plain PyTorch (DeepSeek-V2, arXiv:2405.04434, section 2.1), over pages of one vector a token.

A row of one token brings each head's query into the space of the cached vectors, which all heads then read as they are. For
many tokens it is cheaper to make each head's keys and values from the vectors first. A chunk does that for its own tokens, and
for the cached ones where it is long enough.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from slipstream.ops.cpu.paged import Chunk, PagedStep, Singles, flash, join_parts, padded_chunk
from slipstream.ops.layers import LatentAttention

_BLOCK_TOKENS = 2048  # cached tokens whose keys and values of all heads exist at a time; no block is padding alone


def latent_attention(q: Tensor, kv: Tensor, spec: LatentAttention, step: PagedStep) -> Tensor:
    """q [T, heads, nope_dim + rope_dim] and kv [T, latent_dim + rope_dim], normed and rotated, to [T, heads * value_dim].

    Writes kv into the cache.
    """
    (cache,), table = step.caches[spec.cache], step.tables[spec.table]
    fresh = kv.to(cache.dtype)
    cache.view(-1, kv.shape[1]).index_copy_(0, table.write_at, fresh)
    kv = fresh.to(kv.dtype)  # a chunk reads of itself what later rows will read of it
    out = q.new_empty(q.shape[0], spec.num_heads, spec.value_dim)
    for group in table.singles:
        if group.rows is None:
            out = _singles(q, spec, group, cache)
        else:
            out.index_copy_(0, group.rows, _singles(q.index_select(0, group.rows), spec, group, cache))
    for chunk in table.chunks:
        rows = slice(chunk.first, chunk.last)
        out[rows] = _chunk(q[rows], kv[rows], spec, chunk, cache)
    return out.reshape(q.shape[0], -1)


def _into_latent(q: Tensor, spec: LatentAttention) -> Tensor:
    """[n, heads, nope_dim + rope_dim] to [heads, n, latent_dim + rope_dim]: queries that read cached vectors as their keys."""
    q = q.transpose(0, 1)
    return torch.cat([torch.bmm(q[..., : spec.nope_dim], spec.key_up), q[..., spec.nope_dim :]], -1)


def _values(found: Tensor, spec: LatentAttention) -> Tensor:
    """Sums of cached vectors, [heads, n, latent_dim or more], to those of the heads' values, [heads, n, value_dim]."""
    return torch.bmm(found[..., : spec.latent_dim], spec.value_up.transpose(1, 2))


def _singles(q: Tensor, spec: LatentAttention, group: Singles, cache: Tensor) -> Tensor:
    """The heads' queries stand as rows of one attention of one head. [n, heads, value_dim]."""
    past = cache.index_select(0, group.pages).to(q.dtype).view(group.count, 1, -1, cache.shape[-1])
    rows = _into_latent(q, spec).transpose(0, 1)[:, None]
    found, _ = flash(rows, past, past, 0.0, False, attn_mask=group.mask, scale=spec.scale)
    return _values(found[:, 0].transpose(0, 1), spec).transpose(0, 1)


def _chunk(q: Tensor, kv: Tensor, spec: LatentAttention, chunk: Chunk, cache: Tensor) -> Tensor:
    """[count, heads, value_dim] of a chunk's rows: over its own tokens, then over the cached ones, a block at a time."""
    count = len(q)
    q, kv = padded_chunk(q), padded_chunk(kv)
    found, lse = _expanded(q, kv, spec, causal=True)
    if chunk.start:
        past = cache.index_select(0, chunk.pages).to(q.dtype).view(-1, cache.shape[-1])
        past[chunk.start :] = 0  # what lies there may be another's, and not finite
        attend = _expanded if _expands(count, spec) else _absorbed
        for at in range(0, len(past), _BLOCK_TOKENS):
            mask = None if chunk.mask is None else chunk.mask[..., at : at + _BLOCK_TOKENS]
            found, lse = join_parts(found, lse, *attend(q, past[at : at + _BLOCK_TOKENS], spec, mask=mask))
    return found[:, :count].transpose(0, 1)


def _expands(count: int, spec: LatentAttention) -> bool:
    """Whether `count` queries are so many that making keys and values costs less than reading longer vectors does."""
    saved = 2 * spec.latent_dim - spec.nope_dim - spec.value_dim  # products of a head, a query and a cached token
    return count * saved > spec.latent_dim * (spec.nope_dim + spec.value_dim)


def _expanded(
    q: Tensor, kv: Tensor, spec: LatentAttention, causal: bool = False, mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Attention over each head's own keys and values: [heads, n, value_dim], and its log-sum-exp [heads, n]."""
    latent, turned = kv[:, : spec.latent_dim], kv[:, spec.latent_dim :]
    heads = spec.num_heads
    up = torch.matmul(latent, torch.cat([spec.key_up, spec.value_up], 1).transpose(1, 2))  # [heads, tokens, nope + value]
    k = torch.cat([up[..., : spec.nope_dim], turned.expand(heads, -1, -1)], -1)
    v = up[..., spec.nope_dim :]
    width = max(k.shape[-1], v.shape[-1])  # the kernel has one width for both
    q, k, v = (F.pad(x, (0, width - x.shape[-1]))[None] for x in (q.transpose(0, 1), k, v))
    found, lse = flash(q, k, v, 0.0, causal, attn_mask=mask, scale=spec.scale)
    return found[0, ..., : spec.value_dim], lse[0]


def _absorbed(q: Tensor, kv: Tensor, spec: LatentAttention, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The same over the cached vectors as they are."""
    heads, n = spec.num_heads, len(q)
    rows = _into_latent(q, spec).view(1, 1, heads * n, -1)
    found, lse = flash(rows, kv[None, None], kv[None, None], 0.0, False, attn_mask=mask, scale=spec.scale)
    return _values(found.view(heads, n, -1), spec), lse.view(heads, n)
