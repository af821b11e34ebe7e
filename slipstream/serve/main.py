"""The front end's process: `python -m slipstream.serve.main --control-fd N`, a child of the supervisor.

It listens at once and loads the tokenizer at the same time. It does not import PyTorch. SIGTERM and SIGINT are handled by the
supervisor, which sends `Drain`. The process ends with its parent.
"""

import argparse
import asyncio
import dataclasses
import gc
import logging
import os
import resource
import signal
import socket
import sys
import time
from contextlib import contextmanager
from functools import partial

import uvicorn

from slipstream import config
from slipstream.embed.kinds import EncoderSpec
from slipstream.errors import ConfigError, ModelError
from slipstream.process.board import Board
from slipstream.process.control import die_with_parent
from slipstream.process.protocol import Attach, Down, Drain, Listening, Lost
from slipstream.serve.app import build
from slipstream.serve.engine.control import Control
from slipstream.serve.errors import Failure
from slipstream.serve.front import Front
from slipstream.serve.http import Connection, connection_limit
from slipstream.serve.observe.logs import set_up
from slipstream.serve.observe.shared_counters import SharedCounters
from slipstream.serve.openai.response_store import ResponseStore
from slipstream.serve.prepare_worker import Setup, tokenizer_of
from slipstream.serve.preparing import LargeBodies

log = logging.getLogger("slipstream.serve")

KEEP_ALIVE_SECONDS = 75
BACKLOG = 2048
ACCEPTS = 4  # connections accepted in one turn of the loop; where descriptors run out, asyncio logs one failure for each
SWITCH_SECONDS = 0.0005  # how long the loop waits for a busy thread, each time it has let go of the interpreter
FLUSH_SECONDS = 2.0  # how long the last answers have to reach their clients


class Server(uvicorn.Server):
    """uvicorn without its signal handling; it logs a line when it listens."""

    def __init__(self, settings: uvicorn.Config, on_listening):
        super().__init__(settings)
        self._on_listening = on_listening

    @contextmanager
    def capture_signals(self):
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for sock in sockets or ():
            sock.listen(BACKLOG)
        self._on_listening()


def make_server(front: Front, on_listening=lambda: None) -> Server:
    """The HTTP server of `front`; run it with `await server.serve(sockets=[...])` and stop it with `should_exit`."""
    settings = uvicorn.Config(
        build(front),
        http=partial(Connection, limit=connection_limit()),  # type: ignore[arg-type]
        ws="websockets-sansio" if front.composite else "none",
        ws_max_size=1 << 20,
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        # asyncio accepts that many at a time: one if other front ends wait for connections too
        backlog=1 if front.server_config.api_server_count > 1 else ACCEPTS,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=int(FLUSH_SECONDS),
    )
    return Server(settings, on_listening)


class Process:
    """One front-end process from the hello to its exit."""

    def __init__(self, control: Control):
        self.control = control
        hello, (listen_fd, board_fd, *more) = control.hello()
        self.hello = hello
        engine_config = config.from_json(config.EngineConfig, hello.engine)
        server_config = config.from_json(config.ServerConfig, hello.server)
        set_up(server_config.log_level, server_config.log_format)
        self.listener = socket.socket(fileno=listen_fd)
        shared_counters, response_store = SharedCounters(), ResponseStore()
        if hello.fronts > 1:
            *more, tally_fd, shelf_fd = more
            shared_counters, response_store = SharedCounters(tally_fd, hello.front, hello.fronts), ResponseStore(shelf_fd)
        self.front = Front(
            engine_config,
            server_config,
            Board(board_fd),
            shared_counters=shared_counters,
            response_store=response_store,
            encoder=EncoderSpec.decoded(hello.encoder),
        )
        self.front.engine.on_lost = lambda incarnation: control.tell(Lost(0, incarnation))
        self._missing = 2  # the HTTP server and the tokenizer
        if hello.graph:
            from slipstream.serve.engine.composite import Composite

            self.front.composite = Composite(self.front, hello.graph, more[0])
        self.server = make_server(self.front, self._one_is_up)
        self._tasks: list[asyncio.Task] = []

    async def run(self) -> None:
        self._tasks = [
            asyncio.create_task(t) for t in (self.control.serve(self.handle), self.front.watch(), self._load_tokenizer())
        ]
        for task in self._tasks:
            task.add_done_callback(_fatal)
        await self.server.serve(sockets=[self.listener])

    async def _load_tokenizer(self) -> None:
        c = self.front.engine_config

        self.front.set_tokenizer(await asyncio.to_thread(tokenizer_of, c, self.hello.model_path))
        without_key = config.to_json(dataclasses.replace(self.front.server_config, api_key=None))
        self.front.large = LargeBodies(Setup(self.hello.engine, without_key, self.hello.model_path))
        self._one_is_up()
        gc.freeze()  # loaded objects stay, so garbage collections need not walk them

    def _one_is_up(self) -> None:
        """Notifies the supervisor once requests can be answered; the supervisor then announces the server."""
        self._missing -= 1
        if not self._missing:
            self.control.tell(Listening())

    async def handle(self, message: object, fds: list[int]) -> None:
        engine = self.front.engine
        if isinstance(message, Attach):
            self.front.metrics.attached(message.group, message.incarnation)
        elif isinstance(message, Down):
            self.front.metrics.poisoned(message.group)
        if isinstance(message, Attach) and message.group:
            assert self.front.composite
            lost = Lost(message.group, message.incarnation)
            self.front.composite.attach(message.group, socket.socket(fileno=fds[0]), lambda: self.control.tell(lost))
        elif isinstance(message, Attach):
            await engine.attach(message, socket.socket(fileno=fds[0]))
        elif isinstance(message, Down) and not message.group:  # the end of a worker group is seen at its socket
            engine.down(message)
        elif isinstance(message, Drain):
            self._tasks.append(asyncio.create_task(self._drain(message.timeout)))

    async def _drain(self, timeout: float) -> None:
        """Lets running requests end, ends those that take too long, gives the answers time to leave, then stops."""
        front, end = self.front, time.monotonic() + timeout
        front.engine.drain()
        while (front.engine.live or front.open) and time.monotonic() < end:
            await asyncio.sleep(0.02)
        front.engine.fail_all(Failure(503, "the server is shutting down", code="shutting_down"))
        end = time.monotonic() + FLUSH_SECONDS
        while front.open and time.monotonic() < end:
            await asyncio.sleep(0.02)
        if front.telemetry is not None:
            await asyncio.to_thread(front.telemetry.flush)
        self.server.should_exit = True


def _fatal(task: asyncio.Task) -> None:
    """A front end that cannot go on logs the reason and exits; the supervisor decides what follows."""
    error = None if task.cancelled() else task.exception()
    if error is None:
        return
    if isinstance(error, (ConfigError, ModelError)):  # the user can fix it, and the message says how
        log.critical("the front end cannot go on: %s", error)
    else:
        log.critical("the front end cannot go on", exc_info=error)
    os._exit(1)


def main() -> None:
    parser = argparse.ArgumentParser(prog="slipstream.serve.main")
    parser.add_argument("--control-fd", type=int, required=True)
    args = parser.parse_args()
    die_with_parent(os.getppid())  # a supervisor that has already ended is seen at the control socket
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))  # every client is a descriptor
    sys.setswitchinterval(SWITCH_SECONDS)
    process = Process(Control(args.control_fd))
    asyncio.run(process.run())


if __name__ == "__main__":
    main()
