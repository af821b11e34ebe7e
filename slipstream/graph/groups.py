"""Groups as the conductor's `ComponentGroup`: functions in this process, a worker process, a coroutine.

One event loop, no torch.
"""

import asyncio
import socket
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import Any

import numpy as np

from slipstream.errors import BadRequest
from slipstream.graph.chunks import join
from slipstream.graph.conductor import ComponentGroup
from slipstream.graph.messages import (
    INLINE_BYTES,
    ROOM_WAIT_SECONDS,
    Abort,
    Done,
    Failed,
    Feed,
    Forget,
    Frames,
    FromGroup,
    Inspect,
    Open,
    Piece,
    Standing,
    Stop,
    Stored,
    ToGroup,
    encode,
    with_value,
)
from slipstream.graph.model import Edge, Model
from slipstream.graph.plan import WalkPlan, make_plan
from slipstream.graph.work import Work
from slipstream.transport.base import Transport, TransportError, TransportFull


class LocalGroup:
    """Components whose steps are quick, run between the events of this loop. Values are handed on without a copy."""

    peer = -1
    up = True

    def __init__(self, work: Work):
        self.work = work
        self.components = tuple(c.name for c in work.components)
        self.on_event: Callable[[ComponentGroup, FromGroup], None]
        self.on_up: Callable[[ComponentGroup], None]
        self.on_down: Callable[[ComponentGroup, str], None]
        self._pumping = False

    def send(self, message: ToGroup) -> None:
        if isinstance(message, Forget):
            return
        self.work.on(message)
        if not self._pumping:
            self._pumping = True
            asyncio.get_running_loop().call_soon(self._pump)

    def _pump(self) -> None:
        """Runs one step, then gives the loop a turn."""
        self._pumping = False
        taken = self.work.take()
        if taken:
            name, rows = taken
            self.work.settle(rows, self.work.run(name, rows))
            self._pumping = True
            asyncio.get_running_loop().call_soon(self._pump)
        effects, self.work.effects = self.work.effects, []
        for event in effects:
            self.on_event(self, event)


class ProcessGroup:
    """A worker process, reached by a stream socket. `transport` is this process's end of the shared transport."""

    def __init__(self, components: tuple[str, ...], peer: int, transport: Transport):
        self.components = components
        self.peer = peer
        self.up = False
        self.transport = transport
        self.on_event: Callable[[ComponentGroup, FromGroup], None]
        self.on_up: Callable[[ComponentGroup], None]
        self.on_down: Callable[[ComponentGroup, str], None]
        self._writer: asyncio.StreamWriter | None = None
        self._waiting: deque[Any] = deque()  # messages behind one for which the transport has no room
        self._since = 0.0  # when the first of them began to wait
        self._retry: asyncio.TimerHandle | None = None
        self._ending: dict[
            int, Failed
        ] = {}  # requests aborted because a value could not be sent: the message to answer instead of Done

    async def serve(self, sock: socket.socket) -> str:
        """Exchanges messages with the worker until it ends, and returns why it ended."""
        reader, self._writer = await asyncio.open_connection(sock=sock)
        self.up = True
        self.on_up(self)
        frames, reason = Frames(FromGroup), "its connection was closed"
        try:
            while data := await reader.read(1 << 18):
                for event in frames.feed(data):
                    self._event(event)
        except OSError as e:
            reason = str(e)
        finally:
            self._close(reason)
        return reason

    def _event(self, event: FromGroup) -> None:
        if isinstance(event, Done | Failed) and event.id in self._ending:
            event = self._ending.pop(event.id)
        self.on_event(self, event)

    def _close(self, reason: str) -> None:
        was_up, self.up = self.up, False
        if self._retry:
            self._retry.cancel()
            self._retry = None
        self._waiting.clear()
        self._ending.clear()
        if self._writer:
            self._writer.close()
            self._writer = None
        if was_up:
            self.on_down(self, reason)

    def send(self, message: ToGroup) -> None:
        if self._writer is None:
            return
        if not self._waiting:
            self._since = time.monotonic()
        self._waiting.append(message)
        if self._retry is None:
            self._flush()

    def _flush(self) -> None:
        self._retry = None
        while self._waiting and self._writer:
            message = self._waiting[0]
            try:
                message = self._store(message)
            except TransportFull as e:
                if time.monotonic() - self._since < ROOM_WAIT_SECONDS:
                    self._retry = asyncio.get_running_loop().call_later(0.005, self._flush)
                    return
                message = self._give_up(message, e)
            except TransportError as e:
                message = self._give_up(message, e)
            self._waiting.popleft()
            self._since = time.monotonic()
            self._writer.write(encode(message))

    def _give_up(self, message: Any, error: TransportError) -> Abort:
        self._ending[message.id] = Failed(message.id, self.components[0], str(error))
        return Abort(message.id)

    def _store(self, message: Any) -> Any:
        value = getattr(message, "value", None)
        if isinstance(value, np.ndarray) and value.nbytes > INLINE_BYTES:
            return with_value(message, Stored(self.transport.put([value], [self.peer])[0]))
        return message


