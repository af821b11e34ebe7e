"""How the host cuts a step's prompt rows into work for the prefill kernels.

A block is up to ROWS consecutive tokens of one request. With one query head it attends to PAIR cache tokens at a time. With one
program for each block, multiprocessors would be idle (few blocks) or wait (prompts of different lengths). So blocks are cut
along the cache, in the better of two ways:

- into parts of similar size, which all programs take in turns, the longest first;
- where there are fewer blocks than multiprocessors, into parts of one size and rests. Each such part has its own program, and
  the remaining programs take the rests in turns.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

ROWS = 128  # tokens of a block at most
PAIR = 128  # cache tokens at a time
MOST = 8  # the most parts of the longest block, where all parts are of similar size
SIZES = 12  # about how many sizes of parts with their own programs are tried
LEAST = 4  # the fewest pairs of a part, unless its block has fewer
START = 3  # a part costs this many pairs more than its own ...
JOIN = 4  # ... and this many more if it is joined with others (measured: docs/gpu_log.md)
UNITS = 1056  # the kernels have room for so many (part, query head) of cut blocks; parts alone need at most two a program
SPARE = 64  # rows of the table besides one for each block

# columns of the table: slot, position of the block's first token, its index in the step, tokens, first pair, end of the pairs,
# parts of the block, this part's place in the kernels' scratch, the place of the block's first part (they follow one another)
COLUMNS = 9

CHUNK = 64  # tokens of a prompt that layers with state take at a time
ROW_COLUMNS = 4  # of a prompt row: slot, index of its first token in the step, tokens, its first chunk
CHUNK_COLUMNS = 2  # index of the chunk's first token in the step, tokens


def cut_chunks(prompts: np.ndarray, rows: np.ndarray, chunks: np.ndarray) -> tuple[int, int]:
    """Writes the rows and chunks of prompts [n, 4], (slot, position, index in the step, tokens); returns their numbers."""
    tokens = prompts[:, 3]
    each = -(-tokens // CHUNK)
    first = np.cumsum(each) - each
    rows[: len(prompts)] = np.stack([prompts[:, 0], prompts[:, 2], tokens, first], 1)
    of_row = np.repeat(np.arange(len(prompts)), each)
    begin = (np.arange(len(of_row)) - first[of_row]) * CHUNK
    chunks[: len(of_row), 0] = prompts[of_row, 2] + begin
    chunks[: len(of_row), 1] = np.minimum(CHUNK, tokens[of_row] - begin)
    return len(prompts), len(of_row)


@dataclass(frozen=True)
class Cutter:
    """For a rank with `num_q_heads` query heads, on `programs` multiprocessors."""

    num_q_heads: int
    programs: int

    def cut(self, rows: Iterable[Sequence[int]], out: np.ndarray) -> tuple[int, int]:
        """Writes parts of the blocks of `rows` (slot, position, index in the step, tokens) to out int32 [n, COLUMNS].

        Returns the number of parts, and how many of them, the first, have their own programs. The others follow, the longest
        first. `out` has room for SPARE parts besides one for each block.
        """
        blocks: list[tuple[int, int, int, int, int]] = []
        for slot, position, index, tokens in rows:
            for offset in range(0, tokens, ROWS):
                here = min(ROWS, tokens - offset)
                blocks.append((-(-(position + offset + here) // PAIR), slot, position + offset, index + offset, here))
        blocks.sort(reverse=True)
        alone: list[tuple[int, ...]] = []
        shared: list[tuple[int, ...]] = []
        place = 0
        for (_, *block), (own, ends) in zip(blocks, self._ends([b[0] for b in blocks]), strict=True):
            n = len(ends)
            parts = [(*block, begin, end, n, place + i, place) for i, (begin, end) in enumerate(pairwise([0, *ends]))]
            alone += parts[:own]
            shared += parts[own:]
            place += n if n > 1 else 0
        shared.sort(key=lambda part: part[4] - part[5])
        parts = alone + shared
        out[: len(parts)] = np.array(parts, np.int32).reshape(-1, COLUMNS)
        return len(parts), len(alone)

    def _ends(self, pairs: list[int]) -> list[tuple[int, list[int]]]:
        """For each block: how many parts, the first, have their own programs, and where all parts end. `pairs` falls."""
        if not pairs:
            return []
        enough = 1.05 * (sum(pairs) + START * len(pairs)) * self.num_q_heads / self.programs
        cost, parts = self._evenly(pairs, enough)
        size = self._alone(pairs, cost) if cost > enough else 0
        if size:
            return [_split(n, size) for n in pairs]
        return [(0, _even_ends(n, k)) for n, k in zip(pairs, parts, strict=True)]

    def _evenly(self, pairs: list[int], enough: float) -> tuple[int, list[int]]:
        """The cost with parts of similar size that all programs share, and the number of parts of each block."""
        best = parts = [1] * len(pairs)
        least = self._turns([n + START for n in pairs], self.programs)
        for most in range(2, MOST + 1):
            if least <= enough or pairs[0] < LEAST * most:
                break
            size = -(-pairs[0] // most)
            parts = [max(1, -(-(4 * n - size) // (4 * size))) for n in pairs]  # up to a quarter longer than others
            if sum(parts) - len(parts) > SPARE or sum(n for n in parts if n > 1) * self.num_q_heads > UNITS:
                break
            each = [cost for n, k in zip(pairs, parts, strict=True) for cost in [_cost(-(-n // k), k > 1)] * k]
            cost = self._turns(each, self.programs)
            if cost < least:
                best, least = parts, cost
        return least, best

    def _alone(self, pairs: list[int], cost: int) -> int:
        """The size of parts with their own programs that costs least, if that is less than `cost`; 0 otherwise."""
        best = 0
        first = max(LEAST, sum(pairs) * self.num_q_heads // self.programs)
        for size in range(first, pairs[0], max(1, (cost - first) // SIZES)):
            if _cost(size, True) >= cost:
                break
            own: list[int] = []
            rests: list[int] = []
            for n in pairs:
                alone, ends = _split(n, size)
                costs = [_cost(end - begin, len(ends) > 1) for begin, end in pairwise([0, *ends])]
                own += costs[:alone]
                rests += costs[alone:]
            spare = self.programs - len(own) * self.num_q_heads
            if len(own) > SPARE or spare < 0 or sum(rests) * self.num_q_heads > cost * spare:
                continue
            here = max(*own, self._turns(rests, spare) if rests else 0)
            if here < cost:
                best, cost = size, here
        return best

    def _turns(self, each: list[int], programs: int) -> int:
        """About the cost of the program with the most work, when `programs` take parts in turns, there and back."""
        each = sorted(each, reverse=True)
        total = len(each) * self.num_q_heads
        last = (total - 1) % programs + 1  # items of the last turn
        ends = 0
        for program in {0, last - 1, programs - last, programs - 1}:  # both ends, and the edges of the last turn
            turns = range(0, total, programs)
            items = (at + (program if i % 2 == 0 else programs - 1 - program) for i, at in enumerate(turns))
            ends = max(ends, sum(each[item // self.num_q_heads] for item in items if item < total))
        return ends


def _cost(pairs: int, joined: bool) -> int:
    return pairs + START + (JOIN if joined else 0)


def _even_ends(pairs: int, parts: int) -> list[int]:
    return [pairs * i // parts for i in range(1, parts + 1)]


def _split(pairs: int, size: int) -> tuple[int, list[int]]:
    """The number of parts of `size`, and where all parts end. A rest too small for a part makes the others longer."""
    alone, rest = divmod(pairs, size)
    if alone and rest < LEAST:
        return alone, _even_ends(pairs, alone)
    return alone, [*range(size, size * alone + 1, size), pairs]
