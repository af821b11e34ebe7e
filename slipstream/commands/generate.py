"""`slipstream generate`: completes prompts from a file or stdin and writes JSON lines.

Each line of a text file is a prompt. A JSON line is `{"prompt": text or token ids}`, or `{"messages": [...]}` for a chat model,
or a bare string; other keys of an object (an id, say) are copied to its answer. Parameters are the same for all lines, so a
parameter in a line is refused.
"""

import argparse
import contextlib
import json
import sys
import typing

from slipstream import config
from slipstream.commands import sampling
from slipstream.errors import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", help=config.EngineConfig.__dataclass_fields__["model"].metadata["help"])
    parser.add_argument("--prompts", metavar="FILE", default="-", help="text or .jsonl, one prompt a line (default: stdin)")
    parser.add_argument(
        "--format", choices=("auto", "text", "jsonl"), default="auto", help="auto: jsonl if the name ends in .jsonl"
    )
    parser.add_argument("--output", metavar="FILE", default="-", help="the file for the JSON lines (default: stdout)")
    sampling.add_arguments(parser)
    config.add_flags(parser, config.EngineConfig)


def run(args: argparse.Namespace) -> int:
    (engine,) = config.resolve(vars(args), config.EngineConfig)
    rows = _read(args.prompts, args.format)
    if not rows:
        raise ConfigError(f"--prompts: {args.prompts} holds no prompt")
    from slipstream import LLM, SamplingParams

    params = SamplingParams(**sampling.read(args))
    llm = LLM(**_fields(engine))
    try:
        outputs = _complete(llm, rows, params)
    finally:
        llm.close()
    _write(args.output, rows, outputs)
    return 0


def _fields(engine: config.EngineConfig) -> dict[str, typing.Any]:
    return {name: getattr(engine, name) for name in engine.__dataclass_fields__}


def _read(path: str, format: str) -> list[dict[str, typing.Any]]:
    """One dict a prompt, with "prompt" or "messages". Raises ConfigError naming the line."""
    try:
        if path == "-":
            lines = sys.stdin.read().splitlines()
        else:
            with open(path, encoding="utf-8") as f:
                lines = f.read().splitlines()
    except (OSError, UnicodeDecodeError) as e:
        raise ConfigError(f"--prompts {path}: {e}") from None
    if format == "auto":
        format = "jsonl" if path.endswith((".jsonl", ".ndjson")) else "text"
    rows: list[dict[str, typing.Any]] = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            rows.append({"prompt": line} if format == "text" else _row(line, f"--prompts {path}, line {number}"))
    return rows


def _row(line: str, where: str) -> dict[str, typing.Any]:
    try:
        row = json.loads(line)
    except ValueError as e:
        raise ConfigError(f"{where}: {e}") from None
    if isinstance(row, str):
        return {"prompt": row}
    if not isinstance(row, dict) or ("prompt" in row) == ("messages" in row):
        raise ConfigError(f'{where}: expected a text, or an object with either "prompt" or "messages"')
    for name in row.keys() & sampling.NAMES:
        raise ConfigError(f"{where}: {name}: parameters are the same for all prompts; give {sampling.flag(name)} instead")
    return row


def _complete(llm: typing.Any, rows: list[dict[str, typing.Any]], params: typing.Any) -> list[typing.Any]:
    """Answers in the rows' order; prompts and chats may be mixed."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    outputs: list[typing.Any] = [None] * len(rows)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("prompts", total=len(rows))
        for kind in (str, list, dict):
            picked = [i for i, row in enumerate(rows) if _kind(row) is kind]
            if not picked:
                continue
            call, key = (llm.chat, "messages") if kind is dict else (llm.generate, "prompt")
            done = call([rows[i][key] for i in picked], params, progress=lambda n: bar.advance(task, n))
            for i, output in zip(picked, done, strict=True):
                outputs[i] = output
    return outputs


def _kind(row: dict[str, typing.Any]) -> type:
    return dict if "messages" in row else type(row["prompt"])


def _write(path: str, rows: list[dict[str, typing.Any]], outputs: list[typing.Any]) -> None:
    with contextlib.ExitStack() as stack:
        out = sys.stdout if path == "-" else stack.enter_context(open(path, "w", encoding="utf-8"))
        for row, output in zip(rows, outputs, strict=True):
            (o,) = output.outputs
            answer = {"text": o.text, "token_ids": o.token_ids, "finish_reason": o.finish_reason}
            out.write(json.dumps({**row, **answer, "prompt_tokens": len(output.prompt_token_ids)}, ensure_ascii=False) + "\n")
