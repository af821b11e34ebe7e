"""The `slipstream` command: a table of commands, each a module that is imported only when it is run.

Imports the standard library, `errors` and `system.say` alone, so that `slipstream serve` starts fast and its process, the
supervisor, never holds PyTorch or the HTTP stack. A command's module has `add_arguments(parser)` and `run(args)`, which returns
the exit status.
"""

import argparse
import difflib
import importlib
import os
import re
import sys
import typing
from collections.abc import Sequence

from slipstream import __version__
from slipstream.errors import ConfigError, SlipstreamError
from slipstream.system.say import open_standard_streams

COMMANDS: dict[str, tuple[str, str]] = {
    "serve": ("slipstream.commands.serve", "serve a model over HTTP, with the API of OpenAI"),
    "chat": ("slipstream.commands.chat", "hold a conversation with a model in the terminal"),
    "generate": ("slipstream.commands.generate", "complete the prompts of a file, as JSON lines"),
    "pull": ("slipstream.commands.pull", "fetch a model and check it"),
    "bench": ("slipstream.bench.load.command", "measure a server under load, or compare two"),
    "verify": ("slipstream.commands.verify", "explore the protocol's states, or simulate groups with faults"),
    "trace": ("slipstream.commands.trace", "write the ranks' last seconds as a trace and a picture"),
    "top": ("slipstream.commands.top", "watch a server's ranks, queue, pages and latencies"),
    "doctor": ("slipstream.commands.doctor", "find out why a server is slow or does not start"),
    "plan": ("slipstream.commands.plan", "print and draw a composite model's placement"),
    "env": ("slipstream.commands.env", "show versions and devices, and what is missing"),
}

KEY_FLAG = "--api-key"
KEY_FD = "SLIPSTREAM_API_KEY_FD"


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line, with the nearest flag if one was mistyped."""

    def __init__(self, *args: typing.Any, **kwargs: typing.Any):
        super().__init__(*args, allow_abbrev=False, **kwargs)

    def error(self, message: str) -> typing.NoReturn:
        wrong = re.match(r"argument (\S+): invalid choice: '(.*)' \(choose from (.*)\)", message)
        if wrong:
            choices = [c.strip(" '") for c in wrong[3].split(",")]
            near = difflib.get_close_matches(wrong[2], choices, 1)
            hint = f"did you mean {near[0]}?" if near else f"choose from {', '.join(choices)}"
            message = f"{wrong[1]}: unknown {wrong[2]!r}; {hint}"
        raise ConfigError(f"{self.prog}: {message} (see {self.prog} --help)")

    def parse(self, argv: Sequence[str]) -> argparse.Namespace:
        args, unknown = self.parse_known_args(argv)
        if unknown:
            flag = unknown[0].split("=", 1)[0]
            near = difflib.get_close_matches(flag, self.flags(argv), 1, 0.7) if flag.startswith("-") else []
            self.error(f"unknown argument {flag}" + (f"; did you mean {near[0]}?" if near else ""))
        return args

    def flags(self, argv: Sequence[str]) -> list[str]:
        """All flags of this parser and of the sub-command named in argv."""
        names = list(self._option_string_actions)
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction):
                for word in argv:
                    if word in action.choices:
                        names += action.choices[word]._option_string_actions
        return names


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit status: 0, 1 for a failure, 2 for a mistake in flags or configuration."""
    key = None
    open_standard_streams()
    if argv is None:
        key = _take_key()
        argv = sys.argv[1:]
        if _key_in(argv):
            _hide_key(argv)
    try:
        return _dispatch(list(argv), key)
    except ConfigError as e:
        print(f"slipstream: {_own_prefix(str(e))}", file=sys.stderr)
        return 2
    except SlipstreamError as e:
        print(f"slipstream: {e}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader of our output is gone (`| head`); prevent an error from the interpreter's last flush.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


def _own_prefix(message: str) -> str:
    return message.removeprefix("slipstream: ").removeprefix("slipstream ")


def _dispatch(argv: list[str], key: str | None) -> int:
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(_usage())
        return 0
    if argv[0] in ("-V", "--version"):
        print(f"slipstream {__version__}")
        return 0
    name, rest = argv[0], argv[1:]
    if name not in COMMANDS:
        near = difflib.get_close_matches(name, COMMANDS, 1)
        hint = f"did you mean {near[0]}?" if near else f"commands: {', '.join(COMMANDS)}"
        raise ConfigError(f"unknown command {name!r}; {hint}")
    path, help = COMMANDS[name]
    parser = Parser(prog=f"slipstream {name}", description=help[0].upper() + help[1:] + ".")
    module = importlib.import_module(path)
    module.add_arguments(parser)
    args = parser.parse(rest)
    if key is not None and hasattr(args, "api_key"):
        args.api_key = key
    return module.run(args)


def _usage() -> str:
    rows = "\n".join(f"  {name:10} {help}" for name, (_, help) in COMMANDS.items())
    return f"usage: slipstream COMMAND [...]\n\n{rows}\n\nslipstream COMMAND --help shows its flags; --version the version."


def _key_in(argv: Sequence[str]) -> bool:
    return any(a == KEY_FLAG or a.startswith(KEY_FLAG + "=") for a in argv)


def strip_key(argv: Sequence[str]) -> tuple[list[str], str | None]:
    """The arguments without `--api-key`, and its value (the last one given; None if there is none)."""
    kept: list[str] = []
    key = None
    i = 0
    while i < len(argv):
        if argv[i] == KEY_FLAG:
            if i + 1 == len(argv):
                kept.append(argv[i])  # argparse reports the missing value
            else:
                key = argv[i + 1]
            i += 2
        elif argv[i].startswith(KEY_FLAG + "="):
            key = argv[i][len(KEY_FLAG) + 1 :]
            i += 1
        else:
            kept.append(argv[i])
            i += 1
    return kept, key


def _hide_key(argv: Sequence[str]) -> None:
    """Runs this process again without the key in its arguments, which every user of the machine can read.

    The key is passed in an anonymous file, since the same user can read an environment too. Process id, descriptors and
    terminal stay the same. Returns only if no value follows the flag.
    """
    kept, key = strip_key(argv)
    if key is None:
        return
    fd = os.memfd_create("key", 0)
    os.write(fd, key.encode())
    os.lseek(fd, 0, os.SEEK_SET)
    os.environ[KEY_FD] = str(fd)
    before = sys.orig_argv[: len(sys.orig_argv) - len(argv)]
    os.execv(sys.executable, [sys.executable, *before[1:], *kept])


def _take_key() -> str | None:
    """The key that `_hide_key` passed on, read once. Neither the descriptor nor its number reaches a child."""
    fd = os.environ.pop(KEY_FD, None)
    if fd is None:
        return None
    try:
        with os.fdopen(int(fd), "rb") as f:
            return f.read().decode()
    except (OSError, ValueError):
        return None


if __name__ == "__main__":
    sys.exit(main())
