"""Cuts a stream for its consumer: chunk policies as values, and the cutter that applies one. Pure; imports numpy only.

A stream carries pieces. A piece of an "array" stream has as many units as its first axis is long; a piece of a "text" or
"value" stream is one unit. Cutting never changes units or their order: the chunks without their context, joined, are the whole
stream.
"""

from collections import deque
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np


@dataclass(frozen=True)
class Whole:
    """The whole stream as one chunk, once the producer has ended."""

    def cut(self, fresh: int, have: int, ended: bool) -> tuple[int, int] | None:
        return (0, have) if ended and fresh < have else None

    def keep(self, fresh: int) -> int:
        return fresh


@dataclass(frozen=True)
class Fixed:
    """`n` units at a time. With `allow_partial` the units that have arrived go on at once, at most `n`. Otherwise a chunk
    waits for `n` units, and only the last one may be shorter."""

    n: int
    allow_partial: bool = False

    @property
    def need(self) -> int:
        """The most units that must be held before a chunk is cut, unless the producer has ended."""
        return 1 if self.allow_partial else self.n

    def cut(self, fresh: int, have: int, ended: bool) -> tuple[int, int] | None:
        stop = min(have, fresh + self.n)
        full = stop - fresh == self.n or self.allow_partial or ended
        return (fresh, stop) if full and fresh < stop else None

    def keep(self, fresh: int) -> int:
        return fresh


@dataclass(frozen=True)
class SlidingWindow:
    """Windows of `window` units that start every `stride` units; the last one may be shorter."""

    window: int
    stride: int

    @property
    def need(self) -> int:
        return self.window

    def _start(self, fresh: int) -> int:
        return fresh - (self.window - self.stride) if fresh else 0

    def cut(self, fresh: int, have: int, ended: bool) -> tuple[int, int] | None:
        start = self._start(fresh)
        stop = min(have, start + self.window)
        full = stop - start == self.window or ended
        return (start, stop) if full and fresh < stop else None

    def keep(self, fresh: int) -> int:
        return self._start(fresh)


@dataclass(frozen=True)
class LeftContext:
    """`chunk` new units at a time, with up to `context` units before them again."""

    chunk: int
    context: int

    @property
    def need(self) -> int:
        return self.chunk + self.context

    def cut(self, fresh: int, have: int, ended: bool) -> tuple[int, int] | None:
        stop = min(have, fresh + self.chunk)
        full = stop - fresh == self.chunk or ended
        return (max(0, fresh - self.context), stop) if full and fresh < stop else None

    def keep(self, fresh: int) -> int:
        return max(0, fresh - self.context)


Policy = Whole | Fixed | SlidingWindow | LeftContext


def faults(policy: Policy) -> str | None:
    """The fault in a policy's numbers, or None."""
    match policy:
        case Fixed(n=n) if n < 1:
            return f"Fixed(n={n}): n must be at least 1"
        case SlidingWindow(window=w, stride=s) if not 1 <= s <= w:
            return f"SlidingWindow(window={w}, stride={s}): stride must be between 1 and window"
        case LeftContext(chunk=c, context=x) if c < 1 or x < 0:
            return f"LeftContext(chunk={c}, context={x}): chunk must be at least 1 and context at least 0"
    return None


class Chunk(NamedTuple):
    """The input of a consumer's step. `data[context:]` is new; the units before it were in an earlier chunk."""

    data: Any
    context: int
    last: bool  # the producer had ended when this was cut, and no chunk follows


def units(value: Any) -> int:
    """The number of units in a piece; 0 for an empty text."""
    return len(value) if isinstance(value, np.ndarray) else int(value != "")


def size_of(value: Any) -> int:
    """The size of a gathered piece: an array's bytes, else its characters as text."""
    return value.nbytes if isinstance(value, np.ndarray) else len(str(value))


def join(pieces: list[Any]) -> Any:
    """Joins pieces of one stream to one value: arrays along their first axis, texts one after the other."""
    if len(pieces) == 1:
        return pieces[0]
    if all(isinstance(p, str) for p in pieces):
        return "".join(pieces)
    if all(isinstance(p, np.ndarray) for p in pieces):
        return np.concatenate(pieces)
    return pieces


class Cutter:
    """One input of one request: takes pieces as they come, returns chunks as the policy cuts them.

    Each piece has a tag; `spent` collects the tags of pieces whose units no later chunk will need. If the end is known
    when the final chunk is cut, that chunk is marked last. If the end comes later, it comes alone, without an empty chunk.
    """

    def __init__(self, policy: Policy, sources: int = 1):
        self.policy = policy
        self.spent: list[Any] = []
        self._sources = sources  # producers that have not ended
        self._pieces: deque[tuple[int, Any, Any]] = deque()  # (first unit, piece, tag)
        self._fresh = 0  # the first unit that was not in a chunk yet
        self._have = 0

    @property
    def ended(self) -> bool:
        return self._sources <= 0

    @property
    def exhausted(self) -> bool:
        """Whether it has ended and every unit was in a chunk."""
        return self.ended and self._fresh == self._have

    @property
    def ready(self) -> bool:
        return self.policy.cut(self._fresh, self._have, self.ended) is not None

    @property
    def empty(self) -> bool:
        return self._have == 0

    def push(self, value: Any, tag: Any = None) -> None:
        """Empty pieces are spent at once."""
        n = units(value)
        if not n:
            self.spent.append(tag)
            return
        self._pieces.append((self._have, value, tag))
        self._have += n

    def end(self) -> None:
        """One producer has ended."""
        self._sources -= 1
        if self.exhausted:
            self.clear()

    def clear(self) -> None:
        """Drops all pieces, now and later: the consumer has ended."""
        self.spent += [tag for _, _, tag in self._pieces]
        self._pieces.clear()
        self._fresh = self._have

    def pop(self) -> Chunk | None:
        span = self.policy.cut(self._fresh, self._have, self.ended)
        if span is None:
            return None
        start, stop = span
        parts = []
        for first, piece, _ in self._pieces:
            a, b = max(start - first, 0), min(stop - first, units(piece))
            if a < b:
                parts.append(piece[a:b] if isinstance(piece, np.ndarray) else piece)
        context = self._fresh - start
        self._fresh = stop
        keep = self.policy.keep(stop)
        if self.ended and stop == self._have:
            keep = stop
        while self._pieces and self._pieces[0][0] + units(self._pieces[0][1]) <= keep:
            self.spent.append(self._pieces.popleft()[2])
        return Chunk(join(parts), context, self.ended and stop == self._have)
