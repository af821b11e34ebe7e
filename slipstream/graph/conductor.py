"""Drives requests through their walks, in the front end's process. One event loop, no torch, no threads.

A group is reached through the small `ComponentGroup` interface below, whether it is a worker process, this process, or a
language model served by the log. The conductor forwards pieces and credit between groups, and holds the outputs that a client
has not read (bounded by the same credit). It ends every request exactly once: by its outputs' ends, by a failure that names a
component, or by an abort.
"""

import asyncio
import itertools
from collections import deque
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple, Protocol

from slipstream.errors import BadRequest, EngineDown, SlipstreamError
from slipstream.graph.chunks import join, size_of, units
from slipstream.graph.messages import (
    Abort,
    Done,
    Failed,
    Feed,
    Forget,
    FromGroup,
    Inspect,
    Open,
    Piece,
    Standing,
    Stop,
    Stored,
    ToGroup,
    Took,
)
from slipstream.graph.model import Edge, Model, Stream
from slipstream.graph.plan import WalkPlan, make_plan
from slipstream.graph.watch import StallWatch
from slipstream.graph.work import MAX_GATHERED_BYTES
from slipstream.transport.base import Transport

MAX_UNREAD = 1 << 16  # outputs of one request that wait for its client; only a producer without credit reaches this


class RequestFailed(SlipstreamError):
    """A component ended the request. `status` is 400 if the content is at fault; `param` names its parameter, if any."""

    def __init__(self, component: str, message: str, status: int = 500, param: str | None = None):
        super().__init__(f"{component}: {message}")
        self.component = component
        self.status = status
        self.param = param


class Output(NamedTuple):
    """An output for the client. `value` is None if the end came alone."""

    port: str
    value: Any
    last: bool


class ComponentGroup(Protocol):
    """One group, as the conductor sees it. `send` never blocks; the group calls the `on_` functions on the loop."""

    components: tuple[str, ...]
    peer: int  # its number in the transport, -1 for none
    up: bool
    on_event: Callable[["ComponentGroup", FromGroup], None]
    on_up: Callable[["ComponentGroup"], None]
    on_down: Callable[["ComponentGroup", str], None]

    def send(self, message: ToGroup) -> None: ...


