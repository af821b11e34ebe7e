"""Small cases that the checker explores to the end: at most three requests, about eight steps."""

from typing import NamedTuple

import numpy as np

from slipstream.log.request import Request, SamplingParams
from slipstream.log.state import Limits

STOP = 9  # a token that ends a request
LEASED = b"lease"  # salt of requests whose pages are read by a copy outside the stream when they are dropped


class Case(NamedTuple):
    """One small situation. `script[i]` are the tokens that request i draws, before its grammar has its say."""

    name: str
    requests: tuple[Request, ...]
    script: tuple[tuple[int, ...], ...]
    limits: Limits
    cap: int = 16  # token budget of a step
    asynchronous: bool = True
    aborts: tuple[int, ...] = ()  # requests that may be aborted at any point
    kept: int = -1  # what such an abort keeps
    dies: bool = False  # the last rank, or the leader, may die at any point
    expires: tuple[int, ...] = ()  # requests that a local clock may end, in the protocol that has such clocks
    all_at_once: bool = True  # requests are there at the start; else each comes at any point


def request(id: int, prompt: int, most: int, stop: bool = False, same: bool = False, grammar: bytes = b"", salt: bytes = b""):
    """A request of `prompt` tokens; `same`: with the prompt that all such requests share."""
    tokens = np.arange(prompt, dtype="<i4") + (50 if same else 10 * id + 20)
    sampling = SamplingParams(temperature=0.0, stop_ids=(STOP,) if stop else ())
    return Request(id, tokens.tobytes(), most, sampling, salt=salt, grammar=grammar)


def limits(pages: int, slots: int = 2, host: int = 0) -> Limits:
    return Limits(pages, slots, 8, 2, True, host)


def cases(reduced: bool = False) -> list[Case]:
    """The situations to explore; unless reduced, with larger ones of three requests, meant for two ranks."""
    return small_cases() if reduced else small_cases() + large_cases()


def small_cases() -> list[Case]:
    plain = (1, 2, 3, 4, 5, 6)
    stops = (1, STOP, 3, 4, 5, 6)
    return [
        Case("stop tokens", (request(0, 2, 4, True), request(1, 1, 3)), (stops, plain), limits(8)),
        Case("own clocks", (request(0, 1, 3), request(1, 1, 3)), (plain, plain), limits(8), expires=(0,)),
        Case("leases", (request(0, 3, 2, salt=LEASED), request(1, 3, 2, True), request(2, 3, 1)), (plain, stops, plain),
             limits(4)),
        Case("lengths", (request(0, 1, 2), request(1, 2, 3)), (plain, plain), limits(8), all_at_once=False),
        Case(
            "aborts", (request(0, 2, 3), request(1, 1, 3, True)), (plain, stops), limits(8), aborts=(0, 1), kept=1,
        ),
        Case("chunks", (request(0, 5, 2), request(1, 1, 4)), (plain, plain), limits(8), cap=3),
        Case("waiting", (request(0, 1, 2), request(1, 3, 2), request(2, 1, 1)), (plain,) * 3, limits(4, 1), aborts=(1,)),
        Case("page shortage", (request(0, 2, 4), request(1, 2, 3)), (plain, plain), limits(4), aborts=(0,)),
        Case("offload", (request(0, 2, 4), request(1, 2, 3)), (plain, plain), limits(4, host=4)),
        Case(
            "shared prefix", (request(0, 5, 2, same=True), request(1, 5, 2, same=True)), (plain, plain), limits(6), aborts=(0,),
            kept=0,
        ),
        Case(
            "late sampling", (request(0, 1, 3, grammar=bytes((3, 0))), request(1, 1, 3, True)), (plain, stops), limits(8),
        ),
        Case("dead end", (request(0, 1, 4, grammar=bytes((2, 2))), request(1, 1, 2)), (plain, plain), limits(8), aborts=(0,)),
        Case("rank death", (request(0, 1, 3), request(1, 1, 2)), (plain, plain), limits(8), dies=True),
        Case("serial", (request(0, 2, 3, True), request(1, 3, 2)), (stops, plain), limits(5), asynchronous=False, aborts=(1,)),
    ]  # fmt: skip


def large_cases() -> list[Case]:
    plain = (1, 2, 3, 4, 5, 6)
    stops = (1, STOP, 3, 4, 5, 6)
    three = (request(0, 3, 3, True), request(1, 1, 2), request(2, 2, 2, same=True))
    return [
        Case("three at any point", three, (stops, plain, plain), limits(12, 3), all_at_once=False),
        Case("three short of pages", three, (stops, plain, plain), limits(5, 3), cap=3, aborts=(2,)),
        Case("three with a grammar", (request(0, 3, 4, grammar=bytes((3, 3))), *three[1:]), (plain,) * 3, limits(5, 2),
             aborts=(1,)),
        Case("three leases", tuple(leased(r) for r in three), (stops, plain, plain), limits(6, 2)),
    ]  # fmt: skip


def leased(r: Request) -> Request:
    return request(r.id, r.prompt_len, r.max_tokens, bool(r.sampling.stop_ids), salt=LEASED)
