"""A soak test: mixed requests for minutes. It fails if a request fails or the memory of a server's process keeps growing.

    python -m slipstream.bench.load.soak [--minutes 10] [--serve "smollm2-135m"]

The memory is the anonymous memory (RssAnon) of every process of the server. The KV cache is small, so the first half of the run
touches all of it and meets the relevant sizes; after that nothing may grow.
"""

import argparse
import asyncio
import contextlib
import pathlib
import random
import statistics
import sys
import time
import typing

from slipstream.bench.load import report, server
from slipstream.bench.load.records import prompt_ids
from slipstream.bench.load.worker import Target
from slipstream.client.http import Client, ServerError

SERVER = "--kv-cache-memory-bytes 268435456 --kv-offload-memory-bytes 67108864 --max-model-len 2048 --enable-debug"
SAMPLE_S = 5.0
GROWTH = 0.04  # the share of its half-time memory that a process may gain by the end ...
GROWTH_BYTES = 32 << 20  # ... or this many bytes, if that is more: a size that was met late


class Soak:
    """Clients that send mixed requests until `end`, seconds of the monotonic clock, and their results."""

    def __init__(self, target: Target, seed: int, end: float):
        self.target, self.seed, self.end = target, seed, end
        self.requests = 0
        self.errors: list[str] = []
        self.memory: dict[str, list[int]] = {}  # by process: bytes, one number a sample

    async def run(self, clients: int) -> None:
        async with Client(self.target.base_url, self.target.key, self.target.timeout) as client:
            await asyncio.gather(self._watch(client), *(self._client(client, i) for i in range(clients)))

    async def _client(self, client: Client, number: int) -> None:
        rng = random.Random(f"{self.seed} {number}")
        while time.monotonic() < self.end:
            self.requests += 1
            body, leaves = self._body(rng), rng.random() < 0.05
            try:
                async with contextlib.aclosing(client.stream("/v1/completions", body)) as chunks:
                    async for _ in chunks:
                        if leaves:
                            break
            except ServerError as e:
                self.errors.append(str(e))

    def _body(self, rng: random.Random) -> dict[str, typing.Any]:
        """A request of any length (most are short) with parameters that change a step's shape or its sampling."""
        limit = self.target.max_len or 2048
        output = rng.randint(1, 48)
        length = min(round(2 ** rng.uniform(0, 11)), limit - output)
        body: dict[str, typing.Any] = {
            "model": self.target.model,
            "prompt": prompt_ids(self.seed, rng.randrange(1 << 30), length, self.target.vocab),
            "max_tokens": output,
            "temperature": rng.choice([0, 1]),
            "ignore_eos": True,
            "stream": True,
        }
        extra = rng.random()
        if extra < 0.1:
            body |= {"n": 3, "temperature": 1}
        elif extra < 0.2:
            body |= {"logprobs": 5}
        elif extra < 0.3:
            body |= {"top_p": 0.9, "presence_penalty": 0.5, "temperature": 1}
        return body

    async def _watch(self, client: Client) -> None:
        while time.monotonic() < self.end:
            rank = (await client.request("GET", "/debug/ranks"))[0]["pid"]
            parent = status(rank, "PPid")
            for pid in (parent, *children(parent)):
                self.memory.setdefault(f"{module(pid)} ({pid})", []).append(status(pid, "RssAnon") * 1024)
            await asyncio.sleep(SAMPLE_S)


def status(pid: int, key: str) -> int:
    """A number of /proc/PID/status; memory is in KB."""
    with open(f"/proc/{pid}/status") as f:
        return next(int(line.split()[1]) for line in f if line.startswith(key + ":"))


def children(pid: int) -> list[int]:
    return [int(child) for child in pathlib.Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def module(pid: int) -> str:
    """The kind of a server process: the module that its Python runs."""
    words = pathlib.Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
    return next((word for word in words if word.startswith("slipstream.")), words[0])


def growth(samples: list[int]) -> tuple[int, int, bool]:
    """Bytes around half time, bytes at the end, and whether that is growth. They are medians, since memory fluctuates."""
    tenth = max(1, len(samples) // 10)
    middle = len(samples) // 2
    before = int(statistics.median(samples[middle - tenth // 2 : middle - tenth // 2 + tenth]))
    after = int(statistics.median(samples[-tenth:]))
    return before, after, after - before > max(GROWTH * before, GROWTH_BYTES)


def main(argv: list[str] | None = None) -> int:
    """Exit status 0 if no request failed and nothing grew, else 1."""
    parser = argparse.ArgumentParser(description="serve mixed requests for a while; fail on errors and on growth")
    parser.add_argument("--serve", default="smollm2-135m", help="arguments of the server (default: %(default)s)")
    parser.add_argument("--minutes", type=float, default=10.0, help="how long (default: %(default)s)")
    parser.add_argument("--clients", type=int, default=8, help="requests at a time (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    with server.own_server(f"{args.serve} {SERVER}") as url:
        target = asyncio.run(server.probe(url, None, None, None, 600.0))
        soak = Soak(target, args.seed, time.monotonic() + 60 * args.minutes)
        asyncio.run(soak.run(args.clients))
    figures: dict[str, typing.Any] = {"requests": soak.requests, "errors": len(soak.errors)}
    grown = False
    for process, samples in soak.memory.items():
        before, after, grows = growth(samples)
        grown |= grows
        shown = f"{samples[0] >> 20}, {before >> 20}, {after >> 20}"
        figures[f"{process}: MB at first, at half time, at last"] = f"{shown}: it grows" if grows else shown
    report.table(f"soak · {target.model} · {args.minutes:g} minutes", figures)
    for error in soak.errors[:5]:
        print(error, file=sys.stderr)
    return 1 if grown or soak.errors or not soak.requests else 0


if __name__ == "__main__":
    sys.exit(main())