class Run:
    """One running request. Iterate over it for its outputs; feed its inputs; stop or abort it."""

    def __init__(self, conductor: "Conductor", id: int, plan: WalkPlan, groups: Sequence[ComponentGroup]):
        self.id = id
        self.plan = plan
        self.failure: SlipstreamError | None = None
        self._conductor = conductor
        self._open = list(groups)  # groups that have not answered Done or Failed
        self._wanted = set(plan.wanted)  # outputs that have not ended
        self._queue: deque[tuple[int, Output]] = deque()
        self._wake = asyncio.Event()  # an output, a credit or the end
        self._credit = {
            i: link.window for i in plan.links if isinstance(link := plan.link(i), Stream) and link.source.startswith("in.")
        }
        self.watch = StallWatch(plan.given)
        self._gathered: dict[str, list[Any]] = {}
        self._sizes: dict[str, int] = {}
        self._ended = False  # no more outputs for the client

    def __aiter__(self) -> "Run":
        return self

    async def __anext__(self) -> Output:
        """The next output. Raises RequestFailed or EngineDown if the request failed, after the outputs that came before."""
        while not self._queue:
            if self.failure:
                raise self.failure
            if self._ended or not self._wanted:
                raise StopAsyncIteration
            self._wake.clear()
            await self._wake.wait()
        link, output = self._queue.popleft()
        self.watch.moved()
        if isinstance(self.plan.link(link), Stream) and output.value is not None:
            self._conductor.took(self, link, 1)
        return output

    async def feed(self, port: str, value: Any, last: bool = False) -> None:
        """Feeds a piece of an input; waits while a consumer has no credit left. Raises the error that ended the request."""
        if port not in self.plan.given:
            raise BadRequest(f"walk {self.plan.walk.name}: this request has no input {port}", port)
        for i in self.plan.links:
            link = self.plan.link(i)
            if link.source != f"in.{port}":
                continue
            if isinstance(link, Edge):
                self._gather(port, i, value, last)
                continue
            self.watch.blocked += 1
            try:
                while self._credit[i] < 1 and value is not None and not self._ended:
                    self._wake.clear()
                    await self._wake.wait()
            finally:
                self.watch.blocked -= 1
            if value is not None:
                self._credit[i] -= 1
            self._give(i, value, last)
        if last:
            self.watch.unfed.discard(port)
        if self.failure:
            raise self.failure

    def _gather(self, port: str, i: int, value: Any, last: bool) -> None:
        pieces = self._gathered.setdefault(port, [])
        if value is not None and units(value):
            pieces.append(value)
            self._sizes[port] = self._sizes.get(port, 0) + size_of(value)
        if self._sizes.get(port, 0) > MAX_GATHERED_BYTES:
            raise BadRequest(f"input {port} is larger than {MAX_GATHERED_BYTES} bytes", port, 413)
        if last:
            self._give(i, join(pieces) if pieces else None, True)

    def _give(self, i: int, value: Any, last: bool) -> None:
        group = self._conductor.group_of(self.plan.link(i).target)
        self.watch.moved()
        if group in self._open:
            group.send(Feed(self.id, i, value, last))

    def stop(self, component: str | None = None) -> None:
        """Ends one component (or all) early. Outputs made until then still come, and the outputs end normally."""
        for group in list(self._open):
            if component is None or component in group.components:
                group.send(Stop(self.id, component))

    def abort(self) -> None:
        """The client is gone. Idempotent; no more outputs come."""
        self._end()
        self._queue.clear()
        for group in list(self._open):
            group.send(Abort(self.id))

    def _end(self, failure: SlipstreamError | None = None) -> None:
        if not self._ended:
            self._ended = True
            self.failure = failure
        self._wake.set()

    def _output(self, i: int, piece: Output) -> None:
        if self._ended:
            return
        if piece.last:
            self._wanted.discard(piece.port)
        self._queue.append((i, piece))
        self._wake.set()


