"""`slipstream.LLM`: the engine without HTTP, for programs on the same machine.

The ranks are child processes as under a server; the supervisor and the front end's event loop are threads of the caller.
Prompts and parameters pass through the same validation as HTTP bodies.
"""

import asyncio
import contextlib
import queue
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import msgspec

from slipstream.config import EngineConfig, ServerConfig, check
from slipstream.errors import BadRequest, ConfigError, EngineDown
from slipstream.process.board import Board
from slipstream.process.group import Spec
from slipstream.process.protocol import Attach, Down, Lost
from slipstream.process.supervisor import Supervisor
from slipstream.serve.engine.generation import Generation
from slipstream.serve.errors import Failed
from slipstream.serve.front import Front
from slipstream.serve.openai.bodies import ChatBody, CompletionBody
from slipstream.serve.openai.generate import requests_of
from slipstream.serve.request_body import decode
from slipstream.serve.text.choice import Choice
from slipstream.serve.text.params import GenerationParams, make_plan
from slipstream.serve.text.prompts import Prompt, all_prompts, chat_prompt
from slipstream.tokenize.tokenizer import load_tokenizer
from slipstream.weights.pull import resolve_model

Prompts = list[str] | list[list[int]]
UNSHOWN = ("logprobs", "top_logprobs", "prompt_logprobs", "echo", "return_token_ids", "stream", "stream_options")
PORTION = 64  # prompts whose answers are awaited together
PORTIONS = 16  # as many portions run at a time: enough to fill the engine, and a queue stays short


@dataclass(frozen=True)
class Output:
    """One finished answer."""

    text: str
    token_ids: list[int]
    finish_reason: str  # "stop" or "length"
    prompt_tokens: int
    cached_tokens: int


