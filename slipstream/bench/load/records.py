"""Planned requests and recorded results: plain values that the client's processes exchange as msgpack."""

import msgspec
import numpy as np


class Job(msgspec.Struct, frozen=True):
    """One request to send. Its prompt is a function of (seed, index), so it is never sent between processes."""

    index: int
    kind: str  # "short", "long", "stream", "burst", "turn"
    prompt_len: int
    output_len: int
    at: float = 0.0  # seconds after the start, for arrivals planned in advance
    seed: int | None = None  # None: greedy; else temperature 1 with this seed


class Turn(msgspec.Struct, frozen=True):
    """One turn: the user's new tokens, the answer's length, and the number of its tokens after which the client leaves."""

    new_len: int
    output_len: int
    leave_after: int | None = None


class Conversation(msgspec.Struct, frozen=True):
    index: int
    turns: list[Turn]

    @property
    def expected(self) -> int:
        """The turns that should end: those before the one in which the client leaves."""
        return sum(t.leave_after is None for t in self.turns)


class Record(msgspec.Struct):
    """One request's result. Times are `time.monotonic()` seconds; chunk i brought counts[i] tokens at times[i]."""

    index: int
    kind: str
    prompt_len: int
    expected: int
    sent: float
    times: list[float] = []
    counts: list[int] = []
    finish: str | None = None
    error: str | None = None
    left: bool = False  # the client left on purpose
    turn: int = 0
    cached_tokens: int | None = None
    token_ids: list[int] = []  # kept if a later turn needs them

    @property
    def tokens(self) -> int:
        return sum(self.counts)

    @property
    def ok(self) -> bool:
        return self.error is None and not self.left


def token_range(vocab: int) -> tuple[int, int]:
    """[low, high): ids away from both ends of the vocabulary, where special tokens are."""
    return min(1000, vocab // 4), max(vocab - vocab // 16, vocab // 4 + 1)


def prompt_ids(seed: int, index: int, length: int, vocab: int) -> list[int]:
    """`length` random token ids; the same for the same arguments."""
    low, high = token_range(vocab)
    return np.random.default_rng([seed, index]).integers(low, high, length).tolist()
