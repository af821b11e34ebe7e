"""Drives CPU executors without planner and log: a group of ranks in threads of this process, which all get the same batches."""

import os
import select

import numpy as np

from slipstream.config import EngineConfig
from slipstream.device.cpu.executor import CpuExecutor
from slipstream.log.batch import Batch, Outcome
from slipstream.log.caches import Limits, TableLimits, windows
from slipstream.log.request import Request, SamplingParams
from slipstream.ops.collective import SharedMemory, Solo
from slipstream.shard import Shard
from slipstream.weights.checkpoint import open_checkpoint

GREEDY = SamplingParams(temperature=0.0)
NO_PAGES = np.zeros((0, 4), np.int32)
Entry = tuple[int, int, int, bool]  # (slot, start, count, samples)


def collectives(size: int, max_bytes: int = 1 << 16) -> list:
    if size == 1:
        return [Solo()]
    fd = os.memfd_create("test-sums")
    os.ftruncate(fd, SharedMemory.required_bytes(size, max_bytes))
    made = [SharedMemory(fd, rank, size, max_bytes) for rank in range(size)]
    os.close(fd)
    return made


def request(id: int, prompt: list[int], max_tokens: int, sampling: SamplingParams = GREEDY) -> Request:
    return Request(id, np.array(prompt, "<i4").tobytes(), max_tokens, sampling)


def rows(seq: int, entries: list[Entry], pages: np.ndarray = NO_PAGES, saves: tuple[tuple[int, int], ...] = ()) -> Batch:
    slots, starts, counts, sampled = (np.array(c, np.int32) for c in zip(*entries, strict=True))
    decodes = int(((sampled > 0) & (counts == 1)).argmin()) if len(entries) else 0
    return Batch(seq, slots, starts, counts, sampled, int(sampled.max()), decodes, pages, saves)


class Group:
    """`size` executors of one model. Every slot has its own pages, in an order that is not the slots'."""

    def __init__(
        self, path, size: int = 1, slots: int = 8, max_len: int = 256, dtype: str = "float32", page_size: int = 16,
        host_pages: int = 0, snapshots: int = 0, width: int = 1, pages: int = 0, **config,
    ):  # fmt: skip
        engine = EngineConfig(
            model=str(path), dtype=dtype, max_num_seqs=slots, max_model_len=max_len, block_size=page_size, **config
        )
        checkpoint = open_checkpoint(path, engine.load_format, engine.seed)
        sums = collectives(size)
        self.ranks = [CpuExecutor(checkpoint, engine, Shard(r, size), sums[r]) for r in range(size)]
        self.columns = -(-max_len // page_size)
        pages = pages or slots * self.columns
        tables = tuple(TableLimits(pages, w, host_pages) for w in windows(self.ranks[0].model.caches))
        self.limits = Limits(
            tables, slots, max_len, page_size, snapshots=snapshots, snapshot_tokens=page_size if snapshots else 0, width=width
        )
        for rank in self.ranks:
            rank.start(self.limits)
        self.slots, self.page_size, self.seq = slots, page_size, 0

    def __enter__(self) -> "Group":
        return self

    def __exit__(self, *_) -> None:
        for rank in self.ranks:
            rank.close()

    def init_slot(self, slot: int, request: Request) -> None:
        for rank in self.ranks:
            rank.init_slot(slot, request)

    def pages(self, slots: list[int]) -> np.ndarray:
        """Places of all tables and columns of the slots; neighbours of a slot's pages belong to other slots."""
        tables = range(len(self.limits.tables))
        places = [
            (t, s, c, 1 + c * self.slots + (s + t) % self.slots) for t in tables for s in slots for c in range(self.columns)
        ]
        return np.array(places, np.int32).reshape(-1, 4)

    def launch(self, entries: list[Entry], pages: np.ndarray = NO_PAGES, saves: tuple[tuple[int, int], ...] = ()) -> int:
        self.seq += 1
        for rank in self.ranks:
            rank.launch(rows(self.seq, entries, pages, saves))
        return self.seq

    def outcome(self) -> Outcome:
        """The next outcome; all ranks must have the same one."""
        found = [wait_one(rank) for rank in self.ranks]
        for other in found[1:]:
            assert other.tokens.tolist() == found[0].tokens.tolist()
            assert other.accepted.tolist() == found[0].accepted.tolist()
            assert other.logprobs == found[0].logprobs and other.errors == found[0].errors
            assert other.prompt_logprobs == found[0].prompt_logprobs
        return found[0]

    def generate(self, prompts: list[list[int]], count: int, sampling=GREEDY, chunk: int = 1 << 30, slots=None, joins=None):
        """`count` tokens for each prompt, two steps in flight. Prompt i is admitted before step joins[i] (default: the first).

        Returns (tokens, logprobs, prompt_logprobs) as lists by prompt.
        """
        n = len(prompts)
        params = sampling if isinstance(sampling, list) else [sampling] * n
        slots = slots or list(range(n))
        joins = joins or [0] * n
        launched, flights = [0] * n, []
        out = [([], [], []) for _ in prompts]
        step = 0
        while flights or any(k < len(p) + count - 1 for k, p in zip(launched, prompts, strict=True)):
            new = [i for i in range(n) if joins[i] == step]
            for i in new:
                self.init_slot(slots[i], request(i, prompts[i], count, params[i]))
            decodes, chunks = [], []
            for i, prompt in enumerate(prompts):
                if joins[i] > step or launched[i] >= len(prompt) + count - 1:
                    continue
                todo = min(chunk, len(prompt) - launched[i]) if launched[i] < len(prompt) else 1
                samples = launched[i] + todo >= len(prompt)
                (decodes if launched[i] >= len(prompt) else chunks).append((i, launched[i], todo, samples))
                launched[i] += todo
            entries = decodes + chunks
            if entries:
                self.launch([(slots[i], *rest) for i, *rest in entries], self.pages([slots[i] for i in new]))
                flights.append(entries)
            step += 1
            if len(flights) == 2 or not entries and flights:
                self._settle(flights.pop(0), slots, out)
        return tuple(list(part) for part in zip(*out, strict=True))

    def _settle(self, entries, slots, out) -> None:
        outcome = self.outcome()
        for k, (i, *_) in enumerate(e for e in entries if e[3]):
            out[i][0].extend(outcome.tokens[k, : outcome.accepted[k]].tolist())
            if (k, 0) in outcome.logprobs:
                out[i][1].append(outcome.logprobs[k, 0])
        for slot, (_, found) in outcome.prompt_logprobs.items():
            out[slots.index(slot)][2].extend(found)


def wait_one(executor: CpuExecutor) -> Outcome:
    """One outcome of an executor that has exactly one to come before the next is launched, or keeps the rest for later."""
    kept = executor.__dict__.setdefault("kept_by_test", [])
    while not kept:
        assert select.select([executor.fileno()], [], [], 60)[0], "no outcome within a minute"
        kept.extend(executor.outcomes())
    return kept.pop(0)
