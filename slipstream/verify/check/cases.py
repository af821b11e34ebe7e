"""Small cases that the checker explores to the end: at most three requests, about eight steps."""

from typing import NamedTuple

import numpy as np

from slipstream.log.caches import Limits, TableLimits, one_table
from slipstream.log.request import Request, SamplingParams

STOP = 9  # a token that ends a request
LEASED = b"lease"  # salt of requests whose pages are read by a copy outside the stream when they are dropped
PLAIN = (1, 2, 3, 4, 5, 6)  # scripts
STOPS = (1, STOP, 3, 4, 5, 6)


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
    wrong: tuple[tuple[int, ...], ...] = ()  # of each request, the places in its answer at which the device's draft is wrong
    garbled: tuple[str, ...] = ()  # how one reply of a follower may be wrong: "digest" or "twice"

    def is_wrong(self, id: int, place: int) -> bool:
        return bool(self.wrong) and place in self.wrong[id]

    def drawn(self, id: int, position: int) -> int:
        """The token that request `id` draws at a position; any beyond its limit."""
        place = position - self.requests[id].prompt_len
        return self.script[id][place] if place < len(self.script[id]) else 0


def request(id: int, prompt: int, most: int, stop: bool = False, same: bool = False, grammar: bytes = b"", salt: bytes = b""):
    """A request of `prompt` tokens; `same`: with the prompt that all such requests share."""
    tokens = np.arange(prompt, dtype="<i4") + (50 if same else 10 * id + 20)
    return asking(id, tokens.tolist(), most, stop, grammar, salt)


def asking(id: int, prompt: list[int], most: int, stop: bool = False, grammar: bytes = b"", salt: bytes = b"") -> Request:
    sampling = SamplingParams(temperature=0.0, stop_ids=(STOP,) if stop else ())
    return Request(id, np.array(prompt, "<i4").tobytes(), most, sampling, salt=salt, grammar=grammar)


def limits(pages: int, slots: int = 2, host: int = 0, width: int = 1) -> Limits:
    return one_table(pages, slots, 8, 2, True, host, width)


def windowed(pages: int, window: int, slots: int = 2, host: int = 0, width: int = 1, caching: bool = True) -> Limits:
    """A table that is kept to the end, and one whose pages leave its window."""
    tables = (TableLimits(pages, 0, host), TableLimits(pages, window, host))
    return Limits(tables, slots, 8, 2, caching, width=width)


def with_state(pages: int, snapshots: int, slots: int = 2, host: int = 0, width: int = 1) -> Limits:
    """Slots have state, which is kept at every other token."""
    return limits(pages, slots, host, width)._replace(snapshots=snapshots, snapshot_tokens=2)


def cases(reduced: bool = False) -> list[Case]:
    """The situations to explore; unless reduced, with larger ones of three requests, meant for two ranks."""
    return small_cases() if reduced else small_cases() + large_cases()


def small_cases() -> list[Case]:
    return ends() + joining() + grammars() + drafts() + caches()


def ends() -> list[Case]:
    """How requests and groups end."""
    return [
        Case("stop tokens", (request(0, 2, 4, True), request(1, 1, 3)), (STOPS, PLAIN), limits(8)),
        Case("own clocks", (request(0, 1, 3), request(1, 1, 3)), (PLAIN, PLAIN), limits(8), expires=(0,)),
        Case("leases", (request(0, 3, 2, salt=LEASED), request(1, 3, 2, True), request(2, 3, 1)), (PLAIN, STOPS, PLAIN),
             limits(4)),
        Case("leases and page shortage", (request(0, 3, 2, salt=LEASED), request(1, 2, 4)), (PLAIN, PLAIN), limits(4)),
        Case("lengths", (request(0, 1, 2), request(1, 2, 3)), (PLAIN, PLAIN), limits(8), all_at_once=False),
        Case("aborts", (request(0, 2, 3), request(1, 1, 3, True)), (PLAIN, STOPS), limits(8), aborts=(0, 1), kept=1),
        Case("rank death", (request(0, 1, 3), request(1, 1, 2)), (PLAIN, PLAIN), limits(8), dies=True),
        Case("wrong replies", (request(0, 1, 2), request(1, 1, 2)), (PLAIN, PLAIN), limits(8), garbled=("digest", "twice")),
        Case("serial", (request(0, 2, 3, True), request(1, 3, 2)), (STOPS, PLAIN), limits(5), asynchronous=False, aborts=(1,)),
    ]  # fmt: skip


def joining() -> list[Case]:
    """Prompts, slots and pages."""
    pair = (request(0, 2, 4), request(1, 2, 3))
    alike = (request(0, 5, 2, same=True), request(1, 5, 2, same=True))
    wholly = (request(0, 4, 1, same=True), request(1, 4, 2, same=True))
    turns = (asking(0, [50, 51], 2), asking(1, [50, 51, 1, 2, 7], 2))
    return [
        Case("chunks", (request(0, 5, 2), request(1, 1, 4)), (PLAIN, PLAIN), limits(8), cap=3),
        Case("waiting", (request(0, 1, 2), request(1, 3, 2), request(2, 1, 1)), (PLAIN,) * 3, limits(4, 1), aborts=(1,)),
        Case("page shortage", pair, (PLAIN, PLAIN), limits(4), aborts=(0,)),
        Case("offload", pair, (PLAIN, PLAIN), limits(4, host=4)),
        Case("shared prefix", alike, (PLAIN, PLAIN), limits(6), aborts=(0,), kept=0),
        Case("shared prefix in chunks", alike, (PLAIN, PLAIN), limits(8), cap=3),
        Case("wholly cached", wholly, (PLAIN, PLAIN), limits(6)),
        Case("next turn", turns, (PLAIN, PLAIN), limits(4, 1)),
    ]


