"""The benchmark's questions to a server before it measures, and its own server for `--serve`."""

import argparse
import asyncio
import contextlib
import os
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
import typing
from collections.abc import Iterator

from slipstream.bench.load.flags import DEFAULT_URL
from slipstream.bench.load.worker import Target
from slipstream.client.http import Client, ServerError
from slipstream.errors import ConfigError, SlipstreamError
from slipstream.system.child import python_environment


class NoServer(SlipstreamError):
    """The server did not start or does not answer."""


@contextlib.contextmanager
def chosen(url: str | None, serve: str | None) -> Iterator[str]:
    """The server of `--base-url`, or one of its own for `--serve`. Yields its base URL."""
    if url and serve:
        raise ConfigError("--base-url and --serve exclude each other")
    if serve is None:
        yield url or DEFAULT_URL
    else:
        with own_server(serve) as own:
            yield own


def key_of(args: argparse.Namespace) -> str | None:
    return args.api_key or os.environ.get("SLIPSTREAM_API_KEY") or None


def target_of(args: argparse.Namespace, url: str) -> Target:
    return asyncio.run(probe(url, key_of(args), args.model, args.vocab, args.timeout))


async def probe(base_url: str, key: str | None, model: str | None, vocab: int | None, timeout: float) -> Target:
    """Finds the model's name, length and vocabulary, and whether the server returns token ids."""
    async with Client(base_url, key, timeout) as client:
        entries = await client.models()
        entry = next((e for e in entries if e.get("id") == model), None) if model else entries[0]
        if entry is None:
            raise NoServer(f"--model: the server has {', '.join(str(e.get('id')) for e in entries)}, not {model}")
        name = str(entry["id"])
        size = vocab or entry.get("vocab_size") or await _vocabulary(client, name)
        ids = await _returns_ids(client, name, size)
    limit = entry.get("max_model_len")
    return Target(base_url, name, key, int(size), int(limit) if limit else None, ids, timeout)


async def _accepts(client: Client, body: dict[str, typing.Any]) -> typing.Any:
    """The answer, or None if the server refuses the body (4xx)."""
    try:
        return await client.request("POST", "/v1/completions", body)
    except ServerError as e:
        if e.status in (400, 404, 413, 422):
            return None
        raise


async def _vocabulary(client: Client, model: str) -> int:
    """The number of token ids that the server accepts, by bisection. 32000 if the server takes any id."""

    async def valid(token: int) -> bool:
        body = {"model": model, "prompt": [token, token], "max_tokens": 1, "temperature": 0}
        return await _accepts(client, body) is not None

    low, high = 1, 2**21
    if await valid(high):
        return 32000
    if not await valid(low):
        raise NoServer("the server refuses prompts of token ids; set --vocab to skip this check")
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if await valid(middle) else (low, middle)
    return high


async def _returns_ids(client: Client, model: str, vocab: int) -> bool:
    token = vocab // 2
    body = {"model": model, "prompt": [token, token], "max_tokens": 1, "temperature": 0, "return_token_ids": True}
    answer = await _accepts(client, body)
    return bool(answer) and isinstance(answer["choices"][0].get("token_ids"), list)


@contextlib.contextmanager
def own_server(arguments: str, wait: float = 600.0) -> Iterator[str]:
    """Runs `slipstream serve ARGUMENTS` on a free port; yields its base URL once it is healthy, then ends it."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    command = [
        sys.executable,
        "-m",
        "slipstream.cli",
        "serve",
        *shlex.split(arguments),
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
    ]
    with tempfile.TemporaryFile("w+") as log:
        child = subprocess.Popen(
            command, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, env=python_environment()
        )
        before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the server ends with us
        try:
            _await_health(child, f"http://127.0.0.1:{port}", wait, log)
            yield f"http://127.0.0.1:{port}"
        finally:
            signal.signal(signal.SIGTERM, before)
            child.send_signal(signal.SIGTERM)
            try:
                child.wait(60)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()


def _await_health(child: subprocess.Popen[bytes], url: str, wait: float, log: typing.IO[str]) -> None:
    async def healthy() -> bool:
        async with Client(url, timeout=5) as client:
            with contextlib.suppress(ServerError):
                await client.request("GET", "/health")
                return True
        return False

    deadline = time.monotonic() + wait
    while time.monotonic() < deadline and child.poll() is None:
        if asyncio.run(healthy()):
            return
        time.sleep(0.1)
    log.seek(0, os.SEEK_SET)
    tail = log.read()[-3000:]
    why = "is not healthy yet" if child.poll() is None else f"ended with status {child.returncode}"
    raise NoServer(f"the server {why}:\n{tail}")
