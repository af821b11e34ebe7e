"""The process that tries grammars: `python -m slipstream.grammar.worker`, started by `grammar_check.py`.

A grammar is a program that a client sent. It is compiled here as a rank would compile it. The kernel enforces limits:
CPU time for each (a timer whose signal ends the process, also from inside one long call), memory, no files.

Messages both ways are framed as `system.framing` says. First `Setup` in msgpack, then grammars; each answer is the reason
for refusing the grammar as text, empty if it is accepted.
"""

import signal
import sys

import msgspec

from slipstream.grammar.matcher import Maker, Vocabulary
from slipstream.system.framing import read_frame, write_frame
from slipstream.system.own_limits import limit_this_process

MEMORY_BYTES = 2 << 30  # bytes of address space, the vocabulary's index included


class Setup(msgspec.Struct, array_like=True):
    seconds: float  # of CPU time, for one grammar
    tokens: list[bytes]
    special_ids: list[int]
    end_ids: list[int]


def _read() -> bytes | None:
    return read_frame(sys.stdin.buffer)


def _write(answer: str) -> None:
    write_frame(sys.stdout.buffer, answer.encode())


def main() -> None:
    limit_this_process(MEMORY_BYTES)
    first = _read()
    if first is None:
        return
    setup = msgspec.msgpack.decode(first, type=Setup)
    make, refusal = None, ""
    try:
        make = Maker(Vocabulary(setup.tokens, setup.special_ids, setup.end_ids, len(setup.tokens)))
    except ValueError as e:
        refusal = str(e)
    _write("")
    while (grammar := _read()) is not None:
        answer = refusal
        if make is not None:
            signal.setitimer(signal.ITIMER_PROF, setup.seconds)
            try:
                make(grammar)
            except ValueError as e:
                answer = str(e) or "it cannot be compiled"
            signal.setitimer(signal.ITIMER_PROF, 0)
        _write(answer)


if __name__ == "__main__":
    main()
