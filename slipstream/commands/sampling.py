"""The sampling flags that `chat` and `generate` share. Values are checked by the engine, as for HTTP requests."""

import argparse
import typing

FLAGS: tuple[tuple[str, type, str], ...] = (
    ("max_tokens", int, "the most tokens in an answer"),
    ("temperature", float, "0 always takes the likeliest token"),
    ("top_p", float, "sample from the likeliest tokens whose probabilities sum to this"),
    ("top_k", int, "sample from the k likeliest tokens"),
    ("min_p", float, "sample from tokens with at least this share of the highest probability"),
    ("presence_penalty", float, "lowers the logits of tokens that have been used"),
    ("frequency_penalty", float, "lowers the logits of tokens by how often they have been used"),
    ("repetition_penalty", float, "divides the logits of tokens that have been used"),
)

NAMES = frozenset({name for name, _, _ in FLAGS} | {"seed", "stop", "ignore_eos"})


def flag(name: str) -> str:
    """The flag of a parameter."""
    return "--sample-seed" if name == "seed" else "--" + name.replace("_", "-")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("sampling")
    for name, kind, help in FLAGS:
        group.add_argument(flag(name), dest="sample_" + name, type=kind, metavar="N" if kind is int else "X", help=help)
    group.add_argument("--sample-seed", dest="sample_seed", type=int, metavar="N", help="seed of sampling")
    group.add_argument(
        "--stop", dest="sample_stop", action="append", metavar="TEXT", help="end an answer at this text (repeatable)"
    )
    group.add_argument(
        "--ignore-eos", dest="sample_ignore_eos", action="store_const", const=True, help="go on after an end token"
    )


def read(args: argparse.Namespace) -> dict[str, typing.Any]:
    """The parameters that were given, under their API names."""
    return {k.removeprefix("sample_"): v for k, v in vars(args).items() if k.startswith("sample_") and v is not None}
