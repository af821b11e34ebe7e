"""One schema for flags, YAML files and `SLIPSTREAM_*` variables.

Imports only the standard library (YAML is read with PyYAML when a file is given), so that the supervisor starts fast.
Precedence: flag, then environment, then file, then default. `EngineConfig` and `ServerConfig` are plain values; child processes
get them as JSON.
"""

import argparse
import dataclasses
import difflib
import json
import math
import os
import pathlib
import re
import typing
from dataclasses import dataclass, field

from slipstream.errors import ConfigError


def option(
    default: typing.Any,
    help: str,
    *,
    flags: tuple[str, ...] = (),
    choices: tuple[str, ...] | None = None,
    secret: bool = False,
    metavar: str | None = None,
    least: float | None = None,
    above: float | None = None,
    most: float | None = None,
    form: tuple[str, str] | None = None,
) -> typing.Any:
    """A configuration field: its default, its text in `--help`, and its range: value >= least, > above, <= most.

    form: of a list, a pattern that each of its words must match, and the form in words.
    """
    meta = {"help": help, "flags": flags, "choices": choices, "secret": secret, "metavar": metavar}
    meta |= {"least": least, "above": above, "most": most, "form": form}
    if isinstance(default, list):
        return field(default_factory=lambda: list(default), metadata=meta)
    return field(default=default, metadata=meta)


MAX_DRAFTS = 8  # of a request in one step


@dataclass
class EngineConfig:
    """The settings for loading and running a model; the same on every rank."""

    model: str = option(
        "smollm2-135m", "model: a name of `slipstream pull`, a folder, a .gguf file, a Hugging Face id, or a placement's .yaml"
    )
    task: str = option(
        "auto",
        "what the model is for; auto: by its files (embed: vectors of texts; score: scores of pairs of texts)",
        choices=("auto", "generate", "embed", "score"),
    )
    pooling: str = option(
        "auto",
        "how a model that embeds makes one vector of a text; auto: by its files",
        choices=("auto", "mean", "cls", "last"),
    )
    tokenizer: str | None = option(None, "a tokenizer folder or Hugging Face id (default: the model's own)")
    chat_template: str | None = option(None, "a Jinja chat template: a file's path or the text itself")
    special_tokens_in_content: bool = option(
        True, "whether the name of a special token in a conversation's text becomes that token; if not, it is text"
    )
    dtype: str = option("auto", "dtype of weights and activations", choices=("auto", "bfloat16", "float16", "float32"))
    kv_cache_dtype: str = option(
        "auto",
        "dtype of keys and values in the cache (auto: that of the weights)",
        choices=("auto", "bfloat16", "float16", "float32"),
    )
    device: str = option(
        "auto",
        "what runs the model; sim: no model, tokens from a hash after --sim-step-us",
        choices=("auto", "cpu", "cuda", "sim"),
    )
    load_format: str = option(
        "auto", "dummy: random weights from config.json alone", choices=("auto", "safetensors", "gguf", "dummy")
    )
    model_impl: str = option(
        "auto",
        "whose code runs the model; auto: Slipstream's where it has the architecture, else that of the transformers library",
        choices=("auto", "slipstream", "transformers"),
    )
    max_model_len: int | None = option(
        None, "longest prompt plus answer, in tokens (default: the model's own, bounded by memory)", least=2
    )
    max_num_seqs: int = option(128, "requests that run at the same time", least=1)
    max_num_batched_tokens: int = option(2048, "the most tokens in one step", least=1)
    block_size: int | None = option(None, "tokens per page of the KV cache (default: 64 on CUDA, 16 elsewhere)", least=1)
    kv_cache_memory_bytes: int | None = option(None, "bytes of the KV cache per rank (default: from the free memory)", least=1)
    gpu_memory_utilization: float = option(0.9, "share of a GPU's memory that a rank may take", above=0, most=1)
    enforce_eager: bool = option(False, "run CUDA steps without captured graphs (slow)")
    kv_offload_memory_bytes: int | None = option(
        None,
        "host memory per rank for preempted requests (default: a quarter of the cache on CPU, none on CUDA; 0: recompute)",
        least=0,
    )
    seed: int = option(0, "seed of dummy weights; requests carry their own seeds", least=0)
    scheduling: str = option("async", "async plans the next step while one runs; serial waits", choices=("async", "serial"))
    enable_prefix_caching: bool = option(True, "reuse the KV pages of prompts and answers with equal beginnings")
    tensor_parallel_size: int = option(1, "ranks that share each layer", flags=("-tp",), least=1)
    speculative_tokens: str = option(
        "0",
        "drafts that a step verifies for each request, 0 to 8; auto: as many as pay off",
        choices=("auto", *map(str, range(MAX_DRAFTS + 1))),
    )
    speculative_method: str = option(
        "ngram", "where drafts come from; ngram: what followed the last tokens earlier in the request", choices=("ngram",)
    )
    step_timeout: float = option(30.0, "seconds without progress after which a rank counts as hung", above=0)
    target_itl_ms: float | None = option(
        None, "target for the longest wait between two tokens of a stream, in ms (default: 100 on CPU, else 16)", above=0
    )
    max_queue: int = option(4096, "requests that may wait; more get HTTP 429", least=1)
    queue_memory_bytes: int = option(
        1 << 30, "bytes that waiting and running requests may take in the leader; more get HTTP 429", least=1 << 20
    )
    sim_step_us: float = option(3000.0, "--device sim: microseconds a step takes", least=0)
    sim_token_us: float = option(17.0, "--device sim: microseconds more for each token of a step", least=0)
    sim_drafts: int = option(0, "--device sim: drafts that each decode row verifies", least=0, most=8)
    sim_window: int = option(0, "--device sim: window of some layers, in tokens; 0: no window", least=0)
    sim_snapshot_tokens: int = option(
        0, "--device sim: tokens between saves of the per-slot state that some layers have; 0: no state", least=0
    )

    @property
    def most_drafts(self) -> int:
        """Drafts of a request that a step verifies at most."""
        return MAX_DRAFTS if self.speculative_tokens == "auto" else int(self.speculative_tokens)


