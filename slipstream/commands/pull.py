"""`slipstream pull`: fetches a model into the cache, or checks what lies there."""

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help="a model's name (smollm2-135m), or a Hugging Face id")
    parser.add_argument("--verify", action="store_true", help="read the cached files again and compare their hashes")


def run(args: argparse.Namespace) -> int:
    from slipstream.weights.pull import resolve_model

    path = resolve_model(args.model, verify=args.verify)
    print(path)
    return 0
