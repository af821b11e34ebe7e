"""`slipstream chat`: a conversation in the terminal, with a server (`--base-url`) or with an engine started here."""

import argparse
import asyncio
import contextlib
import sys
import typing
from collections.abc import Iterator

from slipstream import config
from slipstream.commands import sampling
from slipstream.errors import SlipstreamError

HELP = "/new starts over, /exit or Ctrl-D ends, Ctrl-C stops an answer"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", help=config.EngineConfig.__dataclass_fields__["model"].metadata["help"])
    parser.add_argument(
        "--base-url", metavar="URL", help="use this server, e.g. http://127.0.0.1:8000, instead of an engine started here"
    )
    parser.add_argument("--api-key", metavar="KEY", help="the server's key (or SLIPSTREAM_API_KEY)")
    parser.add_argument("--system", metavar="TEXT", help="system instructions before the conversation")
    sampling.add_arguments(parser)
    config.add_flags(parser, config.EngineConfig)


def run(args: argparse.Namespace) -> int:
    params = sampling.read(args)
    if args.base_url:
        return _converse(Remote(args.base_url, args.model, args.api_key), args.system, params)
    (engine,) = config.resolve(vars(args), config.EngineConfig)
    with Local(engine) as local:
        return _converse(local, args.system, params)


class Local:
    """An engine in child processes of this one."""

    def __init__(self, engine: config.EngineConfig):
        from slipstream.llm import LLM

        print(f"loading {engine.model} ...", file=sys.stderr)
        self.llm = LLM(**{name: getattr(engine, name) for name in engine.__dataclass_fields__})

    def __enter__(self) -> "Local":
        return self

    def __exit__(self, *_: object) -> None:
        self.llm.close()

    def stream(self, messages: list[dict[str, str]], params: dict[str, typing.Any]) -> Iterator[str]:
        from slipstream import SamplingParams

        return self.llm.stream(messages, SamplingParams(**params))


class Remote:
    """A server with OpenAI's API."""

    def __init__(self, base_url: str, model: str | None, key: str | None):
        from slipstream.client.http import Client

        self.client = Client(base_url, key)
        self.model = model or asyncio.run(_first_model(base_url, key))

    def stream(self, messages: list[dict[str, str]], params: dict[str, typing.Any]) -> Iterator[str]:
        body = {"model": self.model, "messages": messages, "stream": True, **params}
        loop = asyncio.new_event_loop()
        events = self.client.stream("/v1/chat/completions", body)
        try:
            while True:
                try:
                    event = loop.run_until_complete(anext(events)).event
                except StopAsyncIteration:
                    return
                for choice in event.choices:
                    if choice.delta and choice.delta.content:
                        yield choice.delta.content
        finally:
            loop.run_until_complete(events.aclose())
            self.client.close()
            loop.close()


def _converse(engine: Local | Remote, system: str | None, params: dict[str, typing.Any]) -> int:
    start = [{"role": "system", "content": system}] if system else []
    messages = list(start)
    interactive = sys.stdin.isatty()
    if interactive:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  (line editing and history for input())
        print(HELP, file=sys.stderr)
    failed = False
    while True:
        try:
            line = input("> " if interactive else "").strip()
        except (EOFError, KeyboardInterrupt):
            if interactive:
                print(file=sys.stderr)
            return int(failed and not interactive)
        if line in ("/exit", "/quit"):
            return int(failed and not interactive)
        if line == "/new":
            messages = list(start)
        elif line:
            messages.append({"role": "user", "content": line})
            try:
                messages.append({"role": "assistant", "content": _answer(engine.stream(messages, params))})
            except SlipstreamError as e:
                messages.pop()
                failed = True
                print(f"slipstream: {e}", file=sys.stderr)


def _answer(pieces: Iterator[str]) -> str:
    """Prints an answer as it comes. Ctrl-C ends it and keeps its text so far."""
    said: list[str] = []
    try:
        for piece in pieces:
            said.append(piece)
            print(piece, end="", flush=True)
    except KeyboardInterrupt:
        close = getattr(pieces, "close", None)
        if close:
            close()
    print()
    return "".join(said)


async def _first_model(base_url: str, key: str | None) -> str:
    from slipstream.client.http import Client

    async with Client(base_url, key) as client:
        return (await client.models())[0]["id"]