class Conductor:
    """All requests of one composite model. `transport` is this process's end, for values stored there.

    A request fails with the component's name if nothing in it has moved for `step_timeout` seconds and nothing can. A request
    that only waits for its turn, or for its client, does not fail.
    """

    def __init__(
        self, model: Model, groups: Sequence[ComponentGroup], transport: Transport | None = None, step_timeout: float = 30.0
    ):
        self.model = model
        self.step_timeout = step_timeout
        self._look: asyncio.TimerHandle | None = None
        self.groups = list(groups)
        self.transport = transport
        self.runs: dict[int, Run] = {}
        self._ids = itertools.count(1)
        self._group_of = {name: group for group in groups for name in group.components}
        for group in groups:
            group.on_event, group.on_up, group.on_down = self._event, self.forget, self._down

    def group_of(self, place: str) -> ComponentGroup:
        return self._group_of[place.split(".")[0]]

    def open(
        self,
        walk: str,
        wanted: Collection[str] | None = None,
        given: Collection[str] | None = None,
        params: dict[str, Any] | None = None,
    ) -> Run:
        """Begins a request. Raises BadRequest for a plan that could stall, EngineDown if a group of it is not ready."""
        plan = make_plan(self.model, walk, wanted, given)
        groups = [g for g in self.groups if any(c in plan.components for c in g.components)]
        for group in groups:
            if not group.up:
                raise EngineDown(f"component {next(c for c in group.components if c in plan.components)} is not ready")
        run = Run(self, next(self._ids), plan, groups)
        self.runs[run.id] = run
        for group in groups:
            group.send(Open(run.id, walk, plan.wanted, params or {}))
        if self._look is None:
            self._look_later()
        return run

    def _look_later(self) -> None:
        self._look = asyncio.get_running_loop().call_later(self.step_timeout / 4, self._look_for_stalls)

    def _look_for_stalls(self) -> None:
        for run in list(self.runs.values()):
            if not run._ended and not run._queue and run.watch.stands_since(self.step_timeout):
                for group in list(run._open):
                    group.send(Inspect(run.id))
        self._look = None
        if self.runs:
            self._look_later()

    def _stands(self, run: Run, group: ComponentGroup, standing: Standing) -> None:
        run.watch.answer(group, standing.moves, standing.waits)
        stall = run.watch.verdict(run._open, run.plan.components)
        if stall and not run._ended and not run._queue:
            component, why = stall
            message = f"the request has made no progress for {self.step_timeout:g} s (--step-timeout): {why}"
            self._fail(run, RequestFailed(component, message))

    def took(self, run: Run, i: int, count: int) -> None:
        """Gives credit to a link's producer."""
        source = run.plan.link(i).source
        if source.startswith("in."):
            run._credit[i] += count
            run._wake.set()
        elif (group := self.group_of(source)) in run._open:
            group.send(Took(run.id, i, count))

    def _event(self, group: ComponentGroup, event: FromGroup) -> None:
        run = self.runs.get(event.id)
        if run and not isinstance(event, Standing):
            run.watch.moved()
        match event:
            case Standing() if run:
                self._stands(run, group, event)
            case Piece():
                self._piece(run, event)
            case Took(link=link, count=count) if run:
                self.took(run, link, count)
            case Done() if run:
                self._answered(run, group)
            case Failed(component=component, message=message, status=status, param=param) if run:
                self._answered(run, group)
                self._fail(run, RequestFailed(component, message, status, param))

    def _piece(self, run: Run | None, piece: Piece) -> None:
        """Forwards a piece to its group, which also releases it if the request is gone there, or to the client."""
        assert run, "a group answers Done after its last piece"
        target, port = run.plan.link(piece.link).target.split(".")
        if target != "out":
            group = self._group_of[target]
            value = self._fetch(piece.value) if group.peer < 0 else piece.value
            group.send(Feed(run.id, piece.link, value, piece.last))
            return
        run._output(piece.link, Output(port, self._fetch(piece.value), piece.last))
        if len(run._queue) > MAX_UNREAD:
            run._queue.clear()
            link = run.plan.link(piece.link)
            self._fail(run, RequestFailed(target, f"edge {link.source} -> {link.target}: the client does not read"))

    def _fetch(self, value: Any) -> Any:
        if not isinstance(value, Stored):
            return value
        assert self.transport
        copy = self.transport.get([value.id])[0].copy()
        self.transport.release([value.id])
        return copy

    def _answered(self, run: Run, group: ComponentGroup) -> None:
        """A group has ended its part of this request. It drops what still arrives, so its producers get free credit."""
        if group not in run._open:
            return
        run._open.remove(group)
        for i in run.plan.links:
            link = run.plan.link(i)
            if isinstance(link, Stream) and link.target.split(".")[0] in group.components:
                self.took(run, i, 1 << 30)
        if not run._open:
            del self.runs[run.id]
            run._wake.set()

    def _fail(self, run: Run, failure: SlipstreamError) -> None:
        run._end(failure)
        for group in list(run._open):
            group.send(Abort(run.id))

    def forget(self, group: ComponentGroup) -> None:
        """Releases the values that a group's process held in the transport. Call it before its successor serves."""
        if group.peer < 0:
            return
        if self.transport:
            self.transport.forget(group.peer)
        for other in self.groups:
            if other is not group and other.up:
                other.send(Forget(group.peer))

    def _down(self, group: ComponentGroup, reason: str) -> None:
        """A group's process is gone: each of its requests ends with one error; the others go on."""
        self.forget(group)
        for run in [r for r in self.runs.values() if group in r._open]:
            component = next(c for c in group.components if c in run.plan.components)
            self._answered(run, group)
            self._fail(run, RequestFailed(component, f"its process ended: {reason}", 500))
