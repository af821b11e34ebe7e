"""The cache layouts of layers, and the pages and state that they need. Plain values; no arrays, no allocation.

A model names one layout for each layer. Layers whose pages grow by the same rule share a page table. They number its pages
alike, and a page holds `page_size` tokens of each of these layers. Layers with state of a fixed size need no pages. A slot has
one place for such state. Snapshots of it are kept at page boundaries, so that a later request with the same prefix can go on
from there.
"""

from math import prod
from typing import NamedTuple

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "int32": 4, "uint8": 1}
STATE_ALIGN_BYTES = 16  # where the arrays of a slot's state begin: what the widest access of a kernel wants


class Paged(NamedTuple):
    """Keys and values of every token: two arrays [pages + 1, heads, page_size, head_dim], or as a device orders them."""

    heads: int  # of this rank
    head_dim: int


class Window(NamedTuple):
    """Keys and values of the latest `size` tokens. A row at position p reads positions (p - size, p]."""

    heads: int
    head_dim: int
    size: int


class Latent(NamedTuple):
    """One vector of `width` values a token, which all heads share (multi-head latent attention)."""

    width: int


class StateArray(NamedTuple):
    """One array of a slot: its shape without the slot, and its dtype's name as PyTorch spells it."""

    shape: tuple[int, ...]
    dtype: str


class PerSlot(NamedTuple):
    """State of a fixed size (convolution columns, recurrent state), whatever the request's length."""

    arrays: tuple[StateArray, ...]


CacheLayout = Paged | Window | Latent | PerSlot | None  # None: the layer keeps nothing


def token_values(layout: CacheLayout) -> int:
    """Values of the cache's dtype that a layer keeps for one token."""
    if isinstance(layout, Paged | Window):
        return 2 * layout.heads * layout.head_dim
    return layout.width if isinstance(layout, Latent) else 0


def state_bytes(layouts: tuple[CacheLayout, ...]) -> int:
    """Bytes of one slot's state, and of one snapshot of it."""
    arrays = [array for layout in layouts if isinstance(layout, PerSlot) for array in layout.arrays]
    return sum(-(-prod(array.shape) * ITEM_BYTES[array.dtype] // STATE_ALIGN_BYTES) * STATE_ALIGN_BYTES for array in arrays)


def window_of(layout: CacheLayout) -> int | None:
    """The rule by which a layer's pages grow: its window in tokens, 0 where pages are kept to the end, None without pages."""
    if isinstance(layout, Window):
        return layout.size
    return 0 if isinstance(layout, Paged | Latent) else None


def windows(layouts: tuple[CacheLayout, ...]) -> tuple[int, ...]:
    """The rules of a model's layers, one for each page table: 0 first where a layer has it, then windows, the largest first."""
    found = {window for layout in layouts if (window := window_of(layout)) is not None}
    return tuple(sorted(found, key=lambda window: (window > 0, -window)))


def table_values(layouts: tuple[CacheLayout, ...], window: int) -> int:
    """Values that one token takes in all layers of the page table with this rule."""
    return sum(token_values(layout) for layout in layouts if window_of(layout) == window)


class TableLimits(NamedTuple):
    """One page table's pages: 1..pages on the device, 0..host_pages - 1 in host memory for preempted requests."""

    pages: int
    window: int = 0  # tokens; 0: pages are kept to the request's end
    host_pages: int = 0


class Limits(NamedTuple):
    """The capacity of a group: the minimum over its ranks."""

    tables: tuple[TableLimits, ...]
    slots: int
    max_len: int  # tokens of one request, prompt and answer
    page_size: int = 16  # tokens
    caching: bool = True  # whether pages and snapshots can be found again by content
    snapshots: int = 0  # places for snapshots of a slot's state: 1..snapshots; 0 where none are kept
    snapshot_tokens: int = 0  # state is saved at multiples of this, itself a multiple of page_size; 0: the model has no state
    width: int = 1  # tokens that a row may give: one and the drafts that it verifies

    @property
    def columns(self) -> int:
        """Pages that the longest request takes in a table."""
        return -(-self.max_len // self.page_size)

    @property
    def pages(self) -> int:
        """Pages that one request can have of every table at most."""
        return min((table.pages for table in self.tables), default=self.slots * self.columns)

    def pages_of(self, tokens: int) -> int:
        return -(-tokens // self.page_size)


def one_table(
    pages: int, slots: int, max_len: int, page_size: int = 16, caching: bool = True, host_pages: int = 0, width: int = 1
) -> Limits:
    """The limits of a model whose layers all keep keys and values to the end."""
    return Limits((TableLimits(pages, 0, host_pages),), slots, max_len, page_size, caching, width=width)


def least(limits: list[Limits]) -> Limits:
    """The limits that all ranks can hold. Raises ValueError if the ranks differ in page size, windows or state."""
    first = limits[0]
    for other in limits[1:]:
        for name, mine, theirs in (
            ("page size", first.page_size, other.page_size),
            ("windows", [t.window for t in first.tables], [t.window for t in other.tables]),
            ("tokens of a snapshot", first.snapshot_tokens, other.snapshot_tokens),
        ):
            if mine != theirs:
                raise ValueError(f"the ranks differ in {name}: {mine} and {theirs}")
    tables = tuple(
        TableLimits(min(t.pages for t in ranks), ranks[0].window, min(t.host_pages for t in ranks))
        for ranks in zip(*(each.tables for each in limits), strict=True)
    )
    return first._replace(
        tables=tables,
        slots=min(each.slots for each in limits),
        max_len=min(each.max_len for each in limits),
        caching=all(each.caching for each in limits),
        snapshots=min(each.snapshots for each in limits),
        width=min(each.width for each in limits),
    )
