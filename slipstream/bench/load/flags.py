"""The flags of `slipstream bench`: one sub-command a workload."""

import argparse
import typing

from slipstream.bench.load.workloads import Shape

WORKLOADS = {
    "closed": "a fixed number of requests in flight",
    "rate": "requests that arrive at random, at a given rate",
    "burst": "long prompts that arrive at once while other streams decode",
    "multi-turn": "conversations with their real history; some clients leave",
    "copy": "one stream with and without drafts: a document to be copied, and a story",
    "voice": "a voice server: quality and latency of transcription, answers and speech",
    "parity": "a fixed set of prompts, compared between servers, settings or loads",
}
DEFAULT_URL = "http://127.0.0.1:8000"


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise ValueError
    return value


def above_zero(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise ValueError
    return value


def share(text: str) -> float:
    value = float(text)
    if not 0 <= value <= 1:
        raise ValueError
    return value


def counts(text: str) -> list[int]:
    return [positive(t) for t in text.split(",")]


positive.__name__, above_zero.__name__, share.__name__ = "whole number above 0", "number above 0", "share from 0 to 1"
counts.__name__ = "list of whole numbers"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(dest="workload", metavar="WORKLOAD", required=True)
    for name, help in WORKLOADS.items():
        sub = commands.add_parser(name, help=help, description=help[0].upper() + help[1:] + ".")
        _common(sub)
        _FLAGS[name](sub)


def _common(sub: argparse.ArgumentParser) -> None:
    group = sub.add_argument_group("server")
    group.add_argument("--base-url", metavar="URL", help=f"the server (default: {DEFAULT_URL})")
    group.add_argument("--serve", metavar="ARGS", help="run `slipstream serve ARGS` for the measurement instead")
    group.add_argument("--model", help="the model's name on the server (default: the first that it lists)")
    group.add_argument("--api-key", metavar="KEY", help="the server's key (or SLIPSTREAM_API_KEY)")
    group.add_argument("--vocab", type=positive, metavar="N", help="token ids below N are valid (default: asked of the server)")
    group.add_argument(
        "--timeout", type=above_zero, default=600.0, metavar="S", help="seconds without a byte that count as an error"
    )
    group = sub.add_argument_group("client")
    group.add_argument("--seed", type=int, default=0, help="seed of prompts, order and arrivals")
    group.add_argument(
        "--scale", type=above_zero, default=1.0, help="multiplies all lengths, for a short context or a slow device"
    )
    group.add_argument(
        "--processes", type=positive, metavar="N", help="the client's processes (default: by the number of cores)"
    )
    group.add_argument("--json", metavar="FILE", help="write the figures and each request's record")
    if not sub.prog.endswith(("parity", "voice", "copy")):
        group.add_argument("--plot", metavar="FILE.png", help="draw latencies and gaps")
        group.add_argument("--trace", action="store_true", help="add the device's idle share (the server needs --enable-debug)")
        group.add_argument("--warmup", type=int, metavar="N", help="requests sent before the measurement")


def _mix_flags(sub: argparse.ArgumentParser) -> None:
    group = sub.add_argument_group("lengths, in tokens")
    group.add_argument(
        "--input-len", type=positive, default=Shape.input_len, metavar="N", help="length of short prompts (default: 200)"
    )
    group.add_argument(
        "--long-input-len",
        type=positive,
        default=Shape.long_input_len,
        metavar="N",
        help="length of long prompts (default: 3000)",
    )
    group.add_argument(
        "--long-share", type=share, default=Shape.long_share, metavar="X", help="share of long prompts (default: 0.2)"
    )
    group.add_argument(
        "--output-len", type=positive, default=Shape.output_len, metavar="N", help="length of answers (default: 256)"
    )


def _closed_flags(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("--concurrency", type=positive, default=48, metavar="C", help="requests in flight (default: 48)")
    sub.add_argument("--requests", type=positive, metavar="N", help="requests in all (default: 10 x C)")
    _mix_flags(sub)


def _rate_flags(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("--rate", type=above_zero, default=5.0, metavar="R", help="arrivals a second (default: 5)")
    sub.add_argument("--requests", type=positive, default=480, metavar="N", help="requests in all (default: 480)")
    _mix_flags(sub)


def _burst_flags(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("--prompts", type=positive, default=8, metavar="N", help="prompts of the burst (default: 8)")
    sub.add_argument(
        "--streams", type=positive, default=16, metavar="N", help="streams that decode at the same time (default: 16)"
    )
    sub.add_argument(
        "--burst-delay",
        type=above_zero,
        default=2.0,
        metavar="S",
        help="seconds that they decode before the burst (default: 2)",
    )
    group = sub.add_argument_group("lengths, in tokens")
    group.add_argument(
        "--input-len", type=positive, default=Shape.input_len, metavar="N", help="length of the streams' prompts (default: 200)"
    )
    for name, help in (
        ("stream_output_len", "length of the streams' answers"),
        ("burst_input_min", "shortest prompt of the burst"),
        ("burst_input_max", "longest prompt of the burst"),
        ("burst_output_len", "their answers"),
    ):
        default = getattr(Shape, name)
        flag = "--" + name.replace("_", "-")
        group.add_argument(flag, type=positive, default=default, metavar="N", help=f"{help} (default: {default})")


def _turn_flags(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("--conversations", type=positive, default=32, metavar="N", help="conversations in all (default: 32)")
    sub.add_argument("--concurrency", type=positive, default=8, metavar="C", help="conversations at the same time (default: 8)")
    sub.add_argument("--leave", type=share, default=0.25, metavar="X", help="share of clients that leave (default: 0.25)")
    sub.add_argument("--max-len", type=positive, metavar="N", help="longest conversation, in tokens (default: the model's)")


def _parity_flags(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("--against", metavar="URL", help="compare with this server")
    sub.add_argument("--against-serve", metavar="ARGS", help="compare with `slipstream serve ARGS`, run after the first")
    sub.add_argument("--save", metavar="FILE", help="write the answers to this file, for a later --load")
    sub.add_argument("--load", metavar="FILE", help="compare with the answers in this file")
    sub.add_argument("--prompts", type=positive, default=48, metavar="N", help="prompts of the set (default: 48)")
    sub.add_argument(
        "--concurrency", type=counts, default=[1, 8, 32], metavar="C,C", help="requests in flight (default: 1,8,32)"
    )
    sub.add_argument("--longest", type=positive, default=3000, metavar="N", help="length of the longest prompt (default: 3000)")
    sub.add_argument("--output-len", type=positive, default=64, metavar="N", help="length of answers (default: 64)")
    sub.add_argument(
        "--margin", type=above_zero, default=1e-3, metavar="X", help="a difference below X nats is a near-tie (default: 0.001)"
    )
    sub.add_argument("--max-flips", type=int, metavar="N", help="the most near-ties allowed (default: any number)")
    sub.add_argument("--sets", choices=("both", "greedy", "seeded"), default="both", help="which answers to compare")


def _voice_flags(sub: argparse.ArgumentParser) -> None:
    group = sub.add_argument_group("work")
    group.add_argument(
        "--sentences", type=positive, default=50, metavar="N", help="sentences of the ceiling, at most 50 (default: 50)"
    )
    group.add_argument(
        "--questions", type=positive, default=8, metavar="N", help="spoken questions, one at a time (default: 8)"
    )
    group.add_argument("--at-once", type=positive, default=8, metavar="N", help="conversations at the same time (default: 8)")
    group.add_argument("--max-tokens", type=positive, default=64, metavar="N", help="length of an answer (default: 64)")


def _copy_flags(sub: argparse.ArgumentParser) -> None:
    group = sub.add_argument_group("work")
    group.add_argument("--lines", type=positive, default=24, metavar="N", help="lines of the document (default: 24)")
    group.add_argument("--output-len", type=positive, default=256, metavar="N", help="tokens of an answer (default: 256)")
    group.add_argument("--rounds", type=positive, default=3, metavar="N", help="answers of each kind (default: 3)")


_FLAGS: dict[str, typing.Callable[[argparse.ArgumentParser], None]] = {
    "closed": _closed_flags,
    "rate": _rate_flags,
    "burst": _burst_flags,
    "multi-turn": _turn_flags,
    "copy": _copy_flags,
    "voice": _voice_flags,
    "parity": _parity_flags,
}
