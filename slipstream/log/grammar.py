"""What the replica asks of a grammar: a matcher per slot, fed by settled tokens only."""

from collections.abc import Callable
from typing import Protocol

import numpy as np


class Matcher(Protocol):
    def accept(self, token: int) -> None:
        """Moves past a settled token of the answer."""
        ...

    def mask(self) -> np.ndarray:
        """uint32 [ceil(vocab / 32)], bit i of word w set where token 32 * w + i may follow; all zero at a dead end."""
        ...

    def copy(self) -> "Matcher": ...


MakeMatcher = Callable[[bytes], Matcher]  # from a request's serialized grammar; raises ValueError where it cannot be compiled