class LLM:
    """A model on this machine.

    >>> llm = LLM("smollm2-135m", dtype="float32")
    >>> llm.generate(["1, 2, 3,"], {"max_tokens": 8, "temperature": 0})[0].text

    `params` are the API's names and values (`temperature`, `max_tokens`, `stop`, ...), the same for all prompts of a call.
    """

    def __init__(self, model: str = "smollm2-135m", **options: Any):
        """`options` are the fields of `EngineConfig`. Raises ConfigError or ModelError; returns when the model is ready."""
        unknown = sorted(set(options) - set(EngineConfig.__dataclass_fields__))
        if unknown:
            raise ConfigError(f"{unknown[0]}: LLM has no such option; it has {', '.join(EngineConfig.__dataclass_fields__)}")
        self._config = EngineConfig(**{"model": model, **options})
        check(self._config)
        path = str(resolve_model(self._config.model, weights=self._config.load_format != "dummy"))
        self._front = Front(self._config, ServerConfig())
        invented = self._config.device == "sim" or self._config.load_format == "dummy"
        tokenizer = load_tokenizer(path, self._config.tokenizer, self._config.chat_template, placeholder=invented)
        self._front.set_tokenizer(tokenizer)
        self._loop = asyncio.new_event_loop()
        self._loop_thread = threading.Thread(target=self._loop.run_forever, name="slipstream-front", daemon=True)
        self._loop_thread.start()
        self._ready: Future[None] = Future()
        size = self._config.tensor_parallel_size
        board = Board.create(size)
        self._supervisor = Supervisor(
            [Spec(0, self._config, path, size, 0)], board, self._config.step_timeout, self._on_attach, self._on_down
        )
        self._thread = threading.Thread(target=self._supervise, name="slipstream-supervisor", daemon=True)
        self._thread.start()
        try:
            self._ready.result()
        except BaseException:
            self.close()
            raise

    # --- the supervisor's thread

    def _supervise(self) -> None:
        self._supervisor.run()
        if not self._ready.done():
            reason = self._supervisor.groups[0].failure or "the engine has ended"
            self._ready.set_exception(ConfigError(reason) if self._supervisor.groups[0].refused else EngineDown(reason))

    def _on_attach(self, message: Attach, sock: socket.socket) -> None:
        async def attach() -> None:
            self._front.engine.on_lost = lambda incarnation: self._supervisor.reattach(Lost(0, incarnation))
            await self._front.engine.attach(message, sock)
            if not self._ready.done():
                self._ready.set_result(None)

        asyncio.run_coroutine_threadsafe(attach(), self._loop)

    def _on_down(self, message: Down) -> None:
        self._loop.call_soon_threadsafe(self._front.engine.down, message)

    # --- the caller's side

    def generate(
        self, prompts: Prompts, params: dict[str, Any] | None = None, progress: Callable[[int], None] | None = None
    ) -> list[Output]:
        """Completes each prompt (a text, or token ids), as many at once as the engine takes, and returns the answers in order.

        `progress(1)` is called as each prompt ends. Raises BadRequest naming the parameter, EngineDown when a rank is lost.
        """
        if isinstance(prompts, str) or not prompts:
            raise BadRequest("prompts: expected a list of texts or of token-id lists", "prompts")
        body = self._body(CompletionBody, {"prompt": list(prompts)}, params)
        return self._await(self._generate(body, progress or (lambda count: None)))

    async def _generate(self, body: CompletionBody, progress: Callable[[int], None]) -> list[Output]:
        plan, prompts = self._plan(body)
        size = max(1, min(PORTION, self._config.max_queue) // plan.n)
        room = asyncio.Semaphore(max(1, min(PORTIONS, self._config.max_queue // (size * plan.n))))

        async def portion(at: int) -> list[Output]:
            async with room:
                generation = self._begin(plan, prompts[at : at + size])
                try:
                    while news := await generation.changed():
                        progress(sum(a.ended for a in news))
                    return [self._output(a) for a in generation.answers]
                finally:
                    generation.close()

        tasks = [asyncio.create_task(portion(at)) for at in range(0, len(prompts), size)]
        try:
            return [output for part in await asyncio.gather(*tasks) for output in part]
        finally:
            for task in tasks:
                task.cancel()

    def chat(self, messages: list[dict[str, Any]], params: dict[str, Any] | None = None) -> Output:
        """Answers a conversation."""
        body = self._body(ChatBody, {"messages": messages}, params)

        async def run() -> Output:
            generation = self._begin(*self._plan(body))
            try:
                await generation.done()
                return self._output(generation.answers[0])
            finally:
                generation.close()

        return self._await(run())

    def stream(self, messages: list[dict[str, Any]], params: dict[str, Any] | None = None) -> Iterator[str]:
        """Answers a conversation piece by piece. Closing the iterator ends the answer."""
        body = self._body(ChatBody, {"messages": messages}, params)
        pieces: queue.SimpleQueue[str | BaseException | None] = queue.SimpleQueue()

        async def run() -> None:
            try:
                async for piece in self._pieces(body):
                    pieces.put(piece)
                pieces.put(None)
            except BaseException as e:
                pieces.put(e)

        task = asyncio.run_coroutine_threadsafe(run(), self._loop)
        try:
            while (piece := pieces.get()) is not None:
                if isinstance(piece, BaseException):
                    raise _translated(piece)
                yield piece
        finally:
            task.cancel()

    def close(self) -> None:
        """Ends the ranks. Nothing of the engine is left afterwards."""
        self._supervisor.stop()
        self._thread.join()
        if self._loop.is_running():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._loop_thread.join()
            self._loop.close()

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- inside

    def _body(self, schema: type, given: dict[str, Any], params: dict[str, Any] | None) -> Any:
        for name in UNSHOWN:
            if params and params.get(name):
                raise BadRequest(f"{name}: not here, since an Output would not show it; the HTTP server has it", name)
        body = decode(msgspec.json.encode({**(params or {}), **given}), schema)
        if schema is ChatBody and (body.n or 1) > 1:
            raise BadRequest("n: a conversation gets one answer here; the HTTP server gives several", "n")
        return body

    def _plan(self, body: ChatBody | CompletionBody) -> tuple[GenerationParams, list[Prompt]]:
        limits, tokenizer = self._front.engine.check_ready(), self._front.ready_tokenizer()
        plan = make_plan(body, tokenizer)
        if isinstance(body, ChatBody):
            return plan, [chat_prompt(body, plan, tokenizer, limits)]
        return plan, all_prompts(body, plan, tokenizer, limits)

    def _begin(self, plan: GenerationParams, prompts: list[Prompt]) -> Generation:
        front, tokenizer, now = self._front, self._front.ready_tokenizer(), time.monotonic()
        generation = Generation(front.engine)
        answers = [
            Choice(i, prompt, request, plan, tokenizer, front.engine, front.metrics, generation.notify, now)
            for i, (prompt, request) in enumerate(requests_of(front, plan, prompts))
        ]
        generation.start(answers, _never)
        return generation

    async def _pieces(self, body: ChatBody) -> AsyncIterator[str]:
        generation = self._begin(*self._plan(body))
        try:
            while news := await generation.changed():
                for answer in news:
                    text = answer.take().text
                    if text:
                        yield text
        finally:
            generation.close()

    def _output(self, answer: Choice) -> Output:
        assert answer.finish_reason is not None
        return Output(answer.take().text, answer.ids, answer.finish_reason, len(answer.prompt.ids), answer.cached_tokens)

    def _await(self, work: Any) -> Any:
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException as e:
            future.cancel()
            raise _translated(e) from None


def _translated(e: BaseException) -> BaseException:
    """The front end's failures as the library's errors."""
    if isinstance(e, Failed):
        failure = e.failure
        return BadRequest(failure.message, failure.param) if failure.status < 500 else EngineDown(failure.message)
    return e


async def _never() -> dict[str, str]:
    """Of a client that never leaves."""
    with contextlib.suppress(asyncio.CancelledError):
        await asyncio.Event().wait()
    return {"type": "http.disconnect"}
