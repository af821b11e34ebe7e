"""The requests of the equality matrix, how they arrive, and what an answer is compared by.

Prompts share a beginning, end on page boundaries and beside them, and ask for everything that scheduling could disturb.
"""

import http.client
import json
import math
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from tests.helpers.server import Server

LENGTHS = (21, 37, 64, 100, 129, 176, 48, 80)  # of the prompts; the first SHARED tokens of the longer ones are the same
SHARED = 40
VOCABULARY = 267  # the tokens that have a text
TOKENS = 40  # of an answer at most
NEAR_TIE = 1e-3  # nats between the best two tokens below which the order of a batch's sums may choose


class Answer(NamedTuple):
    """What must be the same in every setting."""

    ids: list[int]
    text: str
    finish: str
    usage: tuple[int, int]
    logprobs: list[float]  # of the tokens, and of the best ones at each position
    names: list[Any]  # the best tokens' names


def prompts() -> list[list[int]]:
    rng = np.random.default_rng(11)
    beginning = rng.integers(3, 250, SHARED).tolist()
    return [(beginning + rng.integers(3, 250, n).tolist())[:n] for n in LENGTHS]


def plain(prompt: list[int], **more: Any) -> dict[str, Any]:
    return {"prompt": prompt, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True, "return_token_ids": True, **more}


def make_requests(ask: Callable[[dict[str, Any]], dict]) -> dict[str, dict[str, Any]]:
    """The bodies by name. Stop strings, bad words and stop tokens come from the plain answers that `ask` gives."""
    p = prompts()
    words, stops, least = (ask(plain(p[i]))["choices"][0] for i in (2, 4, 5))
    penalties = {"presence_penalty": 0.6, "frequency_penalty": 0.4, "repetition_penalty": 1.2}
    return {
        "greedy": plain(p[0]),
        "seeded top-p with penalties": plain(p[1], temperature=0.9, top_p=0.9, seed=7, **penalties),
        "bad words": plain(p[2], bad_words=[c for c in words["text"] if c.isascii() and c.isprintable()][:3]),
        "logprobs top-5": plain(p[3], temperature=0.8, seed=3, logprobs=5),
        "stop strings": plain(p[4], stop=[stops["text"][len(stops["text"]) // 2 :][:2], "never said"]),
        "min_tokens": plain(p[5], min_tokens=25, stop_token_ids=sorted(set(least["token_ids"][:12]))),
        "prompt scored": plain(p[6], echo=True, logprobs=2),
        "grammar": plain(p[7], temperature=0.8, seed=5, structured_outputs={"regex": "[a-z]{3}( [a-z0-9]{1,9}){2,8}"}),
    }


def answer_of(body: dict) -> Answer:
    choice, usage = body["choices"][0], body["usage"]
    numbers: list[float] = []
    names: list[Any] = []
    found = choice.get("logprobs")
    if found:
        numbers += [x for x in found["token_logprobs"] if x is not None]
        for top in found["top_logprobs"]:
            best = sorted((top or {}).items())
            names.append([k for k, _ in best])
            numbers += [v for _, v in best]
    used = (usage["prompt_tokens"], usage["completion_tokens"])
    return Answer(choice["token_ids"], choice["text"], choice["finish_reason"], used, numbers, names)


# --- arrivals


def at_once(server: Server, bodies: dict[str, dict]) -> dict[str, Answer]:
    return _gather(server, bodies, [0.0] * len(bodies))


def trickling(server: Server, bodies: dict[str, dict]) -> dict[str, Answer]:
    return _gather(server, bodies, [0.04 * i for i in range(len(bodies))])


def with_aborts(server: Server, bodies: dict[str, dict]) -> dict[str, Answer]:
    """Beside each request runs a client that leaves: at once, or in the midst of its answer."""
    prompt = prompts()[5]
    leaving = [
        threading.Thread(target=_leave, args=(server, {**plain(prompt[: 30 * (i + 1)]), "seed": i}, 4 * i)) for i in range(6)
    ]
    for thread in leaving:
        thread.start()
    try:
        return _gather(server, bodies, [0.02 * i for i in range(len(bodies))])
    finally:
        for thread in leaving:
            thread.join()


ARRIVALS = {"at once": at_once, "trickling": trickling, "with aborts": with_aborts}


def _gather(server: Server, bodies: dict[str, dict], waits: list[float]) -> dict[str, Answer]:
    out: dict[str, Any] = {}

    def run(name: str, body: dict, wait: float) -> None:
        time.sleep(wait)
        try:
            out[name] = server.post("/v1/completions", body, timeout=200)
        except OSError as e:
            out[name] = e

    threads = [
        threading.Thread(target=run, args=(name, body, wait)) for (name, body), wait in zip(bodies.items(), waits, strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for name, got in out.items():
        assert not isinstance(got, OSError) and got.status == 200, f"{name}: {got}\n{server.log[-4000:]}"
    return {name: answer_of(got.body) for name, got in out.items()}


def _leave(server: Server, body: dict, after: int) -> None:
    """A client that reads `after` events of its stream and hangs up."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=100)
    connection.request("POST", "/v1/completions", json.dumps({**body, "stream": True}), {"Content-Type": "application/json"})
    if after:
        response = connection.getresponse()
        for _ in range(2 * after):
            response.readline()
    else:
        time.sleep(0.02)
    connection.close()


# --- the comparison


def differences(
    expected: dict[str, Answer], got: dict[str, Answer], bodies: dict[str, dict], ask: Callable[[dict], dict]
) -> tuple[list[str], int]:
    """What differs, in words, and how many answers took the other side of a near-tie (those are right as well)."""
    wrong: list[str] = []
    flips = 0
    for name, a in expected.items():
        b = got[name]
        if a.ids != b.ids:
            step = next((i for i, (x, y) in enumerate(zip(a.ids, b.ids, strict=False)) if x != y), min(len(a.ids), len(b.ids)))
            if _near_tie(bodies[name], a.ids, step, ask):
                flips += 1
            else:
                wrong.append(f"{name}: tokens differ from {step} on: {a.ids[step : step + 5]} became {b.ids[step : step + 5]}")
        elif (a.text, a.finish, a.usage, a.names) != (b.text, b.finish, b.usage, b.names):
            wrong.append(f"{name}: {a} became {b}")
        elif not all(math.isclose(x, y, abs_tol=1e-4) for x, y in zip(a.logprobs, b.logprobs, strict=True)):
            worst = max(abs(x - y) for x, y in zip(a.logprobs, b.logprobs, strict=True))
            wrong.append(f"{name}: log probabilities differ by {worst:.2g}")
    return wrong, flips


def _near_tie(body: dict, ids: list[int], step: int, ask: Callable[[dict], dict]) -> bool:
    """Whether a greedy answer without penalties stood between two tokens there. Others have no near-tie that we can ask for."""
    if body["temperature"] or "bad_words" in body or step >= len(ids):
        return False
    top = ask(plain(body["prompt"] + ids[:step], max_tokens=1, logprobs=2))["choices"][0]["logprobs"]["top_logprobs"][0]
    first, second = sorted(top.values(), reverse=True)[:2]
    return first - second < NEAR_TIE
