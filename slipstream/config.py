"""One schema for flags, YAML files and `SLIPSTREAM_*` variables.

Imports only the standard library (YAML is read with PyYAML when a file is given), so that the supervisor starts fast.
Precedence: flag, then environment, then file, then default. `EngineConfig` and `ServerConfig` are plain values; they cross to
child processes as JSON.
"""

import argparse
import dataclasses
import json
import os
import pathlib
import typing
from dataclasses import dataclass, field

from slipstream.errors import ConfigError


def option(default, help: str, *, flags: tuple[str, ...] = (), choices=None, secret: bool = False, metavar: str | None = None):
    """A configuration field: its default and what `--help` says of it."""
    meta = {"help": help, "flags": flags, "choices": choices, "secret": secret, "metavar": metavar}
    if isinstance(default, list):
        return field(default_factory=lambda: list(default), metadata=meta)
    return field(default=default, metadata=meta)


@dataclass
class EngineConfig:
    """What decides how a model is loaded and run; the same on every rank."""

    model: str = option("smollm2-135m", "model: a name of `slipstream pull`, a folder, a .gguf file or a Hugging Face id")
    tokenizer: str | None = option(None, "tokenizer folder or Hugging Face id, when it is not the model's own")
    chat_template: str | None = option(None, "a Jinja chat template: a file's path or the text itself")
    dtype: str = option("auto", "weights and activations", choices=("auto", "bfloat16", "float16", "float32"))
    device: str = option("auto", "what runs the model", choices=("auto", "cpu", "cuda", "sim"))
    load_format: str = option("auto", "dummy: random weights from config.json alone", choices=("auto", "safetensors", "gguf", "dummy"))
    max_model_len: int | None = option(None, "longest prompt plus answer, in tokens (default: the model's own, bounded by memory)")
    max_num_seqs: int = option(128, "requests that run at the same time")
    max_num_batched_tokens: int = option(2048, "tokens of one step at most")
    block_size: int = option(16, "tokens per page of the KV cache")
    kv_cache_memory_bytes: int | None = option(None, "bytes of the KV cache per rank (default: sized from what is free)")
    seed: int = option(0, "seed of dummy weights; request seeds are the request's own")
    scheduling: str = option("async", "async plans the next step while one runs; serial waits", choices=("async", "serial"))
    max_queue: int = option(4096, "requests that may wait; more get HTTP 429")
    sim_step_us: float = option(3000.0, "--device sim: microseconds a step takes")
    sim_token_us: float = option(17.0, "--device sim: microseconds more for each token of a step")


@dataclass
class ServerConfig:
    """What decides how the model is offered."""

    host: str = option("127.0.0.1", "address to bind")
    port: int = option(8000, "port to bind")
    uds: str | None = option(None, "bind this Unix socket instead of host and port")
    served_model_name: str | None = option(None, "the name clients use (default: the model's)")
    api_key: str | None = option(None, "clients must send this key, except to /health", secret=True)
    drain_timeout: float = option(30.0, "seconds that SIGTERM leaves running requests")
    enable_debug: bool = option(False, "serve /debug/ranks and /debug/timeline")
    log_level: str = option("info", "verbosity", choices=("debug", "info", "warning", "error"))


def flag_name(name: str) -> str:
    return "--" + name.replace("_", "-")


def _parse(kind: typing.Any, text: typing.Any, origin: str) -> typing.Any:
    """Turns a text (or a YAML scalar) into the field's type, or raises ConfigError naming where it came from."""
    args = [a for a in typing.get_args(kind) if a is not type(None)]
    if args:
        if text is None:
            return None
        kind = args[0]
    try:
        if kind is bool:
            if isinstance(text, bool):
                return text
            word = str(text).lower()
            if word in ("1", "true", "yes", "on"):
                return True
            if word in ("0", "false", "no", "off"):
                return False
            raise ValueError
        if isinstance(text, bool):
            raise ValueError
        return kind(text)
    except (TypeError, ValueError):
        raise ConfigError(f"{origin}: {text!r} is not a valid {getattr(kind, '__name__', kind)}") from None


def add_flags(parser: argparse.ArgumentParser, *schemas: type) -> None:
    """Adds one flag per field of the schemas, and `--config`."""
    parser.add_argument("--config", metavar="FILE", help="a YAML file with the same keys as the flags")
    for schema in schemas:
        hints = typing.get_type_hints(schema)
        for f in dataclasses.fields(schema):
            meta = f.metadata
            if f.name == "model":
                continue
            names = (*meta["flags"], flag_name(f.name))
            default = f.default if f.default is not dataclasses.MISSING else None
            help = meta["help"] + ("" if default in (None, False) else f" (default {default})")
            if hints[f.name] is bool:
                parser.add_argument(*names, dest=f.name, action=argparse.BooleanOptionalAction, default=None, help=help)
            else:
                parser.add_argument(*names, dest=f.name, default=None, choices=meta["choices"], metavar=meta["metavar"], help=help)


def _read_file(path: str) -> dict:
    import yaml

    try:
        data = yaml.safe_load(pathlib.Path(path).read_text())
    except (OSError, yaml.YAMLError) as e:
        raise ConfigError(f"--config {path}: {e}") from None
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise ConfigError(f"--config {path}: expected keys and values")
    return {str(k).replace("-", "_"): v for k, v in data.items()}


def resolve(flags: dict, *schemas: type, environ: typing.Mapping[str, str] = os.environ) -> list:
    """One value of each schema from flags (None: not given), environment, file and defaults.

    Raises ConfigError for an unknown key of the file or a value that does not parse or is not among the choices.
    """
    file = _read_file(flags["config"]) if flags.get("config") else {}
    known = {f.name for s in schemas for f in dataclasses.fields(s)}
    unknown = sorted(set(file) - known)
    if unknown:
        raise ConfigError(f"--config: unknown key {unknown[0]!r}; known keys: {', '.join(sorted(known))}")
    out = []
    for schema in schemas:
        hints = typing.get_type_hints(schema)
        values = {}
        for f in dataclasses.fields(schema):
            env = "SLIPSTREAM_" + f.name.upper()
            if flags.get(f.name) is not None:
                raw, origin = flags[f.name], flag_name(f.name)
            elif env in environ:
                raw, origin = environ[env], env
            elif f.name in file:
                raw, origin = file[f.name], f"--config: {f.name}"
            else:
                continue
            value = _parse(hints[f.name], raw, origin)
            choices = f.metadata["choices"]
            if choices and value not in choices:
                raise ConfigError(f"{origin}: {value!r} is not one of {', '.join(map(str, choices))}")
            values[f.name] = value
        out.append(schema(**values))
    return out


def to_json(value: typing.Any) -> str:
    return json.dumps(dataclasses.asdict(value))


def from_json(schema: type, text: str) -> typing.Any:
    return schema(**json.loads(text))
