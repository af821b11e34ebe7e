"""Whatever a client sends or asks for, the loop of the front end goes on: others' streams and /health do not wait for it."""

import asyncio
import asyncio.events
import base64
import gc
import json
import pathlib
import threading
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from slipstream import config
from slipstream.components.speech import RATE
from slipstream.process.board import PHASE_ID, RING_SPANS, Board
from slipstream.serve.audio.chat import _whole
from slipstream.serve.prepare_worker import Setup
from slipstream.serve.preparing import LargeBodies
from slipstream.tokenize.placeholder import PlaceholderTokenizer
from tests.helpers.server import TINY
from tests.serve.conftest import Running
from tests.serve.fake import Script, wait_for

HELD_SECONDS = 0.04  # of computing in one callback; 20 ms are meant, and a busy machine's caches double what it takes
CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
HI = [{"role": "user", "content": "hi"}]
# shared by all scripts: a collection of the test's process, which the loop waits for, walks each list
STREAM, ANSWER = [7] * 100_000, [7, 8, 9, 10] * 25_000


class Roomy(Running):
    """A front end that prepares large bodies as in production, before a model of a hundred thousand tokens."""

    def __init__(self):
        super().__init__(max_len=100_000, pages=1 << 20, attach=False, enable_debug=True)
        engine = config.EngineConfig(model="fake", device="sim")
        self.tokenizer = PlaceholderTokenizer.of_model(pathlib.Path(TINY))
        self.call(self.front.set_tokenizer, self.tokenizer)
        self.front.large = LargeBodies(Setup(config.to_json(engine), config.to_json(self.front.server_config), TINY))
        self.restart_leader()
        self.client.timeout = 60

    def script_for(self, request):
        if request.max_tokens > 100_000 - 100:
            return Script(STREAM, per_step=1)  # the other's stream
        return Script(ANSWER, per_step=1 if request.max_tokens <= 100 else 50)

    def close(self):
        super().close()
        self.front.large.close()


@pytest.fixture(scope="module")
def roomy():
    running = Roomy()
    gc.collect()
    gc.freeze()  # as in production, where what is loaded is not walked either
    yield running
    gc.unfreeze()
    running.close()


@pytest.fixture
def longest(roomy, monkeypatch):
    """A function that gives the longest time, in seconds of its thread's computing, that a callback has held the loop."""
    run, found = asyncio.events.Handle._run, [0.0]
    loop = roomy.call(threading.get_ident)

    def timed(self):
        begin = time.thread_time()
        run(self)
        if threading.get_ident() == loop:
            found[0] = max(found[0], time.thread_time() - begin)

    monkeypatch.setattr(asyncio.events.Handle, "_run", timed)
    return lambda: found[0]


class Other:
    """Another client's stream, which must go on."""

    def __init__(self, running: Running):
        self.count, self.stop = 0, threading.Event()
        self._running = running
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self):
        body = {"prompt": [1], "stream": True, "max_tokens": 99_990}
        with self._running.client.stream("POST", TEXT, json=body) as r:
            for _ in r.iter_lines():
                self.count += 1
                if self.stop.is_set():
                    return

    def __enter__(self):
        wait_for(lambda: self.count > 0)
        return self

    def __exit__(self, *_):
        self.stop.set()
        self._thread.join(30)


def words(count: int) -> str:
    return "word " * count


def tool(description: str) -> dict:
    return {"type": "function", "function": {"name": "f", "description": description}}


def called(arguments: str) -> list:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return [*HI, {"role": "assistant", "tool_calls": [call]}, {"role": "tool", "tool_call_id": "c", "content": "x"}]


