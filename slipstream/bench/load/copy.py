"""`slipstream bench copy`: tokens per second of one stream with and without drafts.

Two texts: a document to be copied with a small change, whose tokens stand in the prompt already, and a story, which is drawn at
random so that it repeats little. The requests without drafts ask for none (`speculative_tokens`), so one server serves both.
They take turns, so a busy machine disturbs both.
"""

import argparse
import asyncio
import random
import statistics
from typing import Any

from slipstream.bench.load import report, server
from slipstream.bench.load.worker import Target
from slipstream.client.http import Client
from slipstream.errors import ConfigError

COLORS = ("red", "green", "blue", "white", "black", "grey", "brown", "yellow")
THINGS = ("lamp", "chair", "book", "cup", "coat", "clock", "plate", "key", "map", "box")
PLACES = ("on the table", "near the door", "under the window", "in the hall", "behind the shelf", "in the garden")
STORY = "The old sailor sat down by the fire and began to tell the children about his longest journey. It was"


def document(lines: int, seed: int) -> list[str]:
    rng = random.Random(seed)
    return [
        f"{i + 1}. The {rng.choice(COLORS)} {rng.choice(THINGS)} number {rng.randrange(100, 1000)} is {rng.choice(PLACES)}."
        for i in range(lines)
    ]


def copying(lines: list[str]) -> str:
    """Asks for the document with a word changed; the first lines are done already, so that a small model goes on."""
    changed = [line.replace("lamp", "light") for line in lines[:3]]
    whole = "\n".join(lines)
    return f'The list:\n\n{whole}\n\nThe same list, with "light" in place of "lamp":\n\n' + "\n".join(changed) + "\n"


def run(args: argparse.Namespace) -> int:
    """Exit status 0 if all answers came. In bfloat16 a few may take the other side of a near-tie: they are counted."""
    lines = document(max(4, round(args.lines * args.scale)), args.seed)
    length = max(8, round(args.output_len * args.scale))
    with server.chosen(args.base_url, args.serve) as url:
        target = server.target_of(args, url)
        figures = asyncio.run(_measure(target, {"copy": copying(lines), "story": STORY}, length, args.rounds))
    report.table(f"copy · {target.model}", figures)
    if args.json:
        report.write_json(args.json, {"workload": "copy", "model": target.model, "figures": figures})
    return 0


async def _measure(target: Target, prompts: dict[str, str], length: int, rounds: int) -> dict[str, Any]:
    figures: dict[str, Any] = {}
    drawn: dict[str, dict[str, Any]] = {"copy": {"temperature": 0}, "story": {"temperature": 1, "seed": 1}}
    changed = 0
    async with Client(target.base_url, target.key, target.timeout) as client:
        for name, prompt in prompts.items():
            speeds: tuple[list[float], list[float]] = ([], [])
            with report.progress(name, rounds + 1) as bar:
                for k in range(rounds + 1):
                    without, plain = await _one(client, target.model, prompt, length, {"speculative_tokens": 0, **drawn[name]})
                    with_drafts, text = await _one(client, target.model, prompt, length, drawn[name])
                    changed += text != plain
                    if k:  # the first round warms up
                        speeds[0].append(without)
                        speeds[1].append(with_drafts)
                    bar(1)
            without, with_drafts = map(statistics.median, speeds)
            figures[f"{name}_without_tokens_per_s"], figures[f"{name}_with_tokens_per_s"] = without, with_drafts
            figures[f"{name}_ratio"] = with_drafts / without
    figures["answers_changed"] = changed
    return figures


async def _one(client: Client, model: str, prompt: str, length: int, more: dict[str, Any]) -> tuple[float, str]:
    """Tokens per second after the first token, and the answer."""
    body = {"model": model, "prompt": prompt, "max_tokens": length, "ignore_eos": True, "stream": True}
    first, last, text, tokens = 0.0, 0.0, "", 0
    async for at, event in client.stream("/v1/completions", {**body, "stream_options": {"include_usage": True}, **more}):
        if event.choices:
            first, last = first or at, at
            text += "".join(choice.text or "" for choice in event.choices)
        if event.usage is not None:
            tokens = event.usage.completion_tokens
    if last <= first or tokens < 2:
        raise ConfigError(f"the answer has {tokens} tokens in one piece, so it has no speed; give a larger --output-len")
    return (tokens - 1) / (last - first), text
