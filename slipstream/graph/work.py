"""The work of one group: its requests' waiting inputs, ready rows, states, and the routing of outputs. No I/O, no clock.

`on` takes a message; `take` gives the rows of one step of one component; `settle` applies the step's results. Rows of all
walks of a component share a step. Between take and settle any message may come: a row whose job was ended in between is
dropped, so no late output is fed back, sent, or counted.
"""

from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np

from slipstream.errors import BadRequest
from slipstream.graph.chunks import Chunk, Cutter, join, size_of
from slipstream.graph.messages import Abort, Done, Failed, Feed, FromGroup, Inspect, Open, Piece, Standing, Stop, Took, ToWork
from slipstream.graph.model import Component, Edge, Loop, Model, Stream, policy_of
from slipstream.graph.plan import make_plan
from slipstream.graph.rows import ComponentRequest, Job, Result, Row, StepFunction

MAX_GATHERED_BYTES = 64 << 20  # bytes (or characters) that an Edge gathers for one request


class Work:
    """The part of a model that one group holds. `effects`: messages for the conductor. `released`: tags of used values."""

    def __init__(self, model: Model, components: Sequence[str], steps: dict[str, StepFunction]):
        self.model = model
        self.steps = steps
        self.components = [model.by_name[name] for name in components]
        self.requests: dict[int, ComponentRequest] = {}
        self.effects: list[FromGroup] = []
        self.released: list[int] = []
        self._names = frozenset(components)
        self._ready: dict[str, deque[Job]] = {name: deque() for name in components}

    # --- messages

    def on(self, message: ToWork) -> None:
        if isinstance(message, Open):
            return self._open(message)
        request = self.requests.get(message.id)
        if request is None:
            if isinstance(message, Feed) and message.tag:
                self.released.append(message.tag)
            return None
        match message:
            case Feed():
                self._feed(request, message)
            case Took(link=link, count=count):
                request.credit[link] = request.credit.get(link, 0) + count
                self._queue(request.jobs[request.plan.link(link).source.split(".")[0]])
            case Stop(component=name):
                for job in (
                    [request.jobs[name]] if name in request.jobs else list(request.jobs.values()) if name is None else []
                ):
                    self._end(job)
                self._close(request)
            case Abort():
                self._drop(request)
                self.effects.append(Done(request.id))
            case Inspect():
                self.effects.append(self._standing(request))

    def _open(self, m: Open) -> None:
        plan = make_plan(self.model, m.walk, m.wanted)
        here = [name for name in plan.components if name in self._names]
        request = ComponentRequest(m.id, plan, m.params, {}, {})
        for name in here:
            request.jobs[name] = self._job(request, self.model.by_name[name])
        for i in plan.links:
            link = plan.link(i)
            if isinstance(link, Stream) and link.source.split(".")[0] in request.jobs:
                request.credit[i] = link.window
        self.requests[m.id] = request

    def _job(self, request: ComponentRequest, c: Component) -> Job:
        plan, name = request.plan, c.name
        inbound: dict[str, list[int]] = {port: [] for port in c.inputs}
        routes: dict[str, list[int]] = {port: [] for port in c.outputs}
        for i in plan.links:
            link = plan.link(i)
            for place, table in ((link.target, inbound), (link.source, routes)):
                owner, port = place.split(".")
                if owner == name and port in table:
                    table[port].append(i)
        cutters = {
            port: Cutter(
                policy_of(next((plan.link(i) for i in links if not isinstance(plan.link(i), Loop)), plan.link(links[0]))),
                len(links),
            )
            for port, links in inbound.items()
        }
        looped = frozenset(p for p, links in inbound.items() if all(isinstance(plan.link(i), Loop) for i in links))
        fork = next((f for f in plan.walk.forks if f.component == name), None)
        return Job(request, c, cutters, looped, {p: tuple(links) for p, links in routes.items()}, fork)

    def _feed(self, request: ComponentRequest, m: Feed) -> None:
        name, port = request.plan.link(m.link).target.split(".")
        job = request.jobs[name]
        self._push(job, port, m.link, m.value, m.last, m.tag)
        self._advance(job)
        self._close(request)

    def _push(self, job: Job, port: str, link: int, value: Any, last: bool, tag: int) -> None:
        cutter = job.cutters[port]
        if value is not None:
            cutter.push(value, (link, tag))
        if last:
            cutter.end()
        if job.ended:
            cutter.clear()
        if not job.busy:  # else a step may still read the spent pieces; settle gives them back
            self._spend(job.request, cutter)

    def _spend(self, request: ComponentRequest, cutter: Cutter) -> None:
        """Gives back the pieces that a cutter no longer needs: credit to the producer, the tag to the transport."""
        counts: dict[int, int] = {}
        for link, tag in cutter.spent:
            counts[link] = counts.get(link, 0) + 1
            if tag:
                self.released.append(tag)
        cutter.spent.clear()
        for link, count in counts.items():
            if not isinstance(request.plan.link(link), Stream):
                continue
            source = request.plan.link(link).source.split(".")[0]
            if source in request.jobs:
                request.credit[link] += count
                self._queue(request.jobs[source])
            else:
                self.effects.append(Took(request.id, link, count))

    # --- steps

    def _queue(self, job: Job) -> None:
        if not job.queued and self._steppable(job):
            job.queued = True
            self._ready[job.component.name].append(job)

    def _steppable(self, job: Job) -> bool:
        if job.ended or job.busy or any(job.request.credit.get(i, 1) < 1 for links in job.routes.values() for i in links):
            return False
        if job.again:
            return True
        some = False
        for port, cutter in job.cutters.items():
            if cutter.ready:
                some = True
            elif not (cutter.exhausted or (job.steps == 0 and port in job.looped)):
                return False
        return some or self._owes_step(job)

    def _owes_step(self, job: Job) -> bool:
        """Whether a step without chunks is due: the closing one, or the one of an empty text taken whole, which is a value."""
        if job.closed or not all(c.exhausted for c in job.cutters.values()):
            return False
        whole_text = any(p.kind == "text" and p.takes == "whole" for p in job.component.inputs.values())
        return job.component.closes or (job.steps == 0 and whole_text)

    def _standing(self, request: ComponentRequest) -> Standing:
        open = [job for job in request.jobs.values() if not job.ended]
        if any(job.busy or self._steppable(job) for job in open):
            return Standing(request.id, True)
        return Standing(request.id, False, {job.component.name: self._waits_for(job) for job in open})

    def _waits_for(self, job: Job) -> str:
        """The reason why a job cannot step."""
        links = [job.request.plan.link(i) for links in job.routes.values() for i in links if job.request.credit.get(i, 1) < 1]
        if links:
            return f"waits for room in the stream {links[0].source} -> {links[0].target}"
        ports = [port for port, cutter in job.cutters.items() if not (cutter.ready or cutter.exhausted)]
        return f"waits for its input {', '.join(ports)}"

    def take(self) -> tuple[str, list[Row]] | None:
        """The rows of the next step: the component whose first row has waited longest among those with rows, in turn."""
        for name in list(self._ready):
            queue = self._ready[name]
            rows: list[Row] = []
            limit = self.model.by_name[name].max_rows
            while queue and len(rows) < limit:
                job = queue.popleft()
                job.queued = False
                if self._steppable(job):
                    rows.append(self._row(job))
            if rows:
                self._ready[name] = self._ready.pop(name)  # the next turn goes to another component
                return name, rows
        return None

    def _row(self, job: Job) -> Row:
        inputs = {}
        for port, cutter in job.cutters.items() if not job.again else ():
            chunk = cutter.pop()
            if chunk is None and job.steps == 0 and port not in job.looped and job.component.inputs[port].takes == "whole":
                chunk = Chunk("", 0, True)
            if chunk is not None:
                inputs[port] = chunk
        last = all(c.exhausted for c in job.cutters.values())
        job.closed = job.closed or last
        job.busy, job.again = True, False
        return Row(job.request.id, job.request.plan.walk.name, job.request.params, inputs, job.branches, last, job)

    def run(self, name: str, rows: list[Row]) -> Sequence[Result]:
        """Calls the component's step. An exception fails rows, not the group.

        If no row has a state, each is run again alone, and only the row at fault fails. Otherwise all rows of this step fail.
        """
        try:
            results = self.steps[name](rows)
            if len(results) != len(rows):
                raise RuntimeError(f"the step returned {len(results)} results for {len(rows)} rows")
            return results
        except Exception as e:
            if len(rows) > 1 and all(row.branches == [None] for row in rows):
                return [self.run(name, [row])[0] for row in rows]
            if isinstance(e, BadRequest):
                return [Result(error=str(e), refused=True, param=e.param) for _ in rows]
            return [Result(error=f"{type(e).__name__}: {e}") for _ in rows]

    def settle(self, rows: Sequence[Row], results: Sequence[Result]) -> None:
        """Applies a step. Each row is routed by its own walk; rows whose job has ended meanwhile are dropped."""
        for row, result in zip(rows, results, strict=True):
            job = row.job
            job.busy = False
            live = self.requests.get(row.id) is job.request
            for cutter in job.cutters.values():
                if live:
                    self._spend(job.request, cutter)
                else:
                    self._release(cutter)
            if job.ended or not live:
                continue
            job.steps += 1
            fault = result.error or self._fault(job, result)
            if fault:
                self._fail(job, fault, result.refused, result.param)
                continue
            self._keep(job, result)
            if not self._route(job, result):
                continue
            job.again = result.again
            if result.done:
                self._end(job)
            self._advance(job)
            self._close(job.request)

    def _fault(self, job: Job, result: Result) -> str | None:
        early = result.done and job.component.role != "autoregressive" and not all(c.exhausted for c in job.cutters.values())
        return "it ended before its input" if early else None

    def _keep(self, job: Job, result: Result) -> None:
        if result.branches is not None:
            job.branches = result.branches
        elif job.fork and job.steps == 1:
            copy = self.steps[job.component.name].fork  # type: ignore[attr-defined]
            job.branches = [result.state, *(copy(result.state) for _ in range(job.fork.branches - 1))]
        else:
            job.branches = [result.state]

    def _route(self, job: Job, result: Result) -> bool:
        """Sends outputs along the links of this row's walk. False if that ended the request."""
        request = job.request
        for port, value in result.outputs.items():
            if value is None:
                continue
            for i in job.routes[port]:
                link = request.plan.link(i)
                if isinstance(link, Loop):
                    self._turn(job, i, link, value, result)
                elif isinstance(link, Edge):
                    request.gathered.setdefault(i, []).append(value)
                    size = request.sizes[i] = request.sizes.get(i, 0) + size_of(value)
                    if size > MAX_GATHERED_BYTES:
                        self._fail(job, f"edge {link.source} -> {link.target} gathered more than {MAX_GATHERED_BYTES} bytes")
                        return False
                else:
                    request.credit[i] -= 1
                    self._send(request, i, value, False)
        for i in (i for links in job.routes.values() for i in links):
            link = request.plan.link(i)
            if isinstance(link, Loop) and link.until and link.until.signal and _true(result.outputs.get(link.until.signal)):
                self._end_loop(request, i)
        return True

    def _turn(self, job: Job, i: int, link: Loop, value: Any, result: Result) -> None:
        """Takes one turn of a loop, unless this step's stop signal, or the count, ends the loop."""
        request, until = job.request, link.until
        assert until is not None
        if i in request.closed or (until.signal and _true(result.outputs.get(until.signal))):
            return
        turn = request.turns[i] = request.turns.get(i, 0) + 1
        self._send(request, i, value, False)
        if turn >= until.steps:
            self._end_loop(request, i)

    def _end_loop(self, request: ComponentRequest, i: int) -> None:
        if i not in request.closed:
            request.closed.add(i)
            self._send(request, i, None, True)

    def _send(self, request: ComponentRequest, i: int, value: Any, last: bool) -> None:
        name, port = request.plan.link(i).target.split(".")
        if name in request.jobs:
            job = request.jobs[name]
            self._push(job, port, i, value, last, 0)
            self._advance(job)
        else:
            self.effects.append(Piece(request.id, i, value, last, name))

    # --- ends

    def _advance(self, job: Job) -> None:
        """Queues a job that can step; ends one that never can."""
        if job.ended or job.busy:
            return
        finished = not job.again and all(c.exhausted for c in job.cutters.values())
        if finished and not self._owes_step(job):
            self._end(job)
        else:
            self._queue(job)

    def _end(self, job: Job) -> None:
        """Ends a job's outputs and drops its inputs, now and later."""
        if job.ended:
            return
        job.ended, job.branches = True, [None]
        for cutter in job.cutters.values():
            cutter.clear()
            if not job.busy:
                self._spend(job.request, cutter)
        for links in job.routes.values():
            for i in links:
                if isinstance(job.request.plan.link(i), Loop):
                    self._end_loop(job.request, i)
                    continue
                gathered = job.request.gathered.pop(i, None)
                self._send(job.request, i, join(gathered) if gathered else None, True)

    def _close(self, request: ComponentRequest) -> None:
        if request.id in self.requests and all(job.ended for job in request.jobs.values()):
            del self.requests[request.id]
            self.effects.append(Done(request.id))

    def _fail(self, job: Job, message: str, refused: bool = False, param: str | None = None) -> None:
        self._drop(job.request)
        self.effects.append(Failed(job.request.id, job.component.name, message, 400 if refused else 500, param))

    def fail(self, id: int, component: str, message: str) -> None:
        """Ends a request whose piece could not be read or sent."""
        if id in self.requests:
            self._drop(self.requests[id])
            self.effects.append(Failed(id, component, message))

    def _drop(self, request: ComponentRequest) -> None:
        """Forgets a request and releases what it holds."""
        if self.requests.pop(request.id, None) is None:
            return
        for job in request.jobs.values():
            job.ended, job.branches = True, [None]
            for cutter in job.cutters.values():
                cutter.clear()
                if not job.busy:  # else a step may still read them; settle releases them
                    self._release(cutter)

    def _release(self, cutter: Cutter) -> None:
        self.released += [tag for _, tag in cutter.spent if tag]
        cutter.spent.clear()


def _true(value: Any) -> bool:
    return bool(np.asarray(value).any()) if value is not None else False
