"""What happens in one simulated run, as plain values drawn from a seed: the group, the requests, the clients, the faults.

A scenario can be written down, cut down and run again; all that the run draws beyond it comes from `noise`.
"""

import random
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from slipstream.log.caches import Limits, TableLimits
from slipstream.log.request import Request, SamplingParams
from slipstream.schedule.admission import MAX_LONG_PREFILLS, SHORT_PROMPT_TOKENS
from slipstream.verify.common.toy import VOCAB

MIN_REQUESTS = 30
MIN_ENTRIES = 100


class Client(NamedTuple):
    """One request and what its client does."""

    request: Request
    at: float  # seconds, when it is submitted
    gone: float = 0.0  # seconds after `at` at which the client leaves; 0: it stays
    stop: int = 0  # the front end finds a stop string in this generated token; 0: never
    kept: int = 0  # how many generated tokens then stay part of the answer


class Fault(NamedTuple):
    """`kind`: lose_entry, lose_body, lose_reply, double_reply, wrong_digest, raise, die, stop.

    `nth`: at which message of that kind to or from the rank; for die and stop, `at` is the time. `seconds`: how long a
    stopped rank stands still.
    """

    kind: str
    rank: int
    nth: int = 0
    at: float = 0.0
    seconds: float = 0.0


@dataclass(frozen=True)
class Scenario:
    seed: int
    size: int
    asynchronous: bool
    pages: int
    slots: int
    max_len: int
    page_size: int
    caching: bool
    host_pages: int
    cap: int  # token budget of a step
    target: float | None  # seconds that a step with decoding rows may take
    max_queue: int
    clients: tuple[Client, ...]
    reserve: tuple[Client, ...] = ()  # come one by one when all others have ended before MIN_ENTRIES entries
    faults: tuple[Fault, ...] = ()
    noise: int = 0
    jitter: float = 1e-4  # seconds, scale of delays of messages and outcomes
    spike: float = 0.0  # share of delays that are a hundred times longer
    slow: tuple[float, ...] = field(default=(1.0,))  # factor of each rank's delays
    width: int = 1  # tokens that a row may give at most
    window: int = 0  # tokens of a second page table; 0: there is none
    snapshot_tokens: int = 0  # 0: the model has no state
    snapshots: int = 0
    short: int = SHORT_PROMPT_TOKENS  # tokens of a short prompt
    max_long_prefills: int = MAX_LONG_PREFILLS

    @property
    def limits(self) -> Limits:
        windows = (0, self.window) if self.window else (0,)
        tables = tuple(TableLimits(self.pages, window, self.host_pages) for window in windows)
        state = (self.snapshots, self.snapshot_tokens)
        return Limits(tables, self.slots, self.max_len, self.page_size, self.caching, *state, self.width)