Serve = Callable[[dict[str, Any], Any], AsyncIterator[tuple[str, Any]]]


class TaskGroup:
    """A component that is one async iterator per request: how a language model behind the log joins a walk.

    `serve(params, value)` gets the component's one whole input and yields (output, value); its end ends the outputs, and
    closing it ends the request at the model. Its pieces come at the model's pace, up to its length limit.
    """

    peer = -1

    def __init__(self, model: Model, component: str, serve: Serve):
        self.components = (component,)
        self.up = True
        self.on_event: Callable[[ComponentGroup, FromGroup], None]
        self.on_up: Callable[[ComponentGroup], None]
        self.on_down: Callable[[ComponentGroup, str], None]
        self._model, self._serve = model, serve
        self._requests: dict[int, tuple[WalkPlan, dict[str, Any]]] = {}
        self._tasks: dict[int, asyncio.Task] = {}

    def send(self, message: ToGroup) -> None:
        match message:
            case Open(id=id):
                self._requests[id] = (make_plan(self._model, message.walk, message.wanted), message.params)
            case Feed(id=id) if message.last and id in self._requests and id not in self._tasks:
                value = "" if message.value is None else message.value
                self._tasks[id] = asyncio.get_running_loop().create_task(self._run(id, value))
            case Inspect(id=id) if id in self._requests:
                moves = id in self._tasks
                self.on_event(self, Standing(id, moves, {} if moves else {self.components[0]: "waits for its input"}))
            case Abort(id=id) | Stop(id=id) if id in self._requests:
                if task := self._tasks.pop(id, None):
                    task.cancel()
                self._finish(id, isinstance(message, Stop))

    async def _run(self, id: int, value: Any) -> None:
        plan, params = self._requests[id]
        failure = None
        stream = self._serve(params, value)
        try:
            gathered: dict[int, list[Any]] = {}
            async for port, piece in stream:
                for i in self._links(plan, port):
                    if isinstance(plan.link(i), Edge):
                        gathered.setdefault(i, []).append(piece)
                    elif id in self._tasks:
                        self._piece(id, i, piece, False)
            for i, pieces in gathered.items():
                if id in self._tasks:
                    self._piece(id, i, join(pieces), False)
        except BadRequest as e:
            failure = Failed(id, self.components[0], str(e), 400, e.param)
        except Exception as e:
            failure = Failed(id, self.components[0], str(e) or type(e).__name__)
        finally:
            await stream.aclose()  # type: ignore[attr-defined]
        if self._tasks.pop(id, None) is None:
            return
        if failure:
            del self._requests[id]
            self.on_event(self, failure)
        else:
            self._finish(id, True)

    def _piece(self, id: int, i: int, value: Any, last: bool) -> None:
        plan, _ = self._requests[id]
        self.on_event(self, Piece(id, i, value, last, plan.link(i).target.split(".")[0]))

    def _links(self, plan: WalkPlan, port: str) -> list[int]:
        return [i for i in plan.links if plan.link(i).source == f"{self.components[0]}.{port}"]

    def _finish(self, id: int, ends: bool) -> None:
        plan, _ = self._requests.pop(id)
        for i in plan.links if ends else ():
            if plan.link(i).source.startswith(self.components[0] + "."):
                self.on_event(self, Piece(id, i, None, True, plan.link(i).target.split(".")[0]))
        self.on_event(self, Done(id))
