"""How the host cuts a step's prompt rows into work for the prefill kernels.

A block is up to ROWS consecutive tokens of one request; with one query head it attends to PAIR cache tokens at a time. One
program each would leave multiprocessors idle (few blocks) or waiting (prompts of different lengths), so blocks are cut along
the cache into parts of about one size, which `programs` programs share, the longest first.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

ROWS = 128  # tokens of a block at most
PAIR = 128  # cache tokens at a time
MOST = 8  # parts that the longest block is cut into at most
LEAST = 4  # pairs of a part at least, where its block has as many
START = 3  # pairs that a part costs beside its own ...
JOIN = 4  # ... and one of several that are joined again (measured: docs/gpu_log.md)
UNITS = 1056  # (part, query head) of cut blocks that the kernels have room for
SPARE = 64  # rows of the table beyond one a block

# columns of the table: slot, position of the block's first token, its index in the step, tokens, first pair, end of the pairs,
# parts of the block, this part's place in the kernels' scratch, the place of the block's first part (they follow one another)
COLUMNS = 9


@dataclass(frozen=True)
class Cutter:
    """For a rank with `queries` query heads, on `programs` multiprocessors."""

    queries: int
    programs: int

    def cut(self, rows: Iterable[Sequence[int]], out: np.ndarray) -> int:
        """Writes parts of the blocks of `rows` (slot, position, index in the step, tokens) to out int32 [n, COLUMNS].

        Returns how many parts there are, the longest first. `out` has room for SPARE parts beyond one a block.
        """
        blocks: list[tuple[int, int, int, int, int]] = []
        for slot, position, index, tokens in rows:
            for offset in range(0, tokens, ROWS):
                here = min(ROWS, tokens - offset)
                blocks.append((-(-(position + offset + here) // PAIR), slot, position + offset, index + offset, here))
        blocks.sort(reverse=True)
        parts: list[tuple[int, ...]] = []
        place = 0
        for (pairs, *block), n in zip(blocks, self._parts([b[0] for b in blocks]), strict=True):
            parts += [(*block, pairs * i // n, pairs * (i + 1) // n, n, place + i, place) for i in range(n)]
            place += n if n > 1 else 0
        parts.sort(key=lambda part: part[4] - part[5])
        out[: len(parts)] = np.array(parts, np.int32).reshape(-1, COLUMNS)
        return len(parts)

    def _parts(self, pairs: list[int]) -> list[int]:
        """Into how many parts each block is cut; `pairs` falls."""
        best = parts = [1] * len(pairs)
        least = self._ends(pairs, parts) if pairs else 0
        enough = 1.05 * (sum(pairs) + START * len(pairs)) * self.queries / self.programs
        for most in range(2, MOST + 1):
            if least <= enough or pairs[0] < LEAST * most:
                break
            size = -(-pairs[0] // most)
            parts = [max(1, -(-(4 * n - size) // (4 * size))) for n in pairs]  # up to a quarter longer than others
            if sum(parts) - len(parts) > SPARE or sum(n for n in parts if n > 1) * self.queries > UNITS:
                break
            ends = self._ends(pairs, parts)
            if ends < least:
                best, least = parts, ends
        return best

    def _ends(self, pairs: list[int], parts: list[int]) -> int:
        """About the cost of the program that has most to do, when programs take parts in turns, there and back."""
        each: list[int] = []
        for n, k in zip(pairs, parts, strict=True):
            each += [-(-n // k) + START + (JOIN if k > 1 else 0)] * k
        each.sort(reverse=True)
        total, programs = len(each) * self.queries, self.programs
        last = (total - 1) % programs + 1  # items of the last turn
        ends = 0
        for program in {0, last - 1, programs - last, programs - 1}:  # both ends, and the edges of the last turn
            turns = range(0, total, programs)
            items = (at + (program if i % 2 == 0 else programs - 1 - program) for i, at in enumerate(turns))
            ends = max(ends, sum(each[item // self.queries] for item in items if item < total))
        return ends
