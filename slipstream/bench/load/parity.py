"""Do two servers, two settings, or two loads of one server give the same tokens?

The fixed set runs greedy and seeded at each concurrency. Two answers agree if they are equal, or if their first difference is a
near-tie, which the order of a batch's sums may flip: with the history up to there, the log probabilities of both tokens (for a
seeded answer with the noise of Slipstream's draw added) differ by less than the margin. Near-ties are counted. Another
engine draws its own noise, so seeded answers can only be compared between Slipstream servers.
"""

import json
import pathlib
import typing
from collections.abc import Callable, Sequence

import msgspec

from slipstream.bench.load import fleet
from slipstream.bench.load.records import Job
from slipstream.bench.load.worker import Target, Task
from slipstream.client.http import Client
from slipstream.errors import ConfigError

Ask = Callable[[str, int, list[int], tuple[int, int]], float | None]
Answers = dict[str, list[list[int] | str]]  # "greedy/8" -> for each prompt its token ids, or the error as a text


class Flip(msgspec.Struct, frozen=True):
    """The first difference of two answers."""

    setting: str
    prompt: int
    step: int
    tokens: tuple[int, int]
    margin: float | None  # distance from a tie, in nats; None if the server did not report it


class Verdict(msgspec.Struct):
    compared: int = 0
    equal: int = 0
    flips: list[Flip] = []  # near-ties
    wrong: list[Flip] = []
    errors: list[str] = []

    @property
    def differences(self) -> list[Flip]:
        """The differences, with those that are not near-ties first."""
        return [*self.wrong, *self.flips]

    def figures(self) -> dict[str, typing.Any]:
        margins = sorted(f.margin for f in self.differences if f.margin is not None)
        return {
            "compared": self.compared,
            "equal": self.equal,
            "flips_greedy": sum(f.setting.startswith("greedy") for f in self.flips),
            "flips_seeded": sum(f.setting.startswith("seeded") for f in self.flips),
            "wrong": len(self.wrong),
            "margin_p50": margins[len(margins) // 2] if margins else None,
            "margin_max": margins[-1] if margins else None,
            "errors": len(self.errors),
            "error_reasons": {e: self.errors.count(e) for e in dict.fromkeys(self.errors)},
        }

    def passed(self, max_flips: int | None) -> bool:
        few = max_flips is None or len(self.flips) <= max_flips
        return not self.wrong and not self.errors and few and self.compared > 0


def collect(
    target: Target, sets: dict[str, list[Job]], concurrencies: Sequence[int], seed: int, done: Callable[[int], None]
) -> Answers:
    """Runs every set ("greedy", "seeded") at every concurrency."""
    if not target.token_ids:
        raise ConfigError("parity compares token ids, and this server does not support return_token_ids")
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


def compare(a: Answers, b: Answers, margin: float, ask: Ask) -> Verdict:
    """`ask(setting, prompt, answer so far, the two next tokens)` returns their distance from a tie."""
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
    ask: Ask,
) -> None:
    verdict.compared += 1
    if isinstance(x, str) or isinstance(y, str):
        verdict.errors += [e for e in (x, y) if isinstance(e, str)]
        return
    step = next((k for k, (s, t) in enumerate(zip(x, y, strict=False)) if s != t), min(len(x), len(y)))
    if step == len(x) == len(y):
        verdict.equal += 1
        return
    pair = (x[step] if step < len(x) else -1, y[step] if step < len(y) else -1)
    gap = ask(setting, prompt, x[:step], pair) if -1 not in pair else None
    flip = Flip(setting, prompt, step, pair, gap)
    (verdict.flips if gap is not None and gap < margin else verdict.wrong).append(flip)


async def tie_gap(target: Target, history: list[int], pair: tuple[int, int], seed: int | None) -> float | None:
    """How far two tokens after `history` are from a tie, in nats; None if the server does not report it.

    Greedy: the distance of the less likely one from the best token. Seeded: the difference of both with the draw's noise.
    """
    async with Client(target.base_url, target.key, target.timeout) as client:
        seen = [await _logprobs(client, target.model, history, token) for token in pair]
    if None in seen:
        return None
    (a, best), (b, _) = seen  # type: ignore[misc]
    if seed is None:
        return max(a, b, best) - min(a, b)
    import numpy as np

    from slipstream.ops.sampling import draw_key, gumbel, noise_bits, spread

    noise = gumbel(noise_bits(draw_key(seed, 0, len(history)), spread(np.array(pair)))).tolist()
    return abs(a + noise[0] - b - noise[1])


async def _logprobs(client: Client, model: str, history: list[int], token: int) -> tuple[float, float] | None:
    """The log probability of `token` after `history`, and that of the best token there."""
    body = {"model": model, "prompt": [*history, token], "max_tokens": 1, "temperature": 0, "logprobs": 1, "echo": True}
    answer = await client.request("POST", "/v1/completions", body)
    try:
        logprobs, at = answer["choices"][0]["logprobs"], len(history)
        return logprobs["token_logprobs"][at], max(logprobs["top_logprobs"][at].values())
    except (KeyError, IndexError, TypeError, AttributeError, ValueError):
        return None


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
