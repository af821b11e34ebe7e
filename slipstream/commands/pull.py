"""`slipstream pull`: fetches a model, or all parts of a composite one, or checks the cached files."""

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model",
        help="a name (smollm2-135m, gemma3-270m, whisper-tiny.en, all-minilm-l6-v2), a Hugging Face id, voice, or a .yaml file",
    )
    parser.add_argument("--verify", action="store_true", help="check the cached files against their hashes")


def run(args: argparse.Namespace) -> int:
    from slipstream.graph.known import is_composite
    from slipstream.graph.placement import weights_of
    from slipstream.weights.pull import resolve_model

    names = weights_of(args.model) if is_composite(args.model) else [args.model]
    for name in names:
        print(resolve_model(name, verify=args.verify))
    return 0
