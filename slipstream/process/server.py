"""A server from socket to exit: listens, starts groups and front ends under one supervisor, and says where it is.

Runs in the supervisor's process: imports neither PyTorch nor the HTTP stack.
"""

import contextlib
import dataclasses
import os
import pathlib
import signal
import socket
from typing import NamedTuple

from slipstream import config
from slipstream.errors import ConfigError
from slipstream.process.board import Board
from slipstream.process.group import Spec
from slipstream.process.protocol import Hello
from slipstream.process.supervisor import Supervisor

EXAMPLE = "Name the capital of France."  # its greedy answer has a clear margin at every token (tests/models/test_examples.py)


class Others(NamedTuple):
    """The groups of a composite model besides its language model's (`graph.launch`), and what front ends need for them."""

    specs: list[Spec]  # of one rank each; their place on the board is given here
    graph: str
    descriptors: list[int]


def serve(
    engine: config.EngineConfig, server: config.ServerConfig, model_path: str, others: Others | None = None, encoder: str = ""
) -> int:
    """Runs a server until SIGTERM or SIGINT; returns the exit code. `encoder`: as in `Hello`."""
    others = others or Others([], "", [])
    sock = listen(server)
    size = engine.tensor_parallel_size
    board = Board.create(size + len(others.specs))
    specs = [first_spec(engine, model_path, encoder)]
    specs += [dataclasses.replace(spec, first_block=size + i) for i, spec in enumerate(others.specs)]
    supervisor = Supervisor(specs, board, engine.step_timeout)
    supervisor.drain_timeout = server.drain_timeout
    supervisor.on_ready = lambda: announce(engine, server, sock, encoder)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: supervisor.stop())
    add_fronts(supervisor, engine, server, model_path, others, encoder, [sock.fileno(), board.fd, *others.descriptors])
    code = supervisor.run()
    if server.uds is not None:
        pathlib.Path(server.uds).unlink(missing_ok=True)
    return code


def first_spec(engine: config.EngineConfig, model_path: str, encoder: str) -> Spec:
    """The ranks of a language model, or the one process of an encoder."""
    if encoder:
        return Spec(0, engine, model_path, 1, 0, "slipstream.embed.worker", encoder)
    return Spec(0, engine, model_path, engine.tensor_parallel_size, 0)


def listen(server: config.ServerConfig) -> socket.socket:
    """Binds before anything is loaded, so that a port in use is reported at once. Raises ConfigError if it cannot."""
    if server.uds is not None:
        if is_stale_socket(server.uds):
            pathlib.Path(server.uds).unlink(missing_ok=True)
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        address: str | tuple[str, int] = server.uds
    else:
        family = socket.AF_INET6 if ":" in server.host else socket.AF_INET
        sock = socket.socket(family, socket.SOCK_STREAM)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        address = (server.host, server.port)
    try:
        sock.bind(address)
        sock.listen(2048)
    except OSError as e:
        where = server.uds or f"{server.host}:{server.port}"
        raise ConfigError(f"cannot listen on {where}: {e.strerror}; another --port or --uds may be free") from None
    return sock


def is_stale_socket(path: str) -> bool:
    """Whether `path` is a socket without a listener."""
    if not pathlib.Path(path).is_socket():
        return False
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(path)
        except OSError:
            return True
    return False


def add_fronts(
    supervisor: Supervisor,
    engine: config.EngineConfig,
    server: config.ServerConfig,
    model_path: str,
    others: Others,
    encoder: str,
    descriptors: list[int],
) -> None:
    """Starts `--api-server-count` front ends. They accept on one socket and share the state of one server."""
    count = server.api_server_count
    if count > 1 and others.graph:
        raise ConfigError("--api-server-count: a model of several components has one front end")
    shared = [os.memfd_create(name, os.MFD_CLOEXEC) for name in ("slipstream-tally", "slipstream-shelf") if count > 1]
    for i in range(count):
        hello = Hello(config.to_json(engine), config.to_json(server), model_path, others.graph, encoder, i, count)
        supervisor.add_front("slipstream.serve.main", hello, [*descriptors, *shared])
    for fd in shared:
        os.close(fd)


def announce(engine: config.EngineConfig, server: config.ServerConfig, sock: socket.socket, encoder: str) -> None:
    """Says where the server is, with a line that can be pasted."""
    if server.uds is not None:
        where, curl = server.uds, f"--unix-socket {server.uds} http://localhost"
    else:
        host, port = sock.getsockname()[:2]
        host = f"[{host}]" if ":" in host else host
        where = curl = f"http://{host}:{port}"
    key = ' -H "Authorization: Bearer $KEY"' if server.api_key else ""
    name = config.served_names(engine, server)[0]
    message = f'{{"role": "user", "content": "{EXAMPLE}"}}'
    path, more = "chat/completions", f'"messages": [{message}], "temperature": 0, "max_tokens": 64'
    if encoder:
        path, more = "rerank", f'"query": "{EXAMPLE}", "documents": ["Paris is the capital of France.", "Rome is in Italy."]'
    body = f'{{"model": "{name}", {more}}}'
    json = "-H 'Content-Type: application/json'"
    with contextlib.suppress(OSError):  # stdout is closed; the server goes on
        print(f"slipstream: ready on {where}\n\n  curl {curl}/v1/{path}{key} {json} -d '{body}'\n", flush=True)
