"""`slipstream verify`: explores the machine of a rank exhaustively, plants bugs in it, or simulates whole groups."""

import argparse
import re

from slipstream.errors import ConfigError

REDUCED_SEEDS = "0..199"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--simulate", action="store_true", help="run simulated groups with random faults, one seed each")
    parser.add_argument("--seeds", default=REDUCED_SEEDS, metavar="A..B", help="the seeds to simulate, both ends included")
    parser.add_argument("--seed", type=int, metavar="N", help="simulate this one seed")
    parser.add_argument("--trace", action="store_true", help="with --seed: print every event")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="processes to simulate with")
    parser.add_argument("--mutants", action="store_true", help="plant bugs in the machine, one at a time; each must be found")
    parser.add_argument(
        "--reduced", action="store_true", help="explore the smaller bounds; with --mutants only the case that should find each"
    )
    parser.add_argument("--protocol", metavar="NAME", help="explore this protocol only")


def run(args: argparse.Namespace) -> int:
    if args.seed is not None:
        return _one(args.seed, args.trace)
    if args.simulate:
        return _simulate(*_range(args.seeds), args.jobs)
    if args.mutants:
        from slipstream.verify.check.mutants import check_mutants

        return check_mutants(args.reduced)
    from slipstream.verify.check.report import check

    return check(reduced=args.reduced, only=args.protocol)


def _range(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d+)\.\.(\d+)", text)
    if match is None or int(match[1]) > int(match[2]):
        raise ConfigError(
            f"--seeds: {text!r} is not a range; write the first and the last seed as A..B, such as {REDUCED_SEEDS}"
        )
    return int(match[1]), int(match[2])


def _one(seed: int, whole: bool) -> int:
    from slipstream.verify.simulate.scenario import draw
    from slipstream.verify.simulate.seeds import describe, shortest, trace

    failure, lines = trace(seed)
    if whole:
        print("\n".join(lines))
    if not failure:
        print(f"seed {seed}: nothing wrong")
        return 0
    print(f"seed {seed}: {failure}\n")
    small, failure, lines = shortest(draw(seed))
    print(f"shrunk to {len(small.clients)} requests: {describe(small)}\n")
    print("\n".join(lines))
    print(f"\n{failure}")
    return 1


def _simulate(first: int, last: int, jobs: int) -> int:
    from rich.table import Table

    from slipstream.system.terminal import console
    from slipstream.verify.simulate.seeds import Total, run_seeds

    total = Total()
    for result in run_seeds(first, last, jobs):
        total.add(result)
        if result.failure:
            print(f"seed {result.seed}: {result.failure}", flush=True)
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_row("seeds", f"{first}..{last}")
    table.add_row("runs", f"{total.runs}, of which {len(total.failures)} failed")
    table.add_row("entries", f"{total.entries} ({total.entries / total.seconds:.0f} a second on {jobs} process(es))")
    table.add_row("requests", f"{total.requests}; ends: {_counts(total.ends)}")
    table.add_row("steps", _counts(total.orders))
    table.add_row("groups poisoned", f"{total.poisonings}, each by an injected fault")
    table.add_row("preemptions", str(total.preemptions))
    table.add_row("ranks", ", ".join(f"{n} runs of {size}" for size, n in sorted(total.sizes.items())))
    table.add_row("seconds", f"{total.seconds:.1f}")
    console().print(table)
    if total.failures:
        _one(total.failures[0].seed, False)
    return 1 if total.failures else 0


def _counts(counts) -> str:
    return ", ".join(f"{n} {what}" for what, n in sorted(counts.items()))
