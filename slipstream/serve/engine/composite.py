"""A composite model in a front end: its conductor, its groups' sockets, and the language model as a component."""

import asyncio
import logging
import socket
import time
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING, Any

import msgspec

from slipstream.errors import BadRequest, Overloaded, SlipstreamError
from slipstream.graph.conductor import Conductor, Run
from slipstream.graph.groups import LocalGroup, ProcessGroup, TaskGroup
from slipstream.graph.launch import FrontGraph
from slipstream.graph.placement import resolve
from slipstream.graph.work import Work
from slipstream.graph.worker import FRONT, build_steps
from slipstream.serve.engine.generation import Generation
from slipstream.serve.errors import Failed
from slipstream.serve.openai.bodies import ChatBody
from slipstream.serve.openai.chat import plan_chat
from slipstream.serve.openai.read_writer import gather
from slipstream.serve.openai.writers import usage
from slipstream.serve.text.calls import Part
from slipstream.serve.text.choice import Choice
from slipstream.serve.text.prompts import prepare
from slipstream.system.framing import BadFrame
from slipstream.transport.arena import Arena

if TYPE_CHECKING:
    from slipstream.serve.front import Front

log = logging.getLogger("slipstream.serve")

MAX_RUNS = 64  # running requests; further ones get 429


class Composite:
    """Created if the supervisor's hello carries a graph. Runs on the event loop's thread only."""

    def __init__(self, front: "Front", graph: str, arena: int):
        config = msgspec.json.decode(graph, type=FrontGraph)
        self.front = front
        self.model = model = resolve(config.model)
        self.arena = Arena(arena, FRONT)
        functions = tuple(c.name for c in model.components if c.role == "function")
        local = LocalGroup(Work(model, functions, build_steps(model, functions, config.settings)))
        self.workers = {i: ProcessGroup(components, i, self.arena) for i, components in config.workers.items()}
        language = next(c.name for c in model.components if c.role == "language_model")
        groups = [local, *self.workers.values(), TaskGroup(model, language, self._think)]
        self.conductor = Conductor(model, groups, self.arena, front.engine_config.step_timeout)
        self._tasks: set[asyncio.Task] = set()

    def attach(self, group: int, sock: socket.socket, on_lost: Callable[[], None]) -> None:
        """Connects to a worker group that is ready, by its stream `sock`. `on_lost` is called when the stream has ended."""
        task = asyncio.get_running_loop().create_task(self._serve(group, sock, on_lost))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, group: int, sock: socket.socket, on_lost: Callable[[], None]) -> None:
        try:
            why = await self.workers[group].serve(sock)
        except (BadFrame, msgspec.MsgspecError) as e:
            why = f"it sent bytes that are not a message: {e}"
        log.error("the link to %s was lost: %s", ", ".join(self.workers[group].components), why)
        on_lost()

    def unhealthy(self) -> str | None:
        down = [c for g in self.workers.values() if not g.up for c in g.components]
        return f"starting: component {down[0]} is not ready" if down else None

    def open(self, walk: str, wanted, given, params: dict[str, Any]) -> "Call":
        """Begins a request. It counts as an open one of the front end until it is closed."""
        if self.front.engine.draining:
            self.front.engine.check_ready()
        if len(self.conductor.runs) >= MAX_RUNS:
            raise Overloaded(f"{MAX_RUNS} audio requests are running, which is the limit; try again later")
        return Call(self.front, self.conductor.open(walk, wanted, given, params))

    async def _think(self, params: dict[str, Any], messages: list[dict]) -> AsyncIterator[tuple[str, Any]]:
        """The language model's part of a walk: text as it comes, then the finish reason."""
        front = self.front
        tokenizer, limits = front.ready_tokenizer(), front.engine.check_ready()
        body = msgspec.convert({**params.get("body", {}), "messages": messages, "stream": True}, ChatBody)

        from slipstream.serve.openai.generate import requests_of

        plan, (prompt,) = await prepare(None, lambda: plan_chat(body, front.dialect, tokenizer, limits))
        if plan.structure is not None and front.grammars is not None:
            await front.grammars.check(plan.structure)
        generation = Generation(front.engine)
        ((_, request),) = requests_of(front, plan, [prompt])
        born = time.monotonic()
        answer = Choice(0, prompt, request, plan, tokenizer, front.engine, front.metrics, generation.notify, born)
        parts: list[Part] = []
        try:
            generation.start([answer], _never)
            while await generation.changed():
                piece = answer.take()
                parts += piece.parts
                if text := piece.text or "".join(part.text for part in piece.parts if part.kind == "content"):
                    yield "text", text
            yield "finish", {"reason": answer.finish_reason, "usage": usage([answer], 1), "calls": gather(parts).calls}
        except Failed as e:
            failure = e.failure
            if failure.status < 500:
                raise BadRequest(failure.message, failure.param, failure.status) from None
            raise SlipstreamError(failure.message) from None
        finally:
            generation.close()


async def _never() -> dict:
    await asyncio.get_running_loop().create_future()
    raise AssertionError


class Call:
    """One HTTP request's run."""

    def __init__(self, front: "Front", run: Run):
        self.front = front
        self.run = run
        self.gone = False
        self._tasks: list[asyncio.Task] = []

    async def __aenter__(self) -> "Call":
        return self

    async def __aexit__(self, *_) -> None:
        self.close()

    def watch(self, receive, cut=None) -> None:
        """Ends the run when the client disconnects; `cut` drops its connection."""
        self.front.open[self] = cut  # type: ignore[index]
        self._tasks.append(asyncio.get_running_loop().create_task(self._watch(receive)))

    async def _watch(self, receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self.leave()

    def leave(self) -> None:
        self.gone = True
        self.run.abort()

    async def write(self, send, data: bytes, more: bool) -> None:
        """Writes a part of the body."""
        await send({"type": "http.response.body", "body": data, "more_body": more})

    def feed(self, port: str, value: Any) -> None:
        """Writes a whole input from a task of its own, since it may wait for room."""

        async def give() -> None:
            try:
                await self.run.feed(port, value, True)
            except SlipstreamError:
                pass  # the task that iterates the run gets the error

        self._tasks.append(asyncio.get_running_loop().create_task(give()))

    def close(self) -> None:
        """Idempotent; ends the run if it has not ended."""
        for task in self._tasks:
            task.cancel()
        self.run.abort()
        self.front.open.pop(self, None)  # type: ignore[call-overload]
