"""All choices of one HTTP request: submitted together, ended together when one fails or the client leaves."""

import asyncio
from collections.abc import Awaitable, Callable

from slipstream.serve.engine.engine import Engine
from slipstream.serve.errors import Failed, Failure
from slipstream.serve.text.choice import Choice


class Generation:
    """Runs on the event loop. `close` must be called in every case; it aborts the choices that have not ended."""

    def __init__(self, engine: Engine):
        self.answers: list[Choice] = []
        self.gone = False  # the client went away
        self.on_close: Callable[[list[Choice]], None] | None = None  # called once, when all have ended
        self._engine = engine
        self._ended: set[int] = set()
        self._dirty: dict[int, Choice] = {}
        self._waiter: asyncio.Future | None = None
        self._failure: Failure | None = None
        self._watch: asyncio.Task | None = None

    def start(self, answers: list[Choice], receive: Callable[[], Awaitable]) -> None:
        """Submits all answers' requests, or none. Raises Failed or Overloaded."""
        self._engine.check_ready()
        self.answers = answers
        self._watch = asyncio.create_task(self._watch_client(receive))
        n = answers[0].plan.n
        for at in range(0, len(answers), n):  # the choices of one prompt
            first, *others = answers[at : at + n]
            self._engine.submit(first.request, first, [(a.request, a) for a in others])

    async def _watch_client(self, receive: Callable[[], Awaitable]) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self.leave()

    def leave(self) -> None:
        """The client is gone: aborts at the engine at once."""
        self.gone = True
        for answer in self.answers:
            answer.abort()
        self._wake()

    def notify(self, answer: Choice) -> None:
        """Called when `answer` has news or has ended."""
        if answer.ended:
            self._ended.add(answer.index)
            if answer.failure is not None and self._failure is None:
                self._failure = answer.failure
        self._dirty[answer.index] = answer
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def changed(self) -> list[Choice]:
        """Waits for news; returns the answers that have some, in the order in which it came.

        Raises Failed once one of them has failed and its last news was returned. An empty list means the end: all
        have ended, or the client is gone.
        """
        while True:
            if self._dirty and not self.gone:
                news = list(self._dirty.values())
                self._dirty.clear()
                return news
            if self._failure is not None:
                raise Failed(self._failure)
            if len(self._ended) == len(self.answers) or self.gone:
                return []
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
            self._waiter = None

    async def begun(self) -> None:
        """Waits until the engine has admitted one of the answers; a refusal can be an HTTP status until then. Raises Failed."""
        while not self.gone and not any(a.admitted or a.ids or a.ended for a in self.answers):
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
            self._waiter = None
        if self._failure is not None:
            raise Failed(self._failure)

    async def done(self) -> None:
        """Waits for every answer's end. Raises Failed."""
        while await self.changed():
            pass

    def close(self) -> None:
        for answer in self.answers:
            answer.abort()
        if self.on_close is not None:
            self.on_close(self.answers)
            self.on_close = None
        if self._watch is not None:
            self._watch.cancel()
