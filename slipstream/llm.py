"""`slipstream.LLM`: the engine without HTTP, for programs on the same machine (`AsyncLLM` is in `async_llm.py`).

The ranks are child processes as under a server; the supervisor and the front end's event loop are threads of the caller.
Prompts and parameters pass through the same validation as HTTP bodies.
"""

import asyncio
import contextlib
import queue
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple, TypeVar

from slipstream.config import EngineConfig, ServerConfig, check
from slipstream.embed.kinds import encoder_spec
from slipstream.errors import BadRequest, ConfigError, EngineDown, Overloaded
from slipstream.outputs import (
    EmbeddingRequestOutput,
    RequestOutput,
    ScoringRequestOutput,
    embedding_output,
    request_output,
    scoring_output,
)
from slipstream.process.board import Board
from slipstream.process.protocol import Attach, Down, Lost
from slipstream.process.server import first_spec
from slipstream.process.supervisor import Supervisor
from slipstream.sampling_params import Params, SamplingParams, paired
from slipstream.serve.embed import local
from slipstream.serve.engine.generation import Generation
from slipstream.serve.errors import Failed
from slipstream.serve.front import Front
from slipstream.serve.openai.bodies import ChatBody, CompletionBody
from slipstream.serve.openai.generate import requests_of
from slipstream.serve.prepare_worker import tokenizer_of
from slipstream.serve.request_body import converted
from slipstream.serve.text.choice import Choice
from slipstream.serve.text.params import GenerationParams, make_plan
from slipstream.serve.text.prompts import Prompt, all_prompts, chat_prompt, prepare
from slipstream.weights.pull import resolve_model

T = TypeVar("T")
Prompts = str | Sequence[str | list[int]]
Texts = str | Sequence[str]
Conversation = list[dict[str, Any]]
Progress = Callable[[int], None]
PORTION = 64  # prompts whose answers are awaited together
PORTIONS = 16  # portions that run at a time: enough to fill the engine with a short queue


class Portion(NamedTuple):
    """Prompts that are submitted together, with the same parameters."""

    plan: GenerationParams
    prompts: list[Prompt]
    texts: list[str | None]


