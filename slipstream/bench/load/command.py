"""`slipstream bench`: the named workloads against any server with OpenAI's API."""

import argparse
import asyncio
import dataclasses
import typing

from slipstream import __version__
from slipstream.bench.load import copy, fleet, parity_run, plot, report, server, stats, trace, workloads
from slipstream.bench.load.flags import add_arguments
from slipstream.bench.load.records import Record
from slipstream.bench.load.worker import Target, Task
from slipstream.bench.load.workloads import Shape
from slipstream.errors import ConfigError

__all__ = ["add_arguments", "run"]


def run(args: argparse.Namespace) -> int:
    """Exit status 0 if every request succeeded (and the comparison held), else 1."""
    if args.workload == "parity":
        return parity_run.run(args)
    if args.workload == "copy":
        return copy.run(args)
    if args.workload == "voice":
        from slipstream.bench.load import voice

        return voice.run(args)
    if args.plot:
        plot.check()
    with server.chosen(args.base_url, args.serve) as url:
        target = server.target_of(args, url)
        records, figures = _measure(args, target)
        if args.trace:
            shares = trace.idle_share(
                asyncio.run(trace.fetch(url, server.key_of(args), min(60.0, figures.get("seconds", 1.0))))
            )
            if not shares:
                raise ConfigError("--trace: the timeline has no device spans")
            figures |= shares
    report.table(f"{args.workload} · {target.model}", figures)
    if args.json:
        report.write_json(args.json, _document(args, target, figures, records))
    if args.plot:
        plot.write(args.plot, f"slipstream bench {args.workload} · {target.model}", records)
    measured = figures["completed"] > 0 and figures.get("decode_chunks_per_s_per_stream", 0) is not None
    return 0 if figures["errors"] == 0 and measured else 1


def _shape(args: argparse.Namespace) -> Shape:
    given = {f.name: getattr(args, f.name) for f in dataclasses.fields(Shape) if hasattr(args, f.name)}
    shape = Shape(**given).scaled(args.scale)
    if shape.burst_input_min > shape.burst_input_max:
        raise ConfigError("--burst-input-min must be at most --burst-input-max")
    return shape


def _measure(args: argparse.Namespace, target: Target) -> tuple[list[Record], dict[str, typing.Any]]:
    """Warms up, runs the workload, and returns the records and their figures."""
    task = _plan(args, target)
    workloads.check_fit(task.jobs, target.max_len)
    at_once = len(task.jobs) if task.drive in ("timed", "burst") else task.concurrency
    processes = args.processes or fleet.default_processes(at_once)
    _warm_up(args, target, processes)
    total = len(task.jobs) or sum(len(c.turns) for c in task.conversations)
    with report.progress(args.workload, total) as bar:
        records = fleet.run(task, processes, bar)
    if args.workload == "burst":
        return records, stats.burst(records)
    if args.workload == "multi-turn":
        return records, stats.multi_turn(records, task.conversations)
    return records, stats.summary(records)


def _plan(args: argparse.Namespace, target: Target) -> Task:
    seed = args.seed
    if args.workload == "multi-turn":
        if not target.token_ids:
            raise ConfigError("multi-turn sends the answers' tokens back, and this server does not support return_token_ids")
        limit = min(args.max_len or target.max_len or 4096, target.max_len or 2**31)
        talks = workloads.conversations(args.conversations, limit, args.leave, seed, args.scale)
        return Task(target, "turns", seed, args.concurrency, conversations=talks, keep_ids=True)
    shape = _shape(args)
    if args.workload == "closed":
        jobs = workloads.mix(shape, args.requests or 10 * args.concurrency, seed)
        return Task(target, "closed", seed, args.concurrency, jobs)
    if args.workload == "rate":
        jobs = workloads.poisson(workloads.mix(shape, args.requests, seed), args.rate, seed)
        return Task(target, "timed", seed, len(jobs), jobs)
    jobs = workloads.burst(shape, args.streams, args.prompts, seed)
    return Task(target, "burst", seed, len(jobs), jobs, burst_delay=args.burst_delay)


def _warm_up(args: argparse.Namespace, target: Target, processes: int) -> None:
    """A short run of the mix with other prompts. Its figures are dropped; its errors count."""
    concurrency = getattr(args, "concurrency", 8)
    count = concurrency if args.warmup is None else args.warmup
    if count <= 0:
        return
    shape = dataclasses.replace(_shape(args), output_len=16) if args.workload != "multi-turn" else Shape().scaled(args.scale)
    room = (target.max_len or 2**31) - 16
    shape = dataclasses.replace(
        shape, output_len=16, input_len=min(shape.input_len, room), long_input_len=min(shape.long_input_len, room)
    )
    jobs = workloads.mix(shape, count, args.seed + 1)
    with report.progress("warm-up", count) as bar:
        records = fleet.run(Task(target, "closed", args.seed + 2**20, concurrency, jobs), min(processes, concurrency), bar)
    failed = stats.errors(records)
    if failed["errors"]:
        raise server.NoServer(f"{failed['errors']} of {count} warm-up requests failed: {next(iter(failed['error_reasons']))}")


def _document(
    args: argparse.Namespace, target: Target, figures: dict[str, typing.Any], records: list[Record]
) -> dict[str, typing.Any]:
    """The content of the `--json` file. Times of requests are seconds since the first was sent."""
    start = min((r.sent for r in records), default=0.0)
    hidden = {"api_key", "json", "plot"}
    return {
        "slipstream": __version__,
        "workload": args.workload,
        "params": {k: v for k, v in vars(args).items() if k not in hidden and v is not None},
        "model": target.model,
        "figures": figures,
        "requests": [
            {
                "index": r.index,
                "kind": r.kind,
                "turn": r.turn,
                "prompt_len": r.prompt_len,
                "tokens": r.tokens,
                "sent": round(r.sent - start, 6),
                "times": [round(t - start, 6) for t in r.times],
                "counts": r.counts,
                "finish": r.finish,
                "error": r.error,
                "left": r.left,
            }
            for r in records
        ],
    }
