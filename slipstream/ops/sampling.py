"""The effect of a request's sampling parameters on one row of logits, and the random draw: NumPy and PyTorch on the CPU.

The order is vLLM's: bad words, min_tokens, logit_bias, penalties, temperature, min_p, top_k, top_p, then the draw. Log
probabilities are of the raw logits, before all of these.

The draw is Gumbel-max: the token is argmax over ids of logits / temperature + gumbel, where the noise of an id depends on
(seed, choice, position, id) and on nothing else, so a seed gives the same tokens alone, in any batch, on any number of ranks
and in any mode. The noise is exactly this, modulo 2^32 (2^64 for `mix`), so that a kernel can compute the same bits:

    mix(x):   x += 0x9E3779B97F4A7C15; x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9; x = (x ^ x >> 27) * 0x94D049BB133111EB;
              x ^ x >> 31                                                              (SplitMix64's output function)
    key:      mix(mix(mix(seed) ^ choice) ^ position), k0 its low and k1 its high 32 bits
    bits(id): h = id * 0x9E3779B1 + k0; h = (h ^ h >> 16) * 0x7FEB352D; h = (h ^ h >> 15) + k1; h = h * 0x846CA68B;
              h = (h ^ h >> 16) * 0x7FEB352D; h = (h ^ h >> 15) * 0x846CA68B; h = h ^ h >> 16
    gumbel:   v = (float(bits >> 1) + 0.5) * 2^-31, at most 1 - 2^-24; -log(-log1p(-v))          (float32)

`position` is that of the token to be drawn: the first token after a prompt of n tokens has position n.
"""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from slipstream.log.request import SamplingParams, TokenLogprobs

_U64 = 0xFFFFFFFFFFFFFFFF
_ROUNDS = ((16, False, 0x7FEB352D), (15, True, 0x846CA68B), (16, False, 0x7FEB352D), (15, False, 0x846CA68B))


def mix(x: int) -> int:
    x = (x + 0x9E3779B97F4A7C15) & _U64
    x = ((x ^ x >> 30) * 0xBF58476D1CE4E5B9) & _U64
    x = ((x ^ x >> 27) * 0x94D049BB133111EB) & _U64
    return x ^ x >> 31


def draw_key(seed: int, choice: int, position: int) -> tuple[int, int]:
    """The two 32-bit words that all noise of one draw is keyed by."""
    key = mix(mix(mix(seed & _U64) ^ choice) ^ position)
    return key & 0xFFFFFFFF, key >> 32


def spread(ids: np.ndarray) -> np.ndarray:
    """The part of the noise that depends on the ids alone: uint32, of the same shape."""
    return ids.astype(np.uint32) * np.uint32(0x9E3779B1)


def noise_bits(key: tuple[int, int], spread_ids: np.ndarray) -> np.ndarray:
    """uint32 of the same shape: the bits of each id under a draw's key."""
    h = spread_ids + np.uint32(key[0])
    t = np.empty_like(h)
    for shift, added, factor in _ROUNDS:
        np.right_shift(h, np.uint32(shift), out=t)
        np.bitwise_xor(h, t, out=h)
        if added:
            np.add(h, np.uint32(key[1]), out=h)
        np.multiply(h, np.uint32(factor), out=h)
    np.right_shift(h, np.uint32(16), out=t)
    return np.bitwise_xor(h, t, out=h)


def gumbel(bits: np.ndarray) -> Tensor:
    """float32 noise of the same shape."""
    v = torch.from_numpy((bits >> np.uint32(1)).view(np.int32)).float()
    v.add_(0.5).mul_(2.0**-31).clamp_(max=1 - 2.0**-24)
    return v.neg_().log1p_().neg_().log_().neg_()


def unpack_mask(mask: np.ndarray, first: int, count: int) -> Tensor:
    """bool [count]: which of the ids first, first + 1, ... a uint32 bit mask allows (bit i of word w is id 32 w + i)."""
    bits = np.unpackbits(np.ascontiguousarray(mask, "<u4").view(np.uint8), bitorder="little")
    return torch.from_numpy(bits[first : first + count].view(np.bool_))


def token_logprobs(logits: Tensor, tokens: list[int], top: list[int]) -> list[TokenLogprobs]:
    """Log probabilities of one token in each row of raw logits float32 [n, vocab], with the `top[i]` best of the row."""
    totals = logits.logsumexp(-1).tolist()
    return [_one_logprob(*row) for row in zip(logits.numpy(), totals, tokens, top, strict=True)]


def _one_logprob(row: np.ndarray, total: float, token: int, top: int) -> TokenLogprobs:
    own = row[token]
    rank = 1 + int(np.count_nonzero(row > own))
    if top == 0:
        return TokenLogprobs(float(own) - total, rank, [], [])
    top = min(top, len(row))
    ids = _at_least(row, row.max(), lambda found: len(found) >= top)
    best = ids[np.argsort(-row[ids], kind="stable")[:top]]
    return TokenLogprobs(float(own) - total, rank, best.tolist(), (row[best].astype(np.float64) - total).tolist())


