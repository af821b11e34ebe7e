"""Drives CPU executors without planner and log: a group of ranks in threads of this process, which all get the same batches."""

import os
import select

import numpy as np

from slipstream.config import EngineConfig
from slipstream.device.cpu.executor import CpuExecutor
from slipstream.log.batch import Batch, Outcome
from slipstream.log.request import Request, SamplingParams
from slipstream.ops.collective import SharedMemory, Solo
from slipstream.shard import Shard
from slipstream.weights.checkpoint import open_checkpoint

GREEDY = SamplingParams(temperature=0.0)
NO_PAGES = np.zeros((0, 3), np.int32)


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


def rows(seq: int, entries: list[tuple[int, int, int, bool]], pages: np.ndarray = NO_PAGES) -> Batch:
    """A batch of (slot, start, count, samples)."""
    slots, starts, counts = (np.array(c, np.int32) for c in list(zip(*entries, strict=True))[:3])
    samples = np.array([e[3] for e in entries], bool)
    decodes = int((samples & (counts == 1)).argmin()) if len(entries) else 0
    return Batch(seq, slots, starts, counts, samples, decodes, pages)


class Group:
    """`size` executors of one model. Every slot has its own pages, in an order that is not the slots'."""

    def __init__(self, path, size: int = 1, slots: int = 8, max_len: int = 256, dtype: str = "float32", page_size: int = 16):
        config = EngineConfig(model=str(path), dtype=dtype, max_num_seqs=slots, max_model_len=max_len, block_size=page_size)
        checkpoint = open_checkpoint(path)
        sums = collectives(size)
        self.ranks = [CpuExecutor(checkpoint, config, Shard(r, size), sums[r]) for r in range(size)]
        self.columns = -(-max_len // page_size)
        for rank in self.ranks:
            rank.start(slots * self.columns, slots, max_len)
        self.slots, self.page_size, self.seq = slots, page_size, 0

    def __enter__(self) -> "Group":
        return self

    def __exit__(self, *_) -> None:
        for rank in self.ranks:
            rank.close()

    def admit(self, slot: int, request: Request) -> None:
        for rank in self.ranks:
            rank.admit(slot, request)

    def pages(self, slots: list[int]) -> np.ndarray:
        """Page triples for all columns of the slots; neighbours of a slot's pages belong to other slots."""
        return np.array([(s, c, 1 + c * self.slots + s) for s in slots for c in range(self.columns)], np.int32).reshape(-1, 3)

    def launch(self, entries: list[tuple[int, int, int, bool]], pages: np.ndarray = NO_PAGES) -> int:
        self.seq += 1
        for rank in self.ranks:
            rank.launch(rows(self.seq, entries, pages))
        return self.seq

    def outcome(self) -> Outcome:
        """The next outcome; all ranks must have the same one."""
        found = [wait_one(rank) for rank in self.ranks]
        for other in found[1:]:
            assert other.tokens.tolist() == found[0].tokens.tolist()
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
                self.admit(slots[i], request(i, prompts[i], count, params[i]))
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
            out[i][0].append(int(outcome.tokens[k]))
            if k in outcome.logprobs:
                out[i][1].append(outcome.logprobs[k])
        for slot, (_, found) in outcome.prompt_logprobs.items():
            out[slots.index(slot)][2].extend(found)


def wait_one(executor: CpuExecutor) -> Outcome:
    """One outcome of an executor that has exactly one to come before the next is launched, or keeps the rest for later."""
    kept = executor.__dict__.setdefault("kept_by_test", [])
    while not kept:
        assert select.select([executor.fileno()], [], [], 60)[0], "no outcome within a minute"
        kept.extend(executor.outcomes())
    return kept.pop(0)
