"""Do two servers, two settings, or two loads of one server give the same tokens?

The fixed set runs greedy and seeded at each concurrency. Two greedy answers agree if they are equal, or if at the first
difference the two best log probabilities, asked for afterwards with the history up to there, are nearer than the margin: a
near-tie that the order of a batch's sums may flip. For a seeded answer the draw's noise is unknown out here, so a difference
counts as a flip too, and all flips together may not exceed `max_flips`.
"""

import json
import pathlib
import typing
from collections.abc import Callable, Sequence

import msgspec

from slipstream.bench import fleet
from slipstream.bench.http import Client
from slipstream.bench.records import Job
from slipstream.bench.worker import Target, Task
from slipstream.errors import ConfigError

Answers = dict[str, list[list[int] | str]]  # "greedy/8" -> for each prompt its token ids, or the error as a text


class Flip(msgspec.Struct, frozen=True):
    """Where two answers part."""

    setting: str
    prompt: int
    step: int
    tokens: tuple[int, int]
    margin: float | None  # of the two best, in nats; None where it could not be asked


class Verdict(msgspec.Struct):
    compared: int = 0
    equal: int = 0
    flips: list[Flip] = []  # near-ties, and differences of seeded answers
    wrong: list[Flip] = []  # greedy differences with a margin
    errors: list[str] = []

    def figures(self) -> dict[str, typing.Any]:
        return {
            "compared": self.compared,
            "equal": self.equal,
            "flips_greedy": sum(f.setting.startswith("greedy") for f in self.flips),
            "flips_seeded": sum(f.setting.startswith("seeded") for f in self.flips),
            "wrong": len(self.wrong),
            "errors": len(self.errors),
            "error_reasons": {e: self.errors.count(e) for e in dict.fromkeys(self.errors)},
        }

    def passed(self, max_flips: int) -> bool:
        return not self.wrong and not self.errors and len(self.flips) <= max_flips and self.compared > 0


def collect(
    target: Target, sets: dict[str, list[Job]], concurrencies: Sequence[int], seed: int, done: Callable[[int], None]
) -> Answers:
    """Runs every set ("greedy", "seeded") at every concurrency."""
    if not target.token_ids:
        raise ConfigError("parity compares token ids, and this server does not honour return_token_ids")
    out: Answers = {}
    before = 0
    for concurrency in concurrencies:
        for name, jobs in sets.items():
            task = Task(target, "closed", seed, concurrency, jobs, keep_ids=True)
            records = fleet.run(task, fleet.default_processes(concurrency), lambda n, b=before: done(b + n))
            before += len(jobs)
            by_index = {r.index: r for r in records}
            out[f"{name}/{concurrency}"] = [by_index[j.index].error or by_index[j.index].token_ids for j in jobs]
    return out


def compare(a: Answers, b: Answers, margin: float, ask: Callable[[int, list[int]], float | None]) -> Verdict:
    """`ask(prompt, answer so far)` returns the gap of the two best log probabilities of the next token."""
    verdict = Verdict()
    for setting in a:
        if setting not in b:
            raise ConfigError(f"the other side has no answers for {setting}; it has {', '.join(b)}")
        if len(a[setting]) != len(b[setting]):
            raise ConfigError(
                f"{setting}: {len(a[setting])} answers against {len(b[setting])}; run both with the same --prompts"
            )
        for i, (x, y) in enumerate(zip(a[setting], b[setting], strict=True)):
            _judge(verdict, setting, i, x, y, margin, ask)
    return verdict


def _judge(
    verdict: Verdict,
    setting: str,
    prompt: int,
    x: list[int] | str,
    y: list[int] | str,
    margin: float,
    ask: Callable[[int, list[int]], float | None],
) -> None:
    verdict.compared += 1
    if isinstance(x, str) or isinstance(y, str):
        verdict.errors += [e for e in (x, y) if isinstance(e, str)]
        return
    step = next((k for k, (s, t) in enumerate(zip(x, y, strict=False)) if s != t), min(len(x), len(y)))
    if step == len(x) == len(y):
        verdict.equal += 1
        return
    gap = ask(prompt, x[:step])
    pair = (x[step] if step < len(x) else -1, y[step] if step < len(y) else -1)
    flip = Flip(setting, prompt, step, pair, gap)
    near = setting.startswith("seeded") or (gap is not None and gap < margin)
    (verdict.flips if near and -1 not in pair else verdict.wrong).append(flip)


async def top_gap(target: Target, prompt: list[int]) -> float | None:
    """The gap between the two best log probabilities of the token after `prompt`, or None where the server gives fewer."""
    async with Client(target.base_url, target.key, target.timeout) as client:
        body = {"model": target.model, "prompt": prompt, "max_tokens": 1, "temperature": 0, "logprobs": 5, "ignore_eos": True}
        answer = await client.request("POST", "/v1/completions", body)
    try:
        best = sorted(answer["choices"][0]["logprobs"]["top_logprobs"][0].values(), reverse=True)
    except (KeyError, IndexError, TypeError, AttributeError):
        return None
    # The form is keyed by text: two tokens with one text leave fewer entries, and then the margin is not known.
    return best[0] - best[1] if len(best) >= 5 else None


def save(path: str, answers: Answers, params: dict[str, typing.Any]) -> None:
    pathlib.Path(path).write_text(json.dumps({"params": params, "answers": answers}) + "\n")


def load(path: str, params: dict[str, typing.Any]) -> Answers:
    """Answers of an earlier run. Raises ConfigError if it was made with other parameters."""
    try:
        data = json.loads(pathlib.Path(path).read_text())
        before, answers = data["params"], data["answers"]
    except (OSError, ValueError, KeyError, TypeError) as e:
        raise ConfigError(f"--load {path}: {e}") from None
    other = [k for k in params if before.get(k) != params[k]]
    if other:
        raise ConfigError(f"--load {path}: was made with {other[0]}={before.get(other[0])}, not {params[other[0]]}")
    return answers
