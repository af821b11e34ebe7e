"""`slipstream bench parity`: chooses the two sides and prints the result."""

import argparse
import asyncio
import typing

import msgspec

from slipstream.bench.load import parity, report, server, workloads
from slipstream.bench.load.parity import Answers
from slipstream.bench.load.records import Job, prompt_ids
from slipstream.bench.load.worker import Target
from slipstream.errors import ConfigError


def run(args: argparse.Namespace) -> int:
    """Exit status 0 if all answers agree by the margin rule, else 1."""
    others = [name for name in ("against", "against_serve", "load") if getattr(args, name)]
    if len(others) > 1:
        raise ConfigError(f"--{others[0].replace('_', '-')} and --{others[1].replace('_', '-')} exclude each other")
    if not others and not args.save and len(args.concurrency) < 2:
        raise ConfigError("parity needs a second side: --against, --against-serve, --load, or two values of --concurrency")
    with server.chosen(args.base_url, args.serve) as url:
        target = server.target_of(args, url)
        sets, params = _plan(args, target)
        earlier = parity.load(args.load, params) if args.load else None
        mine = _answers(args, target, sets)
        if args.save:
            parity.save(args.save, mine, params)
        if args.against:
            earlier = _answers(args, _same_model(args, target, args.against), sets)
        if not args.against_serve:
            if earlier is None:
                earlier = _against_itself(mine, args.concurrency[0])
            return _verdict(args, target, sets, mine, earlier)
    with server.own_server(args.against_serve) as url:
        other = _same_model(args, target, url)
        return _verdict(args, other, sets, mine, _answers(args, other, sets))


def _plan(args: argparse.Namespace, target: Target) -> tuple[dict[str, list[Job]], dict[str, typing.Any]]:
    longest, output_len = max(20, round(args.longest * args.scale)), max(1, round(args.output_len * args.scale))
    greedy = workloads.parity(args.prompts, output_len, args.seed, longest)
    workloads.check_fit(greedy, target.max_len)
    sets = {"greedy": greedy, "seeded": workloads.parity(args.prompts, output_len, args.seed, longest, seeded=True)}
    sets = {name: jobs for name, jobs in sets.items() if args.sets in ("both", name)}
    params = {"prompts": args.prompts, "longest": longest, "output_len": output_len, "seed": args.seed, "vocab": target.vocab}
    return sets, params


def _answers(args: argparse.Namespace, target: Target, sets: dict[str, list[Job]]) -> Answers:
    total = sum(map(len, sets.values())) * len(args.concurrency)
    with report.progress(f"parity {target.base_url}", total) as bar:
        return parity.collect(target, sets, args.concurrency, args.seed, bar)


def _same_model(args: argparse.Namespace, first: Target, url: str) -> Target:
    """The other server, with the first one's vocabulary. Its model may have another name."""
    args = argparse.Namespace(**{**vars(args), "vocab": first.vocab, "model": None})
    return server.target_of(args, url)


def _against_itself(mine: Answers, concurrency: int) -> Answers:
    return {setting: mine[f"{setting.split('/')[0]}/{concurrency}"] for setting in mine}


def _verdict(args: argparse.Namespace, live: Target, sets: dict[str, list[Job]], mine: Answers, theirs: Answers) -> int:
    jobs = {(name, j.index): j for name, many in sets.items() for j in many}

    def ask(setting: str, prompt: int, answer: list[int], pair: tuple[int, int]) -> float | None:
        job = jobs[setting.split("/")[0], prompt]
        history = prompt_ids(args.seed, job.index, job.prompt_len, live.vocab) + answer
        return asyncio.run(parity.tie_gap(live, history, pair, job.seed))

    verdict = parity.compare(mine, theirs, args.margin, ask)
    figures = verdict.figures()
    report.table(f"parity · {live.model}", figures)
    for flip in verdict.differences[:20]:
        gap = "unknown" if flip.margin is None else f"{flip.margin:.2g}"
        one, other = flip.tokens
        print(f"  {flip.setting}, prompt {flip.prompt}, step {flip.step}: tokens {one} and {other}, margin {gap}")
    if args.json:
        differences = msgspec.to_builtins(verdict.differences)
        report.write_json(args.json, {"workload": "parity", "figures": figures, "differences": differences})
    return 0 if verdict.passed(args.max_flips) else 1
