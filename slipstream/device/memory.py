"""Arithmetic of a rank's memory that every device shares: dtypes, and how the memory of the caches is divided."""

import bisect
from dataclasses import dataclass
from functools import cached_property

import torch

from slipstream.log.caches import CacheLayout, Limits, PerSlot, TableLimits, state_bytes, table_values, windows

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
MAX_PAGES = 1 << 20  # of one table, where memory sets no bound
SNAPSHOT_TOKENS = 256  # between two boundaries at which state can be saved, rounded up to whole pages
SNAPSHOTS_PER_SLOT = 2  # at most ...
SNAPSHOT_SHARE = 0.25  # ... and at most this share of what the state of the slots and one page leave


def cache_dtype(name: str, weights: torch.dtype) -> torch.dtype:
    """--kv-cache-dtype: `auto` is the dtype of the weights."""
    return weights if name == "auto" else DTYPES[name]


@dataclass(frozen=True)
class CacheNeeds:
    """The cache that a model's layers need for requests of up to `max_len` tokens in `slots` slots."""

    layouts: tuple[CacheLayout, ...]
    dtype: torch.dtype  # of keys and values
    page_size: int
    slots: int
    max_len: int

    @cached_property
    def windows(self) -> tuple[int, ...]:
        return windows(self.layouts)

    @cached_property
    def page_bytes(self) -> list[int]:
        """Bytes of one page of each table, in all layers of that table; 0 for a rank without heads."""
        return [self.page_size * table_values(self.layouts, w) * self.dtype.itemsize for w in self.windows]

    @cached_property
    def state_bytes(self) -> int:
        """Bytes of the state that always exists: that of every slot, of padding rows, and the snapshot of zeros."""
        return state_bytes(self.layouts) * (self.slots + 2)

    @property
    def has_state(self) -> bool:
        """Whether the model keeps state by slot; a rank without heads has arrays of no bytes."""
        return any(isinstance(layout, PerSlot) for layout in self.layouts)

    @property
    def least_bytes(self) -> int:
        """The least bytes that hold one page of each table."""
        return self.state_bytes + sum(self.page_bytes)

    def pages(self, most: int) -> list[int]:
        """Pages of each table where a table without a window has `most`.

        A window's table needs no more than the windows of all slots, whose ends rarely lie at the ends of pages, and one
        longest prompt.
        """
        longest = -(-self.max_len // self.page_size)
        return [min(most, self.slots * (-(-w // self.page_size) + 1) + longest) if w else most for w in self.windows]

    def limits(self, memory: int, most: int, caching: bool, host_bytes: int | None) -> Limits:
        """Divides `memory` bytes, which must be at least `least_bytes`: state, then snapshots, then pages.

        `most`: the most pages that a table can use. `host_bytes` hold pages of all tables in the same proportion; None: a
        quarter as many pages. Snapshots are found by content, so there are none without `caching`.
        """
        each = state_bytes(self.layouts)
        rest = memory - self.state_bytes
        snapshots = 0
        if self.has_state and caching:
            spare = rest - sum(self.page_bytes)
            most_snapshots = SNAPSHOTS_PER_SLOT * self.slots
            snapshots = min(most_snapshots, int(spare * SNAPSHOT_SHARE) // each) if each else most_snapshots
            rest -= snapshots * each
        pages = self.pages(bisect.bisect_right(range(most + 1), rest, key=self._bytes) - 1)
        tables = [TableLimits(n, w, h) for n, w, h in zip(pages, self.windows, self._host(pages, host_bytes), strict=True)]
        return Limits(
            tables=tuple(tables),
            slots=self.slots,
            max_len=min([self.max_len, *(n * self.page_size for n in pages)]),
            page_size=self.page_size,
            caching=caching,
            snapshots=snapshots,
            snapshot_tokens=-(-SNAPSHOT_TOKENS // self.page_size) * self.page_size if self.has_state else 0,
        )

    def _bytes(self, most: int) -> int:
        return sum(n * size for n, size in zip(self.pages(most), self.page_bytes, strict=True))

    def _host(self, pages: list[int], host_bytes: int | None) -> list[int]:
        """Host pages of each table."""
        if host_bytes is None:
            return [n // 4 for n in pages]
        whole = sum(n * size for n, size in zip(pages, self.page_bytes, strict=True))
        if not whole:  # a rank without heads: the other ranks set the bound
            return pages if host_bytes else [0] * len(pages)
        return [n * host_bytes // whole for n in pages]