INPUTS = {
    "text": (TEXT, lambda: {"prompt": words(3_000_000)}, 400),
    "escaped text": (TEXT, lambda: {"prompt": "\x01\n" * 3_000_000}, 400),
    "ids": (TEXT, lambda: {"prompt": [5] * 1_000_000}, 400),
    "ids that fit": (TEXT, lambda: {"prompt": [5] * 90_000, "max_tokens": 2}, 200),
    "echo with log probabilities": (TEXT, lambda: {"prompt": [5] * 30_000, "max_tokens": 2, "echo": True, "logprobs": 5}, 200),
    "message": (CHAT, lambda: {"messages": [{"role": "user", "content": words(3_000_000)}]}, 400),
    "tools": (CHAT, lambda: {"messages": HI, "tools": [tool(words(3_000_000))]}, 400),
    "arguments": (CHAT, lambda: {"messages": called(json.dumps({"a": words(3_000_000)}))}, 400),
    "template arguments": (
        CHAT,
        lambda: {"messages": HI, "max_tokens": 2, "chat_template_kwargs": {"a": ["x" * 10] * 2_000_000}},
        200,
    ),
    "logit_bias": (TEXT, lambda: {"prompt": "x", "logit_bias": {str(i): 1 for i in range(295_000)}}, 400),
    "logit_bias of the vocabulary": (
        TEXT,
        lambda: {"prompt": "x", "max_tokens": 2, "n": 64, "logit_bias": {str(i): 1 for i in range(512)}},
        200,
    ),
    "metadata": ("/v1/responses", lambda: {"input": "x", "metadata": {str(i): "" for i in range(700_000)}}, 400),
    "token strings": ("/tokenize", lambda: {"prompt": words(400_000), "return_token_strs": True}, 200),
    "ids to text": ("/detokenize", lambda: {"tokens": [5] * 1_000_000}, 200),
    "schema": (TEXT, lambda: {"prompt": "x", "structured_outputs": {"json": {"enum": [words(3_000_000)]}}}, 400),
    "text of another API": (
        "/v1/messages",
        lambda: {"max_tokens": 5, "messages": [{"role": "user", "content": words(3_000_000)}]},
        400,
    ),
    "many choices": (TEXT, lambda: {"prompt": "x", "n": 128, "max_tokens": 100, "logprobs": 5}, 200),
    "a long answer": (TEXT, lambda: {"prompt": "x", "n": 4, "max_tokens": 4000, "logprobs": 5}, 200),
    "a long answer in chat": (CHAT, lambda: {"messages": HI, "max_tokens": 10_000, "logprobs": True, "top_logprobs": 5}, 200),
}


@pytest.mark.parametrize("name", INPUTS)
def test_no_request_holds_the_loop(roomy, longest, name):
    path, body, status = INPUTS[name]
    data = json.dumps(body()).encode()
    with Other(roomy) as other:
        before = other.count
        answer = roomy.client.post(path, content=data, headers={"content-type": "application/json"})
        assert status is None or answer.status_code == status, answer.text[:300]
        assert answer.status_code < 500
        assert other.count > before and roomy.client.get("/health").status_code == 200
    assert longest() < HELD_SECONDS, f"{name}: {len(data)} bytes held the loop for {longest() * 1e3:.0f} ms"


def full_board() -> Board:
    """Of eight ranks, whose rings of spans are full."""
    board = Board.create(8)
    now = time.monotonic_ns()
    for rank in range(8):
        pen = board.writer(rank)
        pen.set("pid", 100 + rank)
        for i in range(RING_SPANS):
            pen.span(PHASE_ID["plan"], now + i, now + i + 1, i)
            pen.device_span(now + i, now + i + 1, i, 2)
    return board


def test_the_timeline_does_not_hold_the_loop(roomy, longest, monkeypatch):
    monkeypatch.setattr(roomy.front, "board", full_board())
    answer = roomy.client.get("/debug/timeline?seconds=600")
    assert len(answer.json()["traceEvents"]) == 8 * (3 + 2 * RING_SPANS)
    assert longest() < HELD_SECONDS, f"held the loop for {longest() * 1e3:.0f} ms"


def test_minutes_of_spoken_answer_do_not_hold_the_loop(roomy, longest):
    samples = [np.arange(RATE * 60, dtype=np.int16)] * 4

    class Spoken:
        gone = False

        async def __aenter__(self): ...

        async def __aexit__(self, *_): ...

        @property
        async def run(self):
            for piece in samples:
                yield SimpleNamespace(port="audio", value=piece)

    async def answer():
        call: Any = Spoken()
        sent = b"".join((await _whole(call, {"id": "chatcmpl-1"}, "pcm16"))._pieces)  # type: ignore[attr-defined]
        return sent

    sent = asyncio.run_coroutine_threadsafe(answer(), roomy.loop).result(60)
    held = longest()
    sound = base64.b64decode(json.loads(sent)["choices"][0]["message"]["audio"]["data"])
    assert sound == np.concatenate(samples).tobytes() and held < HELD_SECONDS, f"held the loop for {held * 1e3:.0f} ms"