class Local:
    """An engine in child processes of this one."""

    def __init__(self, model: str = "smollm2-135m", **options: Any):
        """`options` are the fields of `EngineConfig`. Raises ConfigError or ModelError; returns when the model is ready."""
        unknown = sorted(set(options) - set(EngineConfig.__dataclass_fields__))
        if unknown:
            raise ConfigError(f"{unknown[0]}: is not an option of LLM; it has {', '.join(EngineConfig.__dataclass_fields__)}")
        self._config = EngineConfig(**{"model": model, **options})
        check(self._config)
        path = str(resolve_model(self._config.model, weights=self._config.load_format != "dummy"))
        encoder = encoder_spec(self._config, path)
        self._front = Front(self._config, ServerConfig(), encoder=encoder)
        self._front.set_tokenizer(tokenizer_of(self._config, path))
        self._loop = asyncio.new_event_loop()
        self._loop_thread = threading.Thread(target=self._loop.run_forever, name="slipstream-front", daemon=True)
        self._loop_thread.start()
        self._ready: Future[None] = Future()
        spec = first_spec(self._config, path, encoder.encoded() if encoder else "")
        board = Board.create(spec.size)
        self._supervisor = Supervisor([spec], board, self._config.step_timeout, self._on_attach, self._on_down)
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

    # --- the event loop's thread

    async def _generate(self, prompts: Prompts, params: Params, progress: Progress | None) -> list[RequestOutput]:
        return await self._answer(await prepare(None, lambda: self._completions(prompts, params)), progress)

    async def _chat(
        self, messages: Conversation | list[Conversation], params: Params, progress: Progress | None, options: dict[str, Any]
    ) -> list[RequestOutput]:
        several = [messages] if not messages or isinstance(messages[0], dict) else messages
        return await self._answer(await prepare(None, lambda: self._chats(several, params, options)), progress)  # type: ignore[arg-type]

    async def _answer(self, portions: list[Portion], progress: Progress | None) -> list[RequestOutput]:
        together = max((portion.plan.n * len(portion.prompts) for portion in portions), default=1)
        room = asyncio.Semaphore(max(1, min(PORTION * PORTIONS, self._config.max_queue) // together))

        async def run(portion: Portion) -> list[RequestOutput]:
            async with room:
                generation = self._begin(portion.plan, portion.prompts)
                try:
                    while news := await generation.changed():
                        if progress is not None and (ended := sum(a.ended for a in news)):
                            progress(ended)
                    n, answers = portion.plan.n, generation.answers
                    assert self._front.names is not None
                    return [
                        request_output(t, answers[i * n : i * n + n], self._front.names) for i, t in enumerate(portion.texts)
                    ]
                finally:
                    generation.close()

        tasks = [asyncio.create_task(run(portion)) for portion in portions]
        try:
            return [output for part in await asyncio.gather(*tasks) for output in part]
        finally:
            for task in tasks:
                task.cancel()

    async def _pieces(
        self, messages: Conversation, params: SamplingParams | None, options: dict[str, Any]
    ) -> AsyncIterator[str]:
        (portion,) = await prepare(None, lambda: self._chats([messages], params, options))
        if portion.plan.n > 1:
            raise BadRequest("n: must be 1 in a stream", "n")
        generation = self._begin(portion.plan, portion.prompts)
        try:
            while news := await generation.changed():
                for answer in news:
                    text = answer.take().text
                    if text:
                        yield text
        finally:
            generation.close()

    def _begin(self, plan: GenerationParams, prompts: list[Prompt]) -> Generation:
        front, tokenizer, now = self._front, self._front.ready_tokenizer(), time.monotonic()
        generation = Generation(front.engine)
        answers = [
            Choice(i, prompt, request, plan, tokenizer, front.engine, front.metrics, generation.notify, now)
            for i, (prompt, request) in enumerate(requests_of(front, plan, prompts))
        ]
        generation.start(answers, never)
        return generation

    # --- a thread for slow work

    def _completions(self, given: Prompts, params: Params) -> list[Portion]:
        prompts = [given] if isinstance(given, str) else list(given)
        if not prompts or isinstance(prompts[0], int):
            raise BadRequest("prompts: expected a text, a list of texts, or a list of token-id lists", "prompts")
        self._front.check_generates()
        limits, tokenizer = self._front.engine.check_ready(), self._front.ready_tokenizer()
        out = []
        for own, part in paired(prompts, params, "prompts"):
            body = converted({**own.of_completion(), "prompt": part}, CompletionBody)
            plan = make_plan(body, tokenizer)
            texts = [prompt if isinstance(prompt, str) else None for prompt in part]
            out += self._portions(plan, all_prompts(body, plan, tokenizer, limits), texts)
        return out

    def _chats(self, several: list[Conversation], params: Params, options: dict[str, Any]) -> list[Portion]:
        self._front.check_generates()
        limits, tokenizer = self._front.engine.check_ready(), self._front.ready_tokenizer()
        out = []
        for own, part in paired(several, params, "messages"):
            bodies = [converted({**own.of_chat(), **options, "messages": messages}, ChatBody) for messages in part]
            plan = make_plan(bodies[0], tokenizer)
            prompts = [chat_prompt(body, plan, tokenizer, limits) for body in bodies]
            out += self._portions(plan, prompts, [None] * len(prompts))
        return out

    def _portions(self, plan: GenerationParams, prompts: list[Prompt], texts: list[str | None]) -> list[Portion]:
        size = max(1, min(PORTION, self._config.max_queue) // plan.n)
        return [Portion(plan, prompts[at : at + size], texts[at : at + size]) for at in range(0, len(prompts), size)]

    # --- the caller's side

    def _submit(self, work: Coroutine[Any, Any, T]) -> "Future[T]":
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def close(self) -> None:
        """Ends the ranks. No process of the engine is left afterwards."""
        self._supervisor.stop()
        self._thread.join()
        if self._loop.is_running():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._loop_thread.join()
            self._loop.close()


class LLM(Local):
    """A model on this machine.

    >>> llm = LLM("smollm2-135m", dtype="float32")
    >>> llm.generate(["1, 2, 3,"], SamplingParams(max_tokens=8, temperature=0))[0].outputs[0].text

    Parameters are the same for all prompts of a call, or a list with one for each. Every call raises BadRequest naming
    the wrong argument, Overloaded when more wait than `max_queue`, and EngineDown when a rank is lost.
    """

    def generate(
        self, prompts: Prompts, sampling_params: Params = None, progress: Progress | None = None
    ) -> list[RequestOutput]:
        """Completes each prompt (a text, or token ids), as many at once as the engine takes, and returns them in order.

        `progress(k)` is called as answers end, from another thread.
        """
        return self._await(self._generate(prompts, sampling_params, progress))

    def chat(
        self,
        messages: Conversation | list[Conversation],
        sampling_params: Params = None,
        progress: Progress | None = None,
        **options: Any,
    ) -> list[RequestOutput]:
        """Answers a conversation, or each of several.

        options: `add_generation_prompt`, `continue_final_message` and `chat_template_kwargs`, as in chat completions.
        """
        return self._await(self._chat(messages, sampling_params, progress, checked(options)))

    def stream(self, messages: Conversation, sampling_params: SamplingParams | None = None, **options: Any) -> Iterator[str]:
        """Answers a conversation piece by piece. Closing the iterator ends the answer."""
        pieces: queue.SimpleQueue[str | BaseException | None] = queue.SimpleQueue()
        task = self._submit(relay(self._pieces(messages, sampling_params, checked(options)), pieces.put))
        try:
            while (piece := pieces.get()) is not None:
                if isinstance(piece, BaseException):
                    raise translated(piece)
                yield piece
        finally:
            task.cancel()

    def embed(self, texts: Prompts, dimensions: int | None = None) -> list[EmbeddingRequestOutput]:
        """The vector of each text (or list of token ids), with a model that embeds.

        dimensions: the first values only, with length 1 again.
        """
        return [embedding_output(*each) for each in self._await(local.embed(self._front, texts, dimensions, never))]

    def score(self, query: Texts, documents: Texts) -> list[ScoringRequestOutput]:
        """The score of each document with the query, or with its own of as many queries."""
        return [scoring_output(value) for value in self._await(local.score(self._front, query, documents, never))]

    def _await(self, work: Coroutine[Any, Any, T]) -> T:
        future = self._submit(work)
        try:
            return future.result()
        except BaseException as e:
            future.cancel()
            raise translated(e) from None

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


OPTIONS = ("add_generation_prompt", "continue_final_message", "chat_template_kwargs")


def checked(options: dict[str, Any]) -> dict[str, Any]:
    for name in options:
        if name not in OPTIONS:
            raise BadRequest(f"{name}: a chat has no such argument; it has {', '.join(OPTIONS)}", name)
    return options


async def relay(pieces: AsyncIterator[str], put: Callable[[str | BaseException | None], None]) -> None:
    """Hands over every piece, then None or the exception."""
    try:
        async for piece in pieces:
            put(piece)
        put(None)
    except BaseException as e:
        put(e)


def translated(e: BaseException) -> BaseException:
    """The front end's failures as the library's errors."""
    if isinstance(e, Failed):
        failure = e.failure
        if failure.status == 429:
            return Overloaded(failure.message)
        return BadRequest(failure.message, failure.param) if failure.status < 500 else EngineDown(failure.message)
    return e


async def never() -> dict[str, str]:
    """The connection of a client that never leaves."""
    with contextlib.suppress(asyncio.CancelledError):
        await asyncio.Event().wait()
    return {"type": "http.disconnect"}
