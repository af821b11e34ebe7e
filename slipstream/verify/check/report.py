"""`slipstream verify`: explores every protocol and prints the table, and the shortest interleaving of those that fail."""

import sys
import time
from typing import NamedTuple

from rich.table import Table

from slipstream.errors import ConfigError
from slipstream.system.terminal import console
from slipstream.verify.check.cases import Case, cases
from slipstream.verify.check.explore import Found, explore
from slipstream.verify.check.model import Model
from slipstream.verify.check.narrate import narrate
from slipstream.verify.check.rivals import PROTOCOLS
from slipstream.verify.check.timing import critical_path
from slipstream.verify.check.world import Protocol


class Row(NamedTuple):
    """What exploring one protocol with so many ranks has found. `failed`: the first case that fails, with the shortest way."""

    protocol: Protocol
    size: int
    cases: int
    states: int
    entries: int
    seconds: float
    complete: bool
    failed: tuple[Case, Found] | None


def explore_all(protocol: Protocol, size: int, which: list[Case]) -> Row:
    """All cases, or those up to the first that fails; at two ranks without merging."""
    began = time.monotonic()
    done = states = entries = 0
    complete = True
    failed: tuple[Case, Found] | None = None
    for case in which:
        found = explore(Model(case, protocol, size), merged=size > 2)
        done += 1
        states += found.states
        entries = max(entries, found.entries)
        if found.violation:
            failed = (case, found)
            break
        complete &= found.complete
    return Row(protocol, size, done, states, entries, time.monotonic() - began, complete, failed)


def check(reduced: bool, only: str | None) -> int:
    """Prints the table; 0 when every verdict is the expected one."""
    chosen = [p for p in PROTOCOLS if only is None or p.name == only]
    if not chosen:
        raise ConfigError(f"--protocol: unknown {only!r}; one of: {', '.join(repr(p.name) for p in PROTOCOLS)}")
    sizes = (2, 3) if reduced else (2, 3, 4)
    rows: list[Row] = []
    for p in chosen:
        for size in sizes:
            print(f"exploring {p.name} with {size} ranks", file=sys.stderr, flush=True)
            rows.append(explore_all(p, size, cases(reduced or size > 2)))
    out = console()
    out.print(table_of(rows))
    requests = max(len(c.requests) for c in cases(reduced))
    entries = max(r.entries for r in rows)
    merged = "more: followers that differ only in name are one, and their own steps are merged"
    out.print(f"Bounds: {requests} requests and {entries} entries at most. Two ranks: every interleaving; {merged}.")
    for p in chosen:
        row = next((r for r in rows if r.protocol is p and r.failed is not None), None)
        if row is not None and row.failed is not None:
            case, found = row.failed
            print(f"\n{p.name} fails with {row.size} ranks in the case '{case.name}':")
            for i, line in enumerate(narrate(Model(case, p, row.size), found.trace), 1):
                print(f"  {i:2}. {line}")
    wrong = [r for r in rows if (r.failed is not None) != r.protocol.fails or not r.complete]
    for r in wrong:
        print(f"\nunexpected: {r.protocol.name} at {r.size} ranks {'fails' if r.failed else 'passes'}")
    return 1 if wrong else 0


def table_of(rows: list[Row]) -> Table:
    table = Table()
    for name in ("protocol", "ranks", "scenarios", "states", "verdict", "hops per step", "queued ahead", "seconds"):
        table.add_column(name, justify="left" if name in ("protocol", "verdict", "queued ahead") else "right")
    for r in rows:
        verdict = "passes" if r.failed is None else "fails"
        hops, ahead = "-", "-"
        if r.failed is None:
            path = critical_path(r.protocol, r.size)
            hops, ahead = str(path.hops), "yes" if path.ahead else "no: a host gap"
        cells = (r.protocol.name, str(r.size), str(r.cases), f"{r.states:,}", verdict, hops, ahead, f"{r.seconds:.1f}")
        table.add_row(*cells)
    return table