@dataclass
class ServerConfig:
    """The settings for serving the model over HTTP."""

    host: str = option("127.0.0.1", "address to bind")
    port: int = option(8000, "port to bind; 0 takes a free one", least=0, most=65535)
    allowed_origins: list[str] = option(
        [],
        "other sites whose pages may use this server from a browser (default: none)",
        metavar="ORIGIN",
        form=(r"[a-z][a-z0-9+.\-]*://[^\s/*]+", "an origin: SCHEME://HOST or SCHEME://HOST:PORT in small letters, no path"),
    )
    uds: str | None = option(None, "bind this Unix socket instead of host and port")
    served_model_name: list[str] = option([], "the names clients use; answers carry the first (default: the model's)")
    api_key: str | None = option(None, "clients must send this key, except to /health and /ready", secret=True)
    api_server_count: int = option(1, "the number of front-end processes that share the address", least=1, most=64)
    body_memory_bytes: int = option(
        512 << 20, "bytes of large bodies and uploads that a front end holds at a time; more get HTTP 503", least=32 << 20
    )
    answer_memory_bytes: int = option(
        1 << 30, "bytes of large answers that wait in a front end for their clients to read; more get HTTP 503", least=1 << 20
    )
    drain_timeout: float = option(20.0, "seconds that running requests have to end after SIGTERM", least=0)
    tool_call_parser: str = option(
        "auto",
        "how the model writes tool calls; auto: recognized in the chat template",
        choices=("auto", "hermes", "llama3", "none"),
    )
    reasoning_parser: str = option(
        "auto",
        "how the model marks its reasoning; auto: recognized in the chat template",
        choices=("auto", "none", "deepseek_r1", "qwen3"),
    )
    enable_debug: bool = option(False, "serve /debug/ranks and /debug/timeline")
    log_level: str = option("info", "verbosity", choices=("debug", "info", "warning", "error"))
    log_format: str = option("text", "log format: text for people, json for programs", choices=("text", "json"))
    otlp_traces_endpoint: str | None = option(
        None, "send a trace of each request to this OpenTelemetry collector (OTLP over HTTP)", metavar="URL"
    )


def served_names(engine: EngineConfig, server: ServerConfig) -> list[str]:
    """The model's names in the API: --served-model-name, else the model as it was asked for. Answers carry the first."""
    return server.served_model_name or [engine.model]


def flag_name(name: str) -> str:
    return "--" + name.replace("_", "-")