def draw(seed: int) -> Scenario:
    """The scenario of a seed. The same everywhere: only `random.Random` is asked."""
    r = random.Random(seed * 2 + 1)
    size = r.choices((1, 2, 3, 4), (20, 50, 18, 12))[0]
    page_size = r.choice((4, 4, 8, 16))
    max_len = r.choice((48, 64, 96))
    width = -(-max_len // page_size)
    tight = r.random() < 0.5
    pages = width + r.randrange(2 * width) if tight else width * r.choice((8, 16))
    jitter = r.choice((2e-5, 1e-4, 1e-3))
    clients, reserve = _clients(r, max_len)
    return Scenario(
        seed=seed,
        size=size,
        asynchronous=r.random() < 0.75,
        pages=pages,
        slots=r.choice((2, 4, 8, 16)),
        max_len=max_len,
        page_size=page_size,
        caching=r.random() < 0.85,
        host_pages=r.choice((0, 8, 64)),
        cap=r.choice((4, 8, 16, 32, 64, 256)),
        target=r.choice((None, 0.002, 0.02)),
        max_queue=r.choice((6, 16, 1000, 1000)),
        clients=clients,
        reserve=reserve,
        faults=_faults(r, size),
        noise=r.getrandbits(32),
        jitter=jitter,
        spike=r.choice((0.0, 0.0, 0.01)),
        slow=tuple(r.choice((1.0, 1.0, 1.0, 10.0)) for _ in range(size)),
        width=r.choice((1, 1, 1, 2, 3, 5)),
        window=r.choice((0, 0, 0, 5, 16, 24)),
        snapshot_tokens=(state := r.choice((0, 0, 0, 1, 2)) * page_size),
        snapshots=r.choice((1, 4, 30)) if state else 0,
        short=r.choice((4, 10, 20, SHORT_PROMPT_TOKENS)),
        max_long_prefills=r.choice((1, 2, MAX_LONG_PREFILLS)),
    )


def _clients(r: random.Random, max_len: int) -> tuple[tuple[Client, ...], tuple[Client, ...]]:
    shared = [_tokens(r, 40) for _ in range(2)]
    gap = r.choice((0.0, 0.002, 0.004, 0.01))
    leavers, stoppers, grammars = r.choice((0.0, 0.1, 0.4)), r.choice((0.0, 0.1, 0.3)), r.choice((0.0, 0.0, 0.2, 0.6))
    levels = r.choice((1, 1, 3))
    lengths = r.choice(((1, 12), (1, 30), (8, 40)))
    at = 0.0
    clients = []
    for id in range(MIN_REQUESTS + 60):
        prompt = _tokens(r, r.randint(*lengths))
        if r.random() < 0.5:
            prompt = (shared[r.randrange(2)][: r.choice((8, 16, 24, 32))] + prompt)[: max_len - 2]
        most = r.randint(1, 16) if r.random() < 0.8 else r.randint(1, 40)
        if r.random() > 0.02:
            most = min(most, max_len - len(prompt))  # else it may never fit and is refused
        sampling = SamplingParams(
            temperature=0.0 if r.random() < 0.5 else 1.0,
            seed=r.getrandbits(20),
            stop_ids=(r.randrange(VOCAB), r.randrange(VOCAB)) if r.random() < 0.3 else (),
            logprobs=2 if r.random() < 0.02 else -1,
            prompt_logprobs=1 if r.random() < 0.03 else -1,
        )
        grammar = bytes((r.choice((0, 2, 2, 3, 4, 5, 6, 7)), r.choice((0, 0, 0, 3)))) if r.random() < grammars else b""
        salt = b"tenant" if r.random() < 0.05 else b""
        request = Request(id, np.array(prompt, "<i4").tobytes(), most, sampling, r.randrange(levels), salt, grammar)
        stop = r.randint(1, most) if r.random() < stoppers else 0
        gone = r.random() ** 2 * 0.05 if r.random() < leavers else 0.0
        clients.append(Client(request, at, gone, stop, r.randint(0, stop)))
        if r.random() < 0.7:
            at += r.random() * 2 * gap
    return tuple(clients[:MIN_REQUESTS]), tuple(c._replace(at=0.0) for c in clients[MIN_REQUESTS:])


def _tokens(r: random.Random, n: int) -> list[int]:
    return r.choices(range(VOCAB), k=n)


def _faults(r: random.Random, size: int) -> tuple[Fault, ...]:
    """One fault in a quarter of the runs; most of them must poison the group, the others must not."""
    if r.random() > 0.25:
        return ()
    rank = r.randrange(size)
    kind = r.choice(("lose_entry", "lose_body", "lose_reply", "double_reply", "wrong_digest", "raise", "die", "stop", "stop"))
    if kind in ("die", "stop"):
        return (Fault(kind, rank, at=r.random() * 0.1, seconds=r.choice((0.02, 0.2, 100.0))),)
    if kind != "raise":
        rank = max(rank, 1)
        if rank >= size:
            return ()
    return (Fault(kind, rank, r.randrange(2, 80) if kind != "lose_body" else r.randrange(25)),)
