"""The process that prepares requests with large bodies: `python -m slipstream.serve.prepare_worker`, started by `preparing.py`.

Decoding a body, filling a template and tokenizing keep an interpreter busy in proportion to the input's length. Here no
other request waits for them. The kernel enforces limits: CPU time for each body, memory, no files.

Messages both ways are framed as `system.framing` says: first `Setup`, then for each job `Asked`, the body and the earlier
conversation; answers are `Answered`.
"""

import signal
import sys

import msgspec

from slipstream import config
from slipstream.errors import BadRequest
from slipstream.serve.errors import Failed
from slipstream.serve.jobs import Answered, Asked, Desk, encode_answer, run
from slipstream.serve.text.dialect import detect
from slipstream.serve.text.logprobs import TokenNames
from slipstream.system.framing import read_frame, write_frame
from slipstream.system.own_limits import limit_this_process
from slipstream.tokenize.tokenizer import load_tokenizer

MEMORY_BYTES = 6 << 30  # bytes of address space, the tokenizer included
SECONDS = 30.0  # of CPU time, for one body


class Setup(msgspec.Struct):
    """The configuration that the front end's own tokenizer was made from."""

    engine: str  # EngineConfig as JSON
    server: str  # ServerConfig as JSON
    model_path: str


def open_desk(setup: Setup) -> Desk:
    """A tokenizer with its template. Raises ModelError."""
    engine = config.from_json(config.EngineConfig, setup.engine)
    server = config.from_json(config.ServerConfig, setup.server)
    tokenizer = tokenizer_of(engine, setup.model_path)
    return Desk(config.served_names(engine, server), tokenizer, TokenNames(tokenizer), detect(tokenizer, server), None)


def tokenizer_of(engine: config.EngineConfig, model_path: str):
    """The tokenizer that a front end has for this configuration. Raises ModelError."""
    invented = engine.device == "sim" or engine.load_format == "dummy"
    given = (engine.tokenizer, engine.chat_template)
    return load_tokenizer(model_path, *given, placeholder=invented, special_tokens_in_content=engine.special_tokens_in_content)


def answer(asked: Asked, raw: bytes, earlier: bytes, desk: Desk) -> Answered:
    try:
        return Answered(run(asked.name, raw, desk._replace(limits=asked.limits), earlier))
    except BadRequest as e:
        return Answered(refused=(str(e), e.param, e.status))
    except Failed as e:
        return Answered(failed=e.failure)


def main() -> None:
    requests, answers = sys.stdin.buffer, sys.stdout.buffer
    setup = read_frame(requests)
    if setup is None:
        return
    limit_this_process(MEMORY_BYTES)
    desk = open_desk(msgspec.msgpack.decode(setup, type=Setup))
    write_frame(answers, b"")
    while (head := read_frame(requests)) is not None:
        raw, earlier = read_frame(requests), read_frame(requests)
        if raw is None or earlier is None:
            return
        signal.setitimer(signal.ITIMER_PROF, SECONDS)
        found = encode_answer(answer(msgspec.msgpack.decode(head, type=Asked), raw, earlier, desk))
        signal.setitimer(signal.ITIMER_PROF, 0)
        write_frame(answers, found)


if __name__ == "__main__":
    main()
