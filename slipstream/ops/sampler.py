"""Sampling of a step's rows by all ranks of a group together, on the CPU.

A plain row needs an exchange of each rank's best (value, id) only. Any other row is sampled by rank slot mod N, which gets the
row's whole logits, and its result's bytes are shared. So every rank holds the same outcome.
"""

from dataclasses import dataclass, field

import msgspec
import numpy as np
import torch
from torch import Tensor

from slipstream.log.request import SamplingParams, TokenLogprobs
from slipstream.ops.collective import Collective
from slipstream.ops.sampling import adjust, best_of, choose, draw_key, gumbel, noise_bits, spread, token_logprobs, unpack_mask
from slipstream.shard import split_evenly

NO_TOKEN = "no token is allowed here"
# Other parameters may forbid what a grammar allows, and a grammar may cost too much only here.
DEAD_END = "the grammar allows no token here, or finding one costs more than it may"
NOT_FINITE = "the model's logits are not finite"
_GATHER_ROWS = 64  # rows of whole logits that are held at once


@dataclass(frozen=True, eq=False)
class SampleRow:
    """A row that samples. `tokens` int32: its prompt and all tokens before the one to be drawn, a view of the slot's table."""

    slot: int
    sampling: SamplingParams
    prompt_len: int
    tokens: np.ndarray
    mask: np.ndarray | None = None  # uint32 bits of the ids that a grammar allows

    @property
    def plain(self) -> bool:
        return self.sampling.plain


def nothing_allowed(row: SampleRow) -> str:
    """The error of a row in which every token is forbidden."""
    return NO_TOKEN if row.mask is None else DEAD_END


@dataclass(eq=False)
class Sampled:
    """tokens int32 [n], -1 where `errors` says why there is none; both keyed dicts by row index."""

    tokens: np.ndarray
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)
    errors: dict[int, str] = field(default_factory=dict)


class _Result(msgspec.Struct, array_like=True):
    row: int
    token: int
    error: str
    logprobs: TokenLogprobs | None


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(list[_Result]).decode
_decode_prompt = msgspec.msgpack.Decoder(dict[int, list[TokenLogprobs]]).decode


class Sampler:
    """One rank's part in the group's sampling. `vocab` is the size of the whole vocabulary, split evenly over the ranks."""

    def __init__(self, collective: Collective, vocab: int):
        self.collective = collective
        self.parts = split_evenly(vocab, collective.size)
        self.first, self.last = self.parts[collective.rank]
        self.spread = spread(np.arange(self.first, self.last))
        self.widest = max(b - a for a, b in self.parts)

    def sample(self, logits: Tensor, rows: list[SampleRow]) -> Sampled:
        """logits float32 [n, this rank's part], one row for each of `rows`; may be overwritten."""
        out = Sampled(np.full(len(rows), -1, np.int32))
        plain = [i for i, r in enumerate(rows) if r.plain]
        other = [i for i, r in enumerate(rows) if not r.plain]
        if plain:
            self._plain(logits if not other else logits[plain], plain, rows, out)
        if other:
            self._other(logits[other], other, rows, out)
        return out

    def _plain(self, logits: Tensor, index: list[int], rows: list[SampleRow], out: Sampled) -> None:
        """Local best of logits / T + noise over this rank's ids; the ranks' bests are compared, the lower id wins a tie."""
        for i, at in enumerate(index):
            if (mask := rows[at].mask) is not None:
                logits[i].masked_fill_(~unpack_mask(mask, self.first, self.last - self.first), -torch.inf)
        for i, at in enumerate(index):
            s = rows[at].sampling
            if s.temperature > 0.0:
                bits = noise_bits(draw_key(s.seed, s.choice, len(rows[at].tokens)), self.spread)
                logits[i].div_(s.temperature).add_(gumbel(bits))
        best = self.greedy(logits)
        out.tokens[index] = best.tokens
        for i, why in best.errors.items():
            out.errors[index[i]] = nothing_allowed(rows[index[i]]) if why == NO_TOKEN else why

    def greedy(self, scores: Tensor) -> Sampled:
        """The best id of each row of scores float32 [n, this rank's part], over all ranks; the lowest of equals."""
        best, ids = best_of(scores)
        ids = ids + self.first
        if self.collective.size > 1:
            best, ids = self._best_of_ranks(best, ids)
        finite = np.isfinite(best)
        out = Sampled(np.where(finite, ids, -1).astype(np.int32))
        for i in np.flatnonzero(~finite).tolist():
            out.errors[i] = NO_TOKEN if best[i] == -np.inf else NOT_FINITE
        return out

    def _best_of_ranks(self, best: np.ndarray, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        pairs = np.stack([best.astype(np.float64), ids.astype(np.float64)])
        all = self.collective.all_gather(torch.from_numpy(pairs)).numpy()  # [size, 2, n]
        winner = all[:, 0].argmax(0)  # the first of equals: the lower rank holds the lower ids
        columns = np.arange(len(best))
        return all[winner, 0, columns], all[winner, 1, columns].astype(np.int64)

    def _whole(self, logits: Tensor) -> Tensor:
        """[n, part] of every rank to [n, vocab]."""
        if self.collective.size == 1:
            return logits
        padded = logits.new_zeros(logits.shape[0], self.widest)
        padded[:, : logits.shape[1]] = logits
        parts = self.collective.all_gather(padded)
        return torch.cat([part[:, : b - a] for part, (a, b) in zip(parts, self.parts, strict=True)], dim=1)

    def _other(self, logits: Tensor, index: list[int], rows: list[SampleRow], out: Sampled) -> None:
        results = []
        for i in range(0, len(index), _GATHER_ROWS):
            few = index[i : i + _GATHER_ROWS]
            whole = self._whole(logits[i : i + _GATHER_ROWS])
            for k, at in enumerate(few):
                if rows[at].slot % self.collective.size == self.collective.rank:
                    results.append(self._one(whole[k], at, rows[at]))
        for data in self.collective.all_gather_bytes(_encode(results)):
            for r in _decode(data):
                out.tokens[r.row] = r.token
                if r.error:
                    out.errors[r.row] = r.error
                if r.logprobs is not None:
                    out.logprobs[r.row] = r.logprobs

    def _one(self, logits: Tensor, at: int, row: SampleRow) -> _Result:
        """Samples one row of whole raw logits."""
        s = row.sampling
        raw = logits.clone() if s.logprobs >= 0 else logits
        if row.mask is not None:
            logits.masked_fill_(~unpack_mask(row.mask, 0, logits.numel()), -torch.inf)
        adjust(logits, s, row.tokens, row.prompt_len)
        token = choose(logits, s, len(row.tokens))
        if token < 0:
            return _Result(at, -1, NOT_FINITE if logits.isnan().any() else nothing_allowed(row), None)
        found = token_logprobs(raw[None], [token], [s.logprobs])[0] if s.logprobs >= 0 else None
        return _Result(at, token, "", found)

    def prompt_logprobs(self, logits: Tensor, slot: int, targets: np.ndarray, top: int, into: list[TokenLogprobs]) -> None:
        """Appends the log probabilities of `targets` int32 [n] under raw logits float32 [n, part], n at most a few dozen."""
        whole = self._whole(logits)
        mine = slot % self.collective.size == self.collective.rank
        found = token_logprobs(whole, targets.tolist(), [top] * len(targets)) if mine else []
        for data in self.collective.all_gather_bytes(_encode({slot: found})):
            into.extend(_decode_prompt(data)[slot])
