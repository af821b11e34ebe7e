"""The workloads as plans: the requests, their lengths and times. No I/O; the same seed makes the same plan.

Their names and shapes are fixed, so that figures from different days and servers can be compared.
"""

import dataclasses
import typing

import numpy as np

from slipstream.bench.load.records import Conversation, Job, Turn
from slipstream.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class Shape:
    """Lengths in tokens. `scale` multiplies them all, for servers with a short context."""

    input_len: int = 200
    long_input_len: int = 3000
    long_share: float = 0.2
    output_len: int = 256
    stream_output_len: int = 3000
    burst_input_min: int = 16000
    burst_input_max: int = 30000
    burst_output_len: int = 16

    def scaled(self, scale: float) -> "Shape":
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return Shape(**{k: v if k == "long_share" else max(1, round(v * scale)) for k, v in values.items()})


def mix(shape: Shape, count: int, seed: int, first: int = 0) -> list[Job]:
    """Short and long prompts in the exact share, shuffled."""
    rng = np.random.default_rng([seed, 1])
    long = np.zeros(count, bool)
    long[: round(count * shape.long_share)] = True
    rng.shuffle(long)
    return [
        Job(first + i, "long" if x else "short", shape.long_input_len if x else shape.input_len, shape.output_len)
        for i, x in enumerate(long)
    ]


def poisson(jobs: list[Job], rate: float, seed: int) -> list[Job]:
    """The same requests with arrivals at `rate` per second."""
    at = np.cumsum(np.random.default_rng([seed, 2]).exponential(1 / rate, len(jobs)))
    return [Job(j.index, j.kind, j.prompt_len, j.output_len, float(t)) for j, t in zip(jobs, at, strict=True)]


def burst(shape: Shape, streams: int, prompts: int, seed: int) -> list[Job]:
    """The decoding streams first, then the prompts that come all at once."""
    rng = np.random.default_rng([seed, 3])
    jobs = [Job(i, "stream", shape.input_len, shape.stream_output_len) for i in range(streams)]
    lengths = rng.integers(shape.burst_input_min, shape.burst_input_max + 1, prompts).tolist()
    return jobs + [Job(streams + i, "burst", n, shape.burst_output_len) for i, n in enumerate(lengths)]


def conversations(count: int, limit: int, leave: float, seed: int, scale: float = 1.0) -> list[Conversation]:
    """Conversations of 2-6 turns that fit into `limit` tokens; a share `leave` of the clients leaves in mid-stream."""
    rng = np.random.default_rng([seed, 4])
    out: list[Conversation] = []
    for index in range(count):
        turns: list[Turn] = []
        room = limit
        length = int(rng.integers(2, 7))
        leaves_at = int(rng.integers(0, length)) if rng.random() < leave else None
        for i in range(length):
            first, later = rng.integers(200, 1001), rng.integers(20, 201)
            new = max(1, round(int(first if i == 0 else later) * scale))
            answer = max(4, round(int(rng.integers(32, 129)) * scale))
            room -= new + answer
            if room < 0:
                break
            left = int(rng.integers(1, answer)) if leaves_at == i else None
            turns.append(Turn(new, answer, left))
            if left is not None:
                break
        if not turns:
            raise ConfigError(
                f"a conversation's first turn does not fit into the model's {limit} tokens; use a smaller --scale"
            )
        out.append(Conversation(index, turns))
    return out


def parity(count: int, output_len: int, seed: int, longest: int = 3000, seeded: bool = False) -> list[Job]:
    """The fixed set: prompts of 20 to `longest` tokens, evenly in the logarithm, greedy or with a seed each."""
    lengths = np.round(np.geomspace(20, max(20, longest), count)).astype(int)
    return [Job(i, "parity", int(n), output_len, seed=seed + i if seeded else None) for i, n in enumerate(lengths)]


def check_fit(jobs: typing.Iterable[Job], limit: int | None) -> None:
    """Raises ConfigError if a request is longer than the model's context."""
    if limit is None:
        return
    worst = max((j.prompt_len + j.output_len for j in jobs), default=0)
    if worst > limit:
        raise ConfigError(
            f"the longest request has {worst} tokens and the model takes at most {limit}; "
            f"use --scale {limit / worst * 0.99:.2f} or smaller, or set the lengths"
        )
