"""A toy vocabulary and a toy grammar, and the tokens that a request must get whatever the scheduling.

A grammar is two bytes: (modulus, dead_after). A token counts token // modulus + 1. After tokens that count s together, only
tokens congruent to s modulo `modulus` may follow, so a mask that was built without the latest token is wrong and seen. After
`dead_after` tokens nothing may follow (0: never).
"""

from collections.abc import Sequence
from functools import cache

import numpy as np

from slipstream.device.sim import SimTokens
from slipstream.log.request import Request

VOCAB = 96
WORDS = VOCAB // 32
DEAD_END = "the grammar allows no token"


@cache
def allowed(modulus: int, residue: int) -> np.ndarray:
    """uint32 [WORDS], a bit for each token congruent to `residue`; no bit for modulus 0."""
    words = [0] * WORDS
    for token in range(VOCAB):
        if modulus and token % modulus == residue:
            words[token // 32] |= 1 << token % 32
    return np.array(words, np.uint32)


class ToyMatcher:
    """Implements `log.grammar.Matcher`."""

    def __init__(self, spec: bytes):
        self.modulus, self.dead_after = spec
        if not self.modulus:
            raise ValueError("its modulus is 0")
        self.taken: list[int] = []

    @property
    def total(self) -> int:
        return sum(token // self.modulus + 1 for token in self.taken)

    def accept(self, token: int) -> None:
        assert token % self.modulus == self.total % self.modulus, f"token {token} was not allowed"
        self.taken.append(token)

    def rollback(self, count: int) -> None:
        del self.taken[len(self.taken) - count :]

    def mask(self) -> np.ndarray:
        if self.dead_after and len(self.taken) >= self.dead_after:
            return allowed(0, 0)
        return allowed(self.modulus, self.total % self.modulus)

    def copy(self) -> "ToyMatcher":
        other = ToyMatcher(bytes((self.modulus, self.dead_after)))
        other.taken = self.taken.copy()
        return other


def choose(token: int, mask: np.ndarray) -> int:
    """The first allowed token from `token` on, around the vocabulary; -1 at a dead end."""
    for k in range(VOCAB):
        other = (token + k) % VOCAB
        if int(mask[other // 32]) >> other % 32 & 1:
            return other
    return -1


def impossible(request: Request) -> bool:
    """Whether the request's grammar cannot be compiled."""
    return request.grammar[:1] == b"\0"


def expected(request: Request) -> tuple[list[int], str]:
    """The tokens and the finish reason of a request that runs alone and undisturbed on the `sim` device."""
    n = request.max_tokens
    sim = SimTokens(1, VOCAB)
    sim.init_slot(0, request)
    positions = np.arange(request.prompt_len, request.prompt_len + n)
    return expected_of(request, sim.draw(np.zeros(n, np.intp), positions).tolist())


def expected_of(request: Request, drawn: Sequence[int]) -> tuple[list[int], str]:
    """The same where the device draws the tokens `drawn` before the request's grammar has its say."""
    if impossible(request):
        return [], "refused"
    matcher = ToyMatcher(request.grammar) if request.grammar else None
    tokens: list[int] = []
    for token in drawn[: request.max_tokens]:
        if matcher is not None:
            token = choose(token, matcher.mask())
            if token < 0:
                return tokens, "error"
            matcher.accept(token)
        tokens.append(token)
        if token in request.sampling.stop_ids:
            return tokens, "stop"
    return tokens, "length"
