"""`slipstream.AsyncLLM`: the engine without HTTP, for programs with an event loop of their own."""

import asyncio
from collections.abc import AsyncIterator, Coroutine
from typing import Any, TypeVar

from slipstream.llm import Conversation, Local, Progress, Prompts, Texts, checked, never, relay, translated
from slipstream.outputs import (
    EmbeddingRequestOutput,
    RequestOutput,
    ScoringRequestOutput,
    embedding_output,
    scoring_output,
)
from slipstream.sampling_params import Params, SamplingParams
from slipstream.serve.embed import local
from slipstream.serve.errors import Failed

T = TypeVar("T")


class AsyncLLM(Local):
    """`LLM` with calls to await, any number at a time. A call that is cancelled ends its answers.

    >>> llm = await asyncio.to_thread(AsyncLLM, "smollm2-135m")  # loading takes seconds
    >>> outputs = await llm.generate("1, 2, 3,", SamplingParams(max_tokens=8))
    """

    async def generate(
        self, prompts: Prompts, sampling_params: Params = None, progress: Progress | None = None
    ) -> list[RequestOutput]:
        """As `LLM.generate`."""
        return await self._wait(self._generate(prompts, sampling_params, progress))

    async def chat(
        self,
        messages: Conversation | list[Conversation],
        sampling_params: Params = None,
        progress: Progress | None = None,
        **options: Any,
    ) -> list[RequestOutput]:
        """As `LLM.chat`."""
        return await self._wait(self._chat(messages, sampling_params, progress, checked(options)))

    async def stream(
        self, messages: Conversation, sampling_params: SamplingParams | None = None, **options: Any
    ) -> AsyncIterator[str]:
        """As `LLM.stream`."""
        loop, pieces = asyncio.get_running_loop(), asyncio.Queue()

        def put(piece: str | BaseException | None) -> None:
            loop.call_soon_threadsafe(pieces.put_nowait, piece)

        task = self._submit(relay(self._pieces(messages, sampling_params, checked(options)), put))
        try:
            while (piece := await pieces.get()) is not None:
                if isinstance(piece, BaseException):
                    raise translated(piece)
                yield piece
        finally:
            task.cancel()

    async def embed(self, texts: Prompts, dimensions: int | None = None) -> list[EmbeddingRequestOutput]:
        """As `LLM.embed`."""
        return [embedding_output(*each) for each in await self._wait(local.embed(self._front, texts, dimensions, never))]

    async def score(self, query: Texts, documents: Texts) -> list[ScoringRequestOutput]:
        """As `LLM.score`."""
        return [scoring_output(value) for value in await self._wait(local.score(self._front, query, documents, never))]

    async def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        try:
            return await asyncio.wrap_future(self._submit(work))
        except Failed as e:
            raise translated(e) from None

    async def __aenter__(self) -> "AsyncLLM":
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.to_thread(self.close)
