"""How a model's dimensions are split over the ranks of a tensor-parallel group.

Pure arithmetic on plain integers: every rank computes every rank's share, so all agree without a message. Ranges are
half open, contiguous and in rank order; a remainder gives the first ranks one more each.
"""

import functools
from dataclasses import dataclass


@dataclass(frozen=True)
class Heads:
    """One rank's attention heads: query heads [q_start, q_stop) and the key heads [kv_start, kv_stop) that they read.

    Local query head i reads local key head i // (num_q_heads // num_kv_heads): within a rank each key head has equally many
    query heads.
    With more ranks than query heads a rank may hold none of either.
    """

    q_start: int
    q_stop: int
    kv_start: int
    kv_stop: int

    @functools.cached_property
    def num_q_heads(self) -> int:
        return self.q_stop - self.q_start

    @functools.cached_property
    def num_kv_heads(self) -> int:
        return self.kv_stop - self.kv_start


@dataclass(frozen=True)
class Shard:
    """Rank `rank` of `size`."""

    rank: int = 0
    size: int = 1

    def even(self, total: int) -> tuple[int, int]:
        """This rank's [start, stop) of `total` items, split evenly; a remainder gives the first ranks one more each."""
        return split_evenly(total, self.size)[self.rank]

    def heads(self, num_q_heads: int, num_kv_heads: int) -> Heads:
        """This rank's heads. `num_q_heads` must be a multiple of `num_kv_heads` (as in every grouped-query model)."""
        return split_heads(num_q_heads, num_kv_heads, self.size)[self.rank]


def split_evenly(total: int, size: int) -> list[tuple[int, int]]:
    base, more = divmod(total, size)
    starts = [r * base + min(r, more) for r in range(size + 1)]
    return list(zip(starts[:-1], starts[1:], strict=True))


def split_heads(num_q_heads: int, num_kv_heads: int, size: int) -> list[Heads]:
    """Heads of every rank.

    At most as many ranks as key heads: whole groups, the first ranks one more (9 query and 3 key heads on 2 ranks: 6/2, 3/1).
    More ranks: each key head is held by several ranks, which split its query heads (on 4 ranks: 2/1, 1/1, 3/1, 3/1).
    """
    group = num_q_heads // num_kv_heads
    if size <= num_kv_heads:
        return [Heads(a * group, b * group, a, b) for a, b in split_evenly(num_kv_heads, size)]
    out = []
    for key, (first, last) in enumerate(split_evenly(size, num_kv_heads)):
        for a, b in split_evenly(group, last - first):
            held = 1 if b > a else 0
            out.append(Heads(key * group + a, key * group + b, key, key + held))
    return out
