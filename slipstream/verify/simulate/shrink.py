"""Cuts a failing scenario down: drops clients, faults and troubles one after another as long as the run still fails."""

from collections.abc import Callable, Iterator
from dataclasses import replace

from slipstream.schedule.admission import MAX_LONG_PREFILLS, SHORT_PROMPT_TOKENS
from slipstream.verify.simulate.scenario import Scenario

MAX_SHRINK_RUNS = 600  # runs at most


def shrink(scenario: Scenario, fails: Callable[[Scenario], bool]) -> Scenario:
    """The smallest scenario found for which `fails` holds."""
    tries = 0
    smaller = True
    while smaller:
        smaller = False
        for candidate in candidates(scenario):
            tries += 1
            if tries > MAX_SHRINK_RUNS:
                return scenario
            if fails(candidate):
                scenario, smaller = candidate, True
                break
    return scenario


def candidates(s: Scenario) -> Iterator[Scenario]:
    """Smaller scenarios, the boldest first."""
    if s.reserve:
        yield replace(s, reserve=())
        half = len(s.reserve) // 2
        yield replace(s, reserve=s.reserve[:half])
        if half:
            yield replace(s, reserve=s.reserve[half:])
    for size in (len(s.clients) // 2, len(s.clients) // 4, 2, 1):
        if 0 < size < len(s.clients):
            for first in range(0, len(s.clients), size):
                yield replace(s, clients=s.clients[:first] + s.clients[first + size :])
    if s.faults:
        yield replace(s, faults=())
    if s.size > 1:
        yield replace(s, size=s.size - 1, faults=tuple(f for f in s.faults if f.rank < s.size - 1), slow=s.slow[:-1])
    if (s.short, s.max_long_prefills) != (SHORT_PROMPT_TOKENS, MAX_LONG_PREFILLS):
        yield replace(s, short=SHORT_PROMPT_TOKENS, max_long_prefills=MAX_LONG_PREFILLS)
    if s.width > 1:
        yield replace(s, width=1)
        yield replace(s, width=s.width - 1)
    if s.window:
        yield replace(s, window=0)
    if s.snapshot_tokens:
        yield replace(s, snapshot_tokens=0, snapshots=0)
    if s.spike:
        yield replace(s, spike=0.0)
    if set(s.slow) != {1.0}:
        yield replace(s, slow=(1.0,) * s.size)
    for i, client in enumerate(s.clients):
        r = client.request
        plain = client._replace(gone=0.0, stop=0)
        if plain != client:
            yield replace(s, clients=(*s.clients[:i], plain, *s.clients[i + 1 :]))
        for most in (1, r.max_tokens // 2, r.max_tokens - 1):
            if 0 < most < r.max_tokens:
                yield replace(s, clients=(*s.clients[:i], client._replace(request=with_limit(r, most)), *s.clients[i + 1 :]))


def with_limit(request, most: int):
    """The request with another `max_tokens`."""
    return type(request)(request.id, request.prompt, most, request.sampling, request.priority, request.salt, request.grammar)
