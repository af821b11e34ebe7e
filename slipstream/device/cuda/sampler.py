"""How the CUDA device chooses tokens: the plain rows' exchange, and everything else in queued tensor operations.

A row that needs more than its best score is computed by rank slot mod N on the row's whole logits, gathered through symmetric
memory; the other ranks learn its token in the same exchange as all others. The order of the steps is that of
ops/sampling.py. Nothing here waits for the device.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from slipstream.device.cuda.tables import CudaTables, StepInputs
from slipstream.log.batch import Batch, Outcome
from slipstream.log.request import Request, SamplingParams, TokenLogprobs
from slipstream.ops.cuda.launch import power
from slipstream.ops.cuda.sample import ELSEWHERE, TILE, UNFORCED, exchange_kernel, force_kernel, local_best_kernel
from slipstream.ops.cuda.symmetric import FAULT_NS, PROGRAMS, Symmetric
from slipstream.ops.interface import JudgedRows, Step

_NOBODY = SamplingParams(temperature=0.0)


@dataclass(eq=False)
class HostCopy:
    """A device tensor that is being copied into its own pinned memory."""

    device: Tensor
    host: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.host = torch.empty(self.device.shape, dtype=self.device.dtype, pin_memory=True)


@dataclass(eq=False)
class LogprobRows:
    """Log probabilities of n tokens: their own, their ranks, and the best `most` of each row. `top[i]` of them are wanted."""

    own: HostCopy
    rank: HostCopy
    ids: HostCopy
    values: HostCopy
    top: list[int]

    def rows(self) -> list[TokenLogprobs]:
        columns = (self.own.host, self.rank.host, self.ids.host, self.values.host)
        rows = zip(*(c.tolist() for c in columns), self.top, strict=True)
        return [TokenLogprobs(own, rank, ids[:k], values[:k]) for own, rank, ids, values, k in rows]


@dataclass(eq=False)
class Extras:
    """The data of an outcome besides its tokens."""

    logprobs: list[tuple[list[int], LogprobRows]] = field(default_factory=list)  # (rows of the outcome, what they want)
    prompts: list[tuple[int, int, list[LogprobRows]]] = field(default_factory=list)  # (slot, start, pieces)

    def copy_to_host(self) -> None:
        """Queues the copies on the current stream."""
        pieces = [j for _, j in self.logprobs] + [j for _, _, found in self.prompts for j in found]
        for copy in (c for j in pieces for c in (j.own, j.rank, j.ids, j.values)):
            copy.device.record_stream(torch.cuda.current_stream())
            copy.host.copy_(copy.device, non_blocking=True)

    def add_to(self, outcome: Outcome) -> None:
        for index, judged in self.logprobs:
            outcome.logprobs.update(zip(((i, 0) for i in index), judged.rows(), strict=True))
        for slot, start, pieces in self.prompts:
            outcome.prompt_logprobs[slot] = start, [row for piece in pieces for row in piece.rows()]


class CudaSampler:
    """One rank's sampling. `part` is its [first, last) of the vocabulary, `ring` and `counter` the outcome ring's."""

    def __init__(
        self, tables: CudaTables, inputs: StepInputs, symmetric: Symmetric, vocab: int, parts: list[tuple[int, int]],
        ring: Tensor, counter: Tensor, logits: Callable[[Tensor, Step], Tensor], barrier: Callable[[], None],
    ):  # fmt: skip
        self.tables, self.inputs, self.symmetric = tables, inputs, symmetric
        self.vocab, self.parts, self.part = vocab, parts, parts[symmetric.rank]
        self.ring, self.counter, self.logits, self.barrier = ring, counter, logits, barrier
        self.device = ring.device
        slots, judged = tables.slots, inputs.layout.judged
        self.sampling = [_NOBODY] * slots
        self.prompt_len = np.zeros(slots, np.int64)
        self.tiles = -(-(self.part[1] - self.part[0]) // TILE)
        self._scores = torch.zeros(judged * self.tiles, dtype=torch.float32, device=self.device)
        self._ids = torch.zeros(judged * self.tiles, dtype=torch.int32, device=self.device)
        self._unforced = torch.full((judged,), UNFORCED, dtype=torch.int32, device=self.device)
        self._forced = self._unforced.clone()
        self._lost = torch.zeros(1, dtype=torch.int32, device=self.device)  # counts what is no step
        alone = torch.zeros(1, dtype=torch.int64, device=self.device)  # addresses that a single rank never reads
        self._pairs = symmetric.pairs.addresses if symmetric.size > 1 else alone
        self._flags = symmetric.flags.addresses if symmetric.size > 1 else alone

    def init_slot(self, slot: int, request: Request) -> None:
        self.sampling[slot], self.prompt_len[slot] = request.sampling, request.prompt_len

    # --- all rows

    def sample(self, logits: Tensor, rows: int, forced: Tensor | None = None) -> None:
        """Queues the best of every judged token, the exchange, and the writing of tokens, for `rows` rows of the step's width.

        `forced` holds tokens chosen otherwise.
        """
        i, t, s = self.inputs, self.tables, self.symmetric
        first, last = self.part
        local_best_kernel[(rows * i.width, self.tiles)](
            logits, i.sample_slot, i.sample_position, t.temperatures, t.bases, self._scores, self._ids, self.counter, first,
            last - first, logits.stride(0), TILE=TILE, num_warps=4,
        )  # fmt: skip
        exchange_kernel[(rows,)](
            self._scores, self._ids, self._unforced if forced is None else forced, i.sample_slot, i.sample_position, t.tokens,
            t.next, self.ring, self.counter, self._pairs, self._flags, s.counts, s.fault, self.tiles, t.tokens.stride(0),
            self.ring.stride(0), s.rank, t.slots, FAULT_NS, PARTS=power(self.tiles), WORLD=s.size, PROGRAMS=PROGRAMS,
            PAIRS=i.layout.judged, DEPTH=self.ring.shape[0], WIDTH=i.width, num_warps=1,
        )  # fmt: skip

    # --- rows that need more

    def sample_each(
        self, logits: Tensor, batch: Batch, masks: dict[int, np.ndarray], count: int, extras: Extras | None
    ) -> Extras | None:
        """Samples `count` rows of one judged token (padded to len(logits)) of which some are not plain or have a mask."""
        assert batch.width == 1, "where rows verify drafts, the host does not know how far they are"
        rows_judged = batch.judged
        slots, ends = batch.slots[rows_judged], (batch.starts + batch.counts)[rows_judged]
        index = [i for i in range(count) if not self.sampling[slots[i]].plain or int(slots[i]) in masks]
        rows = self._put(np.array(index, np.int64))
        whole = self._whole(logits[: len(slots)].index_select(0, rows))
        mine = [k for k, i in enumerate(index) if slots[i] % self.symmetric.size == self.symmetric.rank]
        forced = self._forced.fill_(UNFORCED).index_fill_(0, rows, ELSEWHERE)
        if mine:
            params = [self.sampling[slots[index[k]]] for k in mine]
            own_slots, own_ends = slots[[index[k] for k in mine]], ends[[index[k] for k in mine]]
            x = whole.index_select(0, self._put(np.array(mine, np.int64)))
            self._mask(x, own_slots, masks)
            self._adjust(x, params, own_slots, own_ends)
            self._restrict(x, params)
            self._draw(x, params, own_slots, own_ends, rows, mine, forced)
        self.sample(logits, logits.shape[0], forced)
        wanted = [k for k, i in enumerate(index) if self.sampling[slots[i]].logprobs >= 0]
        if wanted:
            picked = [index[k] for k in wanted]
            at = self._put(slots[picked].astype(np.int64)), self._put(ends[picked].astype(np.int64))
            judged = self._judge(whole[self._put(np.array(wanted))], self.tables.tokens[at].long(), [
                self.sampling[slots[i]].logprobs for i in picked
            ])  # fmt: skip
            extras = extras or Extras()
            extras.logprobs.append((picked, judged))
        return extras

    def _put(self, array: np.ndarray) -> Tensor:
        """A small host array on the device; the pinned buffer is the allocator's, which holds it until the copy is done."""
        host = torch.empty(array.shape, dtype=torch.from_numpy(array).dtype, pin_memory=True)
        host.numpy()[...] = array
        return host.to(self.device, non_blocking=True)

    def _whole(self, logits: Tensor) -> Tensor:
        """Gathers [n, part] of every rank into a copy [n, vocab]."""
        s = self.symmetric
        if s.size == 1:
            return logits
        n = logits.shape[0]
        self.barrier()  # the peers have read the previous contents
        s.logits.local[:n, : logits.shape[1]] = logits
        self.barrier()
        return torch.cat([peer[:n, : b - a] for peer, (a, b) in zip(s.peer_logits, self.parts, strict=True)], dim=1)

    def _mask(self, x: Tensor, slots: np.ndarray, masks: dict[int, np.ndarray]) -> None:
        masked = [i for i, slot in enumerate(slots.tolist()) if slot in masks]
        if not masked:
            return
        words = self._put(np.stack([np.asarray(masks[int(slots[i])][0], np.uint32).view(np.int32) for i in masked]))
        bits = (words[:, :, None] >> torch.arange(32, dtype=torch.int32, device=self.device)) & 1
        allowed = bits.view(len(masked), -1)[:, : self.vocab].bool()
        for k, i in enumerate(masked):
            x[i].masked_fill_(~allowed[k], -torch.inf)

    def _adjust(self, x: Tensor, params: list[SamplingParams], slots: np.ndarray, ends: np.ndarray) -> None:
        """Bad words, min_tokens, logit_bias, penalties, temperature: in place on x float32 [n, vocab]."""
        flat, values = [], []
        for i, p in enumerate(params):
            generated = int(ends[i]) - int(self.prompt_len[slots[i]])
            banned = [w[0] for w in p.bad_words if len(w) == 1]
            if generated < p.min_tokens:
                banned += p.stop_ids
            flat += [i * self.vocab + t for t in banned]
            values += [-np.inf] * len(banned)
            flat += [i * self.vocab + t for t, _ in p.logit_bias]
            values += [v for _, v in p.logit_bias]
            for word in p.bad_words:
                self._ban_ending(x[i], word, int(slots[i]), int(ends[i]), generated)
        if flat:
            x.view(-1).index_add_(0, self._put(np.array(flat, np.int64)), self._put(np.array(values, np.float32)))
        self._penalize(x, params, slots, ends)
        warm = np.array([p.temperature if p.temperature > 0 else 1.0 for p in params], np.float32)
        if (warm != 1.0).any():
            x /= self._put(warm)[:, None]

    def _ban_ending(self, x: Tensor, word: tuple[int, ...], slot: int, end: int, generated: int) -> None:
        """Bans a longer bad word's last token where the generated tokens end in all before it."""
        n = len(word) - 1
        if 0 < n <= generated:
            same = (self.tables.tokens[slot, end - n : end] == self._put(np.array(word[:-1], np.int32))).all()
            x[word[-1]] = torch.where(same, -torch.inf, x[word[-1]])

    def _penalize(self, x: Tensor, params: list[SamplingParams], slots: np.ndarray, ends: np.ndarray) -> None:
        which = [
            i for i, p in enumerate(params) if p.repetition_penalty != 1.0 or p.presence_penalty or p.frequency_penalty
        ]  # fmt: skip
        if not which:
            return
        longest = int(ends[which].max())
        tokens = self.tables.tokens[self._put(slots[which].astype(np.int64)), :longest].long()
        at = torch.arange(longest, device=self.device)
        before = at < self._put(ends[which].astype(np.int64))[:, None]
        generated = before & (at >= self._put(self.prompt_len[slots[which]])[:, None])
        counts = torch.zeros((len(which), self.vocab), device=self.device)
        seen = torch.zeros_like(counts).scatter_add_(1, tokens, before.float()) > 0
        counts.scatter_add_(1, tokens, generated.float())
        numbers = [[params[i].repetition_penalty, params[i].frequency_penalty, params[i].presence_penalty] for i in which]
        repetition, frequency, presence = self._put(np.array(numbers, np.float32).T.copy())[:, :, None]
        rows = self._put(np.array(which, np.int64))
        y = x.index_select(0, rows)
        y = torch.where(seen, torch.where(y > 0, y / repetition, y * repetition), y)
        y -= frequency * counts + presence * (counts > 0)
        x.index_copy_(0, rows, y)

    def _restrict(self, x: Tensor, params: list[SamplingParams]) -> None:
        """min_p, top_k and top_p on rows that draw, in place on scores already divided by the temperature."""
        warm = [p.temperature > 0 for p in params]
        min_p = np.array([p.min_p if w else 0.0 for p, w in zip(params, warm, strict=True)], np.float32)
        if (min_p > 0).any():
            with np.errstate(divide="ignore"):
                floor = x.max(1, keepdim=True).values + self._put(np.log(min_p))[:, None]
            x.masked_fill_(x < floor, -torch.inf)
        top_k = np.array([p.top_k if w and p.top_k else self.vocab for p, w in zip(params, warm, strict=True)], np.int64)
        top_p = np.array([p.top_p if w else 1.0 for p, w in zip(params, warm, strict=True)], np.float32)
        if (top_k >= self.vocab).all() and (top_p >= 1.0).all():
            return
        best = x.sort(1, descending=True).values
        k = self._put(np.minimum(top_k, self.vocab) - 1)[:, None]
        best.masked_fill_(best < best.gather(1, k), -torch.inf)
        mass = (best - best.logsumexp(1, keepdim=True)).exp()
        p = self._put(top_p)[:, None]
        kept = ((mass.cumsum(1) - mass < p).sum(1, keepdim=True)).clamp_(min=1)
        floor = torch.where(p < 1.0, best.gather(1, kept - 1), best.gather(1, k))
        x.masked_fill_(x < floor, -torch.inf)

    def _draw(
        self, x: Tensor, params: list[SamplingParams], slots: np.ndarray, ends: np.ndarray, rows: Tensor, mine: list[int],
        forced: Tensor,
    ) -> None:  # fmt: skip
        """forced[row] = argmax(x + noise) for this rank's rows."""
        n = x.shape[0]
        tiles = -(-self.vocab // TILE)
        scores = torch.empty(n * tiles, dtype=torch.float32, device=self.device)
        ids = torch.empty(n * tiles, dtype=torch.int32, device=self.device)
        warm = self._put(np.array([float(p.temperature > 0) for p in params], np.float32))
        bases = self.tables.bases.index_select(0, self._put(slots.astype(np.int64)))
        local_best_kernel[(n, tiles)](
            x, torch.arange(n, dtype=torch.int32, device=self.device), self._put(ends.astype(np.int32)), warm, bases, scores,
            ids, self._lost, 0, self.vocab, x.stride(0), TILE=TILE, num_warps=4,
        )  # fmt: skip
        to = rows.index_select(0, self._put(np.array(mine, np.int64))).int()
        force_kernel[(n,)](scores, ids, to, forced, tiles, PARTS=power(tiles))

    # --- log probabilities

    def _judge(self, raw: Tensor, tokens: Tensor, top: list[int]) -> LogprobRows:
        """raw float32 [n, vocab], tokens int64 [n]."""
        logs = raw.log_softmax(1)
        own = logs.gather(1, tokens[:, None])
        rank = (logs > own).sum(1) + 1
        values, ids = logs.topk(max(top), 1) if max(top) else (logs[:, :0], tokens.new_zeros((len(top), 0)))
        return LogprobRows(HostCopy(own[:, 0].contiguous()), HostCopy(rank), HostCopy(ids), HostCopy(values.contiguous()), top)

    def judged(self, batch: Batch) -> list[tuple[int, int, int, int]]:
        """(slot, start, its first token's index in the step, positions to judge) of rows that want prompt log probabilities."""
        found = []
        firsts = np.cumsum(batch.counts) - batch.counts
        for i in range(batch.decodes, len(batch.slots)):
            slot, start, count = int(batch.slots[i]), int(batch.starts[i]), int(batch.counts[i])
            n = min(start + count, int(self.prompt_len[slot]) - 1) - start
            if self.sampling[slot].prompt_logprobs >= 0 and n > 0:
                found.append((slot, start, int(firsts[i]), n))
        return found

    def judge(self, hidden: Tensor, wanted: list[tuple[int, int, int, int]]) -> Extras:
        """Position p of a prompt is judged by the logits of p - 1."""
        extras = Extras()
        piece = min(64, self.tables.slots)
        for slot, start, first, count in wanted:
            top = self.sampling[slot].prompt_logprobs
            pieces = []
            for i in range(0, count, piece):
                n = min(piece, count - i)
                part = slice(first + i, first + i + n)
                whole = self._whole(self.logits(hidden[part], JudgedRows(self.inputs.slots[part])))
                tokens = self.tables.tokens[slot, start + 1 + i : start + 1 + i + n].long()
                pieces.append(self._judge(whole, tokens, [top] * n))
            extras.prompts.append((slot, start + 1, pieces))
        return extras
