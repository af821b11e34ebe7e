"""The times of words, from the cross-attention of Whisper's decoder by dynamic time warping. numpy only.

As in Whisper's own `word_timestamps` (Radford et al., 2022): the heads that follow the sound, normalized over the tokens,
smoothed over time, averaged; the cheapest monotonic path through them gives each token its frames.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

FRAME_S = 0.02  # seconds of one of the encoder's frames
_SMOOTH = 7  # frames of the median


class Word(NamedTuple):
    """`first`: the index of its first token in the text's tokens. Times in seconds of the window."""

    text: str
    first: int
    start: float
    end: float


def path(cost: np.ndarray) -> np.ndarray:
    """float [tokens, frames] -> the frame at which each token begins, on the cheapest path from corner to corner."""
    rows, columns = cost.shape
    total = np.full((rows + 1, columns + 1), np.inf)
    total[0, 0] = 0
    for diagonal in range(2, rows + columns + 1):  # all cells of a diagonal depend on earlier ones alone
        i = np.arange(max(1, diagonal - columns), min(rows, diagonal - 1) + 1)
        j = diagonal - i
        before = np.minimum(np.minimum(total[i - 1, j - 1], total[i - 1, j]), total[i, j - 1])
        total[i, j] = cost[i - 1, j - 1] + before
    begins, i, j = np.zeros(rows, np.int64), rows, columns
    while i > 0:
        begins[i - 1] = j - 1
        steps = (total[i - 1, j - 1], total[i - 1, j], total[i, j - 1])
        best = int(np.argmin(steps))
        i, j = i - (best != 2), j - (best != 1)
    return begins


def begins(attention: np.ndarray, first: int) -> np.ndarray:
    """float32 [heads, tokens, frames] of attention -> the frame at which each token after `first` begins."""
    spread = attention.std(axis=1, keepdims=True)
    normal = (attention - attention.mean(axis=1, keepdims=True)) / np.maximum(spread, 1e-9)
    padded = np.pad(normal, ((0, 0), (0, 0), (_SMOOTH // 2, _SMOOTH // 2)), "reflect")
    smooth = np.median(np.lib.stride_tricks.sliding_window_view(padded, _SMOOTH, axis=-1), axis=-1)
    return path(-smooth.mean(axis=0)[first:-1])  # the row that produced a token is the row before its own


def words(tokens: Sequence[int], begin: np.ndarray, text_of: Callable[[list[int]], str]) -> list[Word]:
    """The words of a window's text. `begin`: frames of each token, and of the end."""
    starts = [i for i, token in enumerate(tokens) if i == 0 or text_of([token]).startswith(" ")]
    out = []
    for first, last in itertools.pairwise([*starts, len(tokens)]):
        text = text_of(list(tokens[first:last])).strip()
        bare = text.strip("".join(c for c in text if not c.isalnum()))
        if bare:
            out.append(Word(bare, first, float(begin[first]) * FRAME_S, float(begin[last]) * FRAME_S))
    return out