def adjust(logits: Tensor, sampling: SamplingParams, tokens: np.ndarray, prompt_len: int) -> None:
    """Applies all that comes before the temperature, in place on one row float32 [vocab].

    `tokens` int32 are the row's prompt and all tokens generated so far. Presence and frequency penalties count generated
    tokens, the repetition penalty both (as vLLM and transformers have it); bad words match generated tokens only.
    """
    output = tokens[prompt_len:]
    for word in sampling.bad_words:
        n = len(word) - 1
        if n == 0 or (len(output) >= n and tuple(output[len(output) - n :].tolist()) == word[:-1]):
            logits[word[-1]] = -torch.inf
    if len(output) < sampling.min_tokens and sampling.stop_ids:
        logits[list(sampling.stop_ids)] = -torch.inf
    if sampling.logit_bias:
        ids, values = zip(*sampling.logit_bias, strict=True)
        logits[list(ids)] += torch.tensor(values)
    if sampling.repetition_penalty != 1.0:
        seen = torch.from_numpy(np.unique(tokens).astype(np.int64))
        values = logits[seen]
        logits[seen] = torch.where(values > 0, values / sampling.repetition_penalty, values * sampling.repetition_penalty)
    if (sampling.presence_penalty or sampling.frequency_penalty) and len(output):
        ids, counts = np.unique(output, return_counts=True)
        weights = sampling.frequency_penalty * counts + sampling.presence_penalty
        logits[torch.from_numpy(ids.astype(np.int64))] -= torch.from_numpy(weights.astype(np.float32))


def survivors(scores: np.ndarray, sampling: SamplingParams) -> np.ndarray | None:
    """Ids, ascending, that min_p, top_k and top_p keep of logits / temperature float32 [vocab]; None where none is set.

    Tokens that tie with the last kept one are kept too. The best token is always kept.
    """
    if sampling.min_p <= 0.0 and not 0 < sampling.top_k < len(scores) and sampling.top_p >= 1.0:
        return None
    best = scores.max()
    floor = best + np.log(sampling.min_p) if sampling.min_p > 0.0 else -np.inf
    ids = None
    if 0 < sampling.top_k < len(scores):
        ids = _at_least(scores, best, lambda found: len(found) >= sampling.top_k)
        floor = max(floor, np.partition(scores[ids], -sampling.top_k)[-sampling.top_k])
    if floor > -np.inf:
        ids = np.flatnonzero(scores >= floor) if ids is None else ids[scores[ids] >= floor]
    if sampling.top_p < 1.0:
        ids = _nucleus(scores, best, ids, sampling.top_p)
    return ids


def _nucleus(scores: np.ndarray, best: np.floating, ids: np.ndarray | None, top_p: float) -> np.ndarray:
    """The fewest of `ids` (None: of all) with a share of at least `top_p` of their probability."""
    if ids is None:
        needed = top_p * float(np.exp(scores - best).sum(dtype=np.float64))
        ids = _at_least(scores, best, lambda found: float(np.exp(scores[found] - best).sum(dtype=np.float64)) >= needed)
    else:
        needed = top_p * float(np.exp(scores[ids] - best).sum(dtype=np.float64))
    ordered = np.sort(scores[ids])[::-1]
    mass = np.exp(ordered - best).cumsum(dtype=np.float64)
    kept = min(int(np.searchsorted(mass, needed)), len(ordered) - 1)
    return ids[scores[ids] >= ordered[kept]]


def _at_least(scores: np.ndarray, best: np.floating, enough: Callable[[np.ndarray], bool]) -> np.ndarray:
    """Ids of all scores above some floor, few if a few are enough: sorting those is cheaper than sorting all."""
    for drop in (6.0, 12.0, 24.0):
        ids = np.flatnonzero(scores >= best - drop)
        if enough(ids):
            return ids
    return np.arange(len(scores))


def choose(logits: Tensor, sampling: SamplingParams, position: int) -> int:
    """The token of one adjusted row, drawn for `position`; the lowest id among equals. -1 where no token is allowed."""
    best = logits.max()
    if not bool(best.isfinite()):
        return -1
    if sampling.temperature == 0.0:
        return int(best_of(logits[None])[1][0])
    scores = (logits / sampling.temperature).numpy()
    ids = survivors(scores, sampling)
    if ids is None:
        ids = np.arange(len(scores))
    noise = gumbel(noise_bits(draw_key(sampling.seed, sampling.choice, position), spread(ids)))
    return int(ids[(scores[ids] + noise.numpy()).argmax()])


def best_of(scores: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Each row's best score float32 [n] and its lowest index int64 [n], of float32 [n, count]. A NaN wins, to be noticed."""
    rows = scores.contiguous().numpy()
    ids = rows.argmax(-1)
    return rows[np.arange(len(ids)), ids], ids