def _parse(kind: typing.Any, text: typing.Any, origin: str) -> typing.Any:
    """Turns a text (or a YAML scalar) into the field's type, or raises ConfigError naming its origin."""
    if typing.get_origin(kind) is list:  # words of a flag, a YAML list, or words of a string
        (kind,) = typing.get_args(kind)
        return [_parse(kind, word, origin) for word in (text if isinstance(text, list) else str(text).split())]
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
        if isinstance(text, bool) or (kind is int and isinstance(text, float)) or isinstance(text, (dict, list)):
            raise ValueError
        return kind(text)
    except (TypeError, ValueError):
        word = {int: "whole number", float: "number", bool: "truth value (true, false)", str: "text"}.get(kind, str(kind))
        raise ConfigError(f"{origin}: {text!r} is not a {word}") from None


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
            help = meta["help"] + ("" if default is None or isinstance(default, bool) else f" (default: {default})")
            help = help.replace("%", "%%")
            if hints[f.name] is bool:
                parser.add_argument(*names, dest=f.name, action=argparse.BooleanOptionalAction, default=None, help=help)
            else:
                # choices and types are checked by `resolve`, in one place for flags, environment and file
                metavar = meta["metavar"] or (
                    "{" + ",".join(meta["choices"]) + "}" if meta["choices"] else _metavar(hints[f.name])
                )
                nargs = "+" if typing.get_origin(hints[f.name]) is list else None
                parser.add_argument(*names, dest=f.name, default=None, metavar=metavar, help=help, nargs=nargs)


def _metavar(kind: typing.Any) -> str:
    args = [a for a in typing.get_args(kind) if a is not type(None)]
    return {int: "N", float: "X"}.get(args[0] if args else kind, "TEXT")


def _read_file(path: str) -> dict:
    import yaml

    try:
        data = yaml.safe_load(pathlib.Path(path).read_text())
    except (OSError, yaml.YAMLError) as e:
        raise ConfigError(f"--config {path}: {e}") from None
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise ConfigError(f"--config {path}: must hold keys and values")
    return {str(k).replace("-", "_"): v for k, v in data.items()}


def _check(meta: typing.Mapping[str, typing.Any], value: typing.Any, origin: str) -> None:
    """Raises ConfigError if a value is not among the choices or out of range."""
    choices, least, above, most = meta["choices"], meta["least"], meta["above"], meta["most"]
    if value is None:
        return
    if meta["secret"] and value == "":
        raise ConfigError(f"{origin}: is empty; give a key or leave it out")
    if choices and str(value) not in choices:
        near = difflib.get_close_matches(str(value), choices, 1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ConfigError(f"{origin}: {value!r} is not one of {', '.join(choices)}{hint}")
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"{origin}: {value} is not a finite number")
    if meta["form"]:
        pattern, words = meta["form"]
        for word in typing.cast("list[str]", value):
            if not re.fullmatch(pattern, word):
                raise ConfigError(f"{origin}: {word!r} is not {words}")
    if least is not None and value < least:
        raise ConfigError(f"{origin}: {value} is too small; it must be at least {least}")
    if above is not None and value <= above:
        raise ConfigError(f"{origin}: {value} is too small; it must be more than {above}")
    if most is not None and value > most:
        raise ConfigError(f"{origin}: {value} is too large; it must be at most {most}")


def check(value: typing.Any) -> typing.Any:
    """The same checks for a value made in Python (`LLM(model, max_num_seqs=0)`). Returns it, or raises ConfigError."""
    for f in dataclasses.fields(value):
        _check(f.metadata, getattr(value, f.name), f.name)
    return value


def resolve(flags: dict, *schemas: type, environ: typing.Mapping[str, str] = os.environ) -> list:
    """One value of each schema from flags (None: not given), environment, file and defaults.

    Raises ConfigError for an unknown key of the file or a value that does not parse or is not among the choices.
    """
    file = _read_file(flags["config"]) if flags.get("config") else {}
    known = {f.name for s in schemas for f in dataclasses.fields(s)}
    unknown = sorted(set(file) - known)
    if unknown:
        near = difflib.get_close_matches(unknown[0], known, 1)
        hint = f"did you mean {near[0]!r}?" if near else f"known keys: {', '.join(sorted(known))}"
        raise ConfigError(f"--config: unknown key {unknown[0]!r}; {hint}")
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
            elif file.get(f.name) is not None:
                raw, origin = file[f.name], f"--config: {f.name}"
            else:
                continue
            value = _parse(hints[f.name], raw, origin)
            _check(f.metadata, value, origin)
            values[f.name] = value
        out.append(schema(**values))
    return out


def to_json(value: typing.Any) -> str:
    return json.dumps(dataclasses.asdict(value))


def from_json(schema: type, text: str) -> typing.Any:
    return schema(**json.loads(text))