def grammars() -> list[Case]:
    three = request(0, 1, 3, grammar=bytes((3, 0)))
    return [
        Case("late sampling", (three, request(1, 1, 3, True)), (PLAIN, STOPS), limits(8)),
        Case("dead end", (request(0, 1, 4, grammar=bytes((2, 2))), request(1, 1, 2)), (PLAIN, PLAIN), limits(8), aborts=(0,)),
        Case("abort before a slot", (request(0, 1, 2), request(1, 1, 1, grammar=bytes((3, 0)))), (PLAIN, PLAIN), limits(8, 1),
             aborts=(1,)),
    ]  # fmt: skip


def drafts() -> list[Case]:
    """Rows of three: a token and two drafts."""
    pair = (request(0, 2, 5), request(1, 2, 4))
    masked = request(0, 1, 5, grammar=bytes((3, 0)))
    return [
        Case("drafts and a stop", (request(0, 2, 5, True), request(1, 1, 4)), ((1, 2, STOP, 4, 5), PLAIN), limits(8, width=3),
             wrong=((4,), (2,))),
        Case("drafts and a length", (request(0, 1, 3), request(1, 2, 4)), (PLAIN, PLAIN), limits(8, width=3), wrong=((), (2,)),
             aborts=(1,)),
        Case("drafts and page shortage", pair, (PLAIN, PLAIN), limits(5, width=2), wrong=((1, 3), (2,))),
        Case("drafts and offload", pair, (PLAIN, PLAIN), limits(5, host=5, width=2), wrong=((1, 3), (1, 2, 3))),
        Case("drafts and a grammar", (masked, request(1, 1, 2)), (PLAIN, PLAIN), limits(8, width=3), wrong=((2, 3), ())),
        Case("drafts and a dead end", (request(0, 1, 5, grammar=bytes((2, 3))), request(1, 1, 2)), (PLAIN, PLAIN),
             limits(8, width=3), wrong=((4,), ())),
    ]  # fmt: skip


def caches() -> list[Case]:
    """More than one page table, and state of slots."""
    alike = (request(0, 5, 2, same=True), request(1, 5, 2, same=True))
    return [
        Case("window", (request(0, 3, 4), request(1, 1, 3)), (PLAIN, PLAIN), windowed(8, 3, caching=False), cap=3),
        Case("window and a prefix", alike, (PLAIN, PLAIN), windowed(6, 3), cap=4),
        Case("window and lost pages", (request(0, 5, 1, same=True), request(1, 7, 1), request(2, 5, 1, same=True)),
             (PLAIN,) * 3, windowed(8, 3, slots=1)._replace(tables=(TableLimits(8), TableLimits(4, 3)))),
        Case("window and drafts", (request(0, 1, 6), request(1, 1, 2)), (PLAIN, PLAIN), windowed(6, 3, width=3, caching=False),
             wrong=((1, 2, 3, 4), ())),
        Case("window and offload", (request(0, 2, 4), request(1, 2, 3)), (PLAIN, PLAIN), windowed(4, 3, host=4)),
        Case("state", alike, (PLAIN, PLAIN), with_state(8, 1), cap=4),
        Case("state and a lost snapshot", (request(0, 4, 1, same=True), request(1, 2, 1), request(2, 5, 1, same=True)),
             (PLAIN,) * 3, with_state(8, 1, slots=1)),
        Case("state and page shortage", (request(0, 2, 4), request(1, 2, 3)), (PLAIN, PLAIN), with_state(4, 2)),
        Case("state computed again", (request(0, 2, 4), request(1, 2, 3)), (PLAIN, PLAIN),
             with_state(4, 0)._replace(caching=False)),
        Case("state, drafts and offload", (request(0, 2, 5), request(1, 2, 4)), (PLAIN, PLAIN),
             with_state(5, 2, host=5, width=2), wrong=((1, 3), (1, 2, 3))),
        Case("state and drafts", (request(0, 2, 5), request(1, 1, 2)), (PLAIN, PLAIN), with_state(8, 2, width=2),
             wrong=((1, 3), ())),
        Case("state, drafts and a next turn", (asking(0, [50, 51], 4), asking(1, [50, 51, 1, 2, 3, 7], 1)), (PLAIN, PLAIN),
             with_state(8, 4, slots=1, width=2), wrong=((1,), ())),
    ]  # fmt: skip


def large_cases() -> list[Case]:
    three = (request(0, 3, 3, True), request(1, 1, 2), request(2, 2, 2, same=True))
    return [
        Case("three at any point", three, (STOPS, PLAIN, PLAIN), limits(12, 3), all_at_once=False),
        Case("three short of pages", three, (STOPS, PLAIN, PLAIN), limits(5, 3), cap=3, aborts=(2,)),
        Case("three with a grammar", (request(0, 3, 4, grammar=bytes((3, 3))), *three[1:]), (PLAIN,) * 3, limits(5, 2),
             aborts=(1,)),
        Case("three leases", tuple(leased(r) for r in three), (STOPS, PLAIN, PLAIN), limits(6, 2)),
        Case("three with drafts", three, (STOPS, PLAIN, PLAIN), limits(6, 3, host=6, width=2), wrong=((1,), (), (1,))),
    ]  # fmt: skip


def leased(r: Request) -> Request:
    return request(r.id, r.prompt_len, r.max_tokens, bool(r.sampling.stop_ids), salt=LEASED)
