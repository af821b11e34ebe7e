"""A front end on a real socket, in a thread, with a scripted leader behind it."""

import asyncio
import contextlib
import socket
import threading

import httpx
import pytest

from slipstream.config import EngineConfig, ServerConfig
from slipstream.process.board import Board
from slipstream.process.protocol import Attach, Down
from slipstream.serve.front import Front
from slipstream.serve.main import make_server
from tests.serve.fake import EOS, FakeLeader, FakeTokenizer, Script


class Running:
    """One front end. `answer` is what its leader says next; `client` is an httpx client of it."""

    def __init__(self, board: Board | None = None, max_len: int = 512, pages: int = 100, attach: bool = True, **server):
        self.tokenizer = FakeTokenizer()
        self.front = Front(EngineConfig(model="fake"), ServerConfig(**server), board)
        self.front.set_tokenizer(self.tokenizer)
        self.script = Script([*b"hello", EOS])
        self.limits = (max_len, pages)
        self.incarnation = 0
        self.leader = self._new_leader()
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._main(attach)), daemon=True)
        self._thread.start()
        assert self._ready.wait(10)
        self.url = f"http://127.0.0.1:{self.port}"
        self.client = httpx.Client(base_url=self.url, timeout=20, trust_env=False)

    def script_for(self, request):
        return self.script(request) if callable(self.script) else self.script

    def _new_leader(self) -> FakeLeader:
        return FakeLeader(lambda request: self.script_for(request), settle=self._settle)

    def _settle(self) -> None:
        """Ten turns of the loop: reading, waking the answer, building its event and writing it take a turn each."""
        done = threading.Event()

        def turn(left: int) -> None:
            if left:
                self.loop.call_soon(turn, left - 1)
            else:
                done.set()

        with contextlib.suppress(RuntimeError):  # the loop is closed: there is nobody to wait for
            self.loop.call_soon_threadsafe(turn, 10)
            done.wait(5)

    async def _main(self, attach: bool) -> None:
        self.loop = asyncio.get_running_loop()
        self.server = make_server(self.front, self._ready.set)
        watch = asyncio.create_task(self.front.watch())
        if attach:
            await self._attach()
        await self.server.serve(sockets=[self.listener])
        watch.cancel()

    async def _attach(self) -> None:
        max_len, pages = self.limits
        await self.front.engine.attach(Attach(0, self.incarnation, pages, 8, max_len), self.leader.front_sock)

    def restart_leader(self) -> None:
        self.incarnation += 1
        self.leader = self._new_leader()
        asyncio.run_coroutine_threadsafe(self._attach(), self.loop).result(30)

    def call(self, fn, *args) -> None:
        """Runs fn on the front end's loop."""

        async def run():
            return fn(*args)

        return asyncio.run_coroutine_threadsafe(run(), self.loop).result(30)

    def down(self, reason: str) -> None:
        self.call(self.front.engine.down, Down(0, self.incarnation, reason, 3.0))

    def chat(self, content: str = "hi", **body):
        return self.client.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": content}], **body})

    def complete(self, prompt="hi", **body):
        return self.client.post("/v1/completions", json={"prompt": prompt, **body})

    def events(self, path: str, **body) -> list:
        """The parsed events of a stream; the last is "[DONE]" when it ended well."""
        import json

        out = []
        with self.client.stream("POST", path, json={**body, "stream": True}) as r:
            assert r.status_code == 200, r.read()
            for line in r.iter_lines():
                if line.startswith("data: "):
                    out.append("[DONE]" if line == "data: [DONE]" else json.loads(line[6:]))
        return out

    def close(self) -> None:
        self.client.close()
        self.server.should_exit = True
        self._thread.join(10)
        self.leader.kill()


@pytest.fixture(scope="session")
def shared():
    running = Running(enable_debug=True)
    yield running
    running.close()


@pytest.fixture
def front(shared):
    """A front end that tests share one after the other; its script is reset."""
    shared.script = Script([*b"hello", EOS])
    shared.leader.requests.clear()
    shared.leader.aborts.clear()
    shared.leader.hold.clear()
    yield shared
    shared.leader.hold.clear()


@pytest.fixture(scope="session")
def shared_roomy():
    running = Running(max_len=8192)
    yield running
    running.close()


@pytest.fixture
def roomy(shared_roomy):
    """The same with room for the description of tools, of which each byte is a token here."""
    shared_roomy.script = Script([*b"hello", EOS])
    shared_roomy.leader.requests.clear()
    shared_roomy.leader.aborts.clear()
    yield shared_roomy


@pytest.fixture
def own_front():
    """A function that starts a front end of the test's own, with its own settings."""
    made = []

    def start(**settings) -> Running:
        made.append(Running(**settings))
        return made[-1]

    yield start
    for running in made:
        running.close()
