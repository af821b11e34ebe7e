"""The cache of a group: an allocator for each page table, snapshots of per-slot state, and the search for a cached prefix.

A page table belongs to one rule of growth (`log/caches.py`). The tables of a slot end at the same column; a windowed one gives
back its first pages. A hit needs pages of every table, and a snapshot where the model has per-slot state.
"""

import sys
from typing import NamedTuple

import numpy as np

from slipstream.log.caches import Limits, TableLimits
from slipstream.log.pages import Pages

I32 = np.dtype("<i4")


class Hit(NamedTuple):
    """The cached part of a prompt, up to the last page boundary from which a request can go on."""

    columns: int  # pages that need not be computed
    pages: tuple[list[int], ...]  # for each table: its pages of columns [first, columns) that its rule still needs
    snapshot: int  # the state at that boundary; 0: the model has no state, or nothing was found


class PageTable:
    """Each slot's pages under one rule of growth. Columns [first[slot], held) of a row name pages; `held` is in the replica."""

    __slots__ = ("window", "pages", "rows", "first", "free_host", "page_size")

    def __init__(self, limits: TableLimits, slots: int, columns: int, page_size: int):
        self.window = limits.window
        self.page_size = page_size
        self.pages = Pages(limits.pages)
        self.rows = np.zeros((slots, columns), I32)
        self.first = np.zeros(slots, np.int32)
        self.free_host = list(range(limits.host_pages - 1, -1, -1))  # popped from the end

    def first_column(self, position: int) -> int:
        """The first page that a row at `position`, and every later one, reads."""
        return max(0, position - self.window + 1) // self.page_size if self.window else 0

    def found(self, keys: list[bytes]) -> list[int]:
        """The pages of `keys` in order; 0 where a page is not in the index."""
        return [self.pages.index.get(key, 0) for key in keys]

    def last_gap(self, found: list[int], columns: int) -> int:
        """The last column that a row at page boundary `columns` reads but `found` lacks; -1: none."""
        for column in range(columns - 1, self.first_column(columns * self.page_size) - 1, -1):
            if not found[column]:
                return column
        return -1

    def copy(self) -> "PageTable":
        other = type(self).__new__(type(self))
        other.window, other.page_size = self.window, self.page_size
        other.pages = self.pages.copy()
        other.rows, other.first = self.rows.copy(), self.first.copy()
        other.free_host = self.free_host.copy()
        return other


class Cache:
    """All page tables of a group, and the snapshots: a pool with an index like that of pages. Snapshot 0 is all zeros."""

    __slots__ = ("tables", "snapshots", "stride")

    def __init__(self, limits: Limits):
        self.tables = [PageTable(t, limits.slots, limits.columns, limits.page_size) for t in limits.tables]
        self.snapshots = Pages(limits.snapshots)
        self.stride = limits.snapshot_tokens // limits.page_size  # pages between two snapshots; 0: the model has no state

    @property
    def available(self) -> int:
        """For how many columns every table can give a page."""
        least = sys.maxsize
        for table in self.tables:
            least = min(least, table.pages.available)
        return least

    @property
    def held(self) -> int:
        return sum(t.pages.held for t in self.tables)

    @property
    def total(self) -> int:
        return sum(t.pages.total for t in self.tables)

    def find(self, keys: list[bytes]) -> Hit:
        """The cached pages up to the last boundary within `keys` that is in every table and, if needed, has a snapshot."""
        kept = [t for t in self.tables if not t.window]
        columns = len(keys)
        for table in kept:
            columns = len(table.pages.find(keys[:columns]))
        windowed = {t.window: t.found(keys[:columns]) for t in self.tables if t.window}
        while columns:
            if self.stride and (columns % self.stride or keys[columns - 1] not in self.snapshots.index):
                columns -= columns % self.stride or self.stride
                continue
            gap = max((t.last_gap(windowed[t.window], columns) for t in self.tables if t.window), default=-1)
            if gap < 0:
                break
            columns = gap  # every boundary between reads the page that is missing
        pages = tuple(
            windowed[t.window][t.first_column(columns * t.page_size) : columns] if t.window else t.pages.find(keys[:columns])
            for t in self.tables
        )
        return Hit(columns, pages, self.snapshots.index[keys[columns - 1]] if columns and self.stride else 0)

    def lacking(self, hit: Hit, columns: int) -> list[int]:
        """For each table, how many available pages a request of `columns` takes after this hit."""
        return [
            columns - hit.columns + sum(t.pages.refs[page] == 0 for page in pages)
            for t, pages in zip(self.tables, hit.pages, strict=True)
        ]

    def known(self, key: bytes) -> bool:
        """Whether the page with this content can be found in every table that keeps its pages."""
        return all(key in t.pages.index for t in self.tables if not t.window)

    def copy(self) -> "Cache":
        other = type(self).__new__(type(self))
        other.tables = [t.copy() for t in self.tables]
        other.snapshots, other.stride = self.snapshots.copy(), self.stride
        return other

    def state(self) -> tuple[object, ...]:
        """A hashable value that two equal caches share, apart from the rows of slots."""
        return (
            tuple((t.pages.state(), tuple(t.free_host)) for t in self.tables),
            self.snapshots.state(),
        )
