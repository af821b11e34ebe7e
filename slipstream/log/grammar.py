"""The interface of a grammar: the replica has a matcher for each slot and gives it the settled tokens.

A matcher can look ahead through drafts and go back.
"""

from collections.abc import Callable
from typing import Protocol

import numpy as np


class Matcher(Protocol):
    def accept(self, token: int) -> None:
        """Moves past a token of the answer."""
        ...

    def rollback(self, count: int) -> None:
        """Goes back by the last `count` accepted tokens."""
        ...

    def mask(self) -> np.ndarray:
        """uint32 [ceil(vocab / 32)], bit i of word w set where token 32 * w + i may follow; all zero at a dead end."""
        ...

    def copy(self) -> "Matcher": ...


MakeMatcher = Callable[[bytes], Matcher]  # from a request's serialized grammar; raises ValueError where it cannot be compiled


def masks(matcher: Matcher, drafts: tuple[int, ...], width: int) -> np.ndarray:
    """uint32 [width, words]: the tokens that may follow now, and after each of the first width - 1 drafts if it is right.

    All zero where a draft is missing or may not follow, so that nothing after it is accepted. The matcher's state does not
    change.
    """
    first = matcher.mask()
    out = np.zeros((width, len(first)), np.uint32)
    out[0] = first
    taken = 0
    for draft in drafts[: width - 1]:
        if not int(out[taken, draft // 32]) >> draft % 32 & 1:
            break
        matcher.accept(draft)
        taken += 1
        out[taken] = matcher.mask()
    if taken:
        matcher.rollback(taken)
    return out
