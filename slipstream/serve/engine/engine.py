"""The front end's view of the engine: which requests are open, and the promise that each of them ends exactly once.

Runs on the event loop's thread only. It does not know HTTP: it takes `log.request.Request`s and calls sinks.
"""

import itertools
import logging
import secrets
import socket
import time
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from slipstream.errors import Overloaded
from slipstream.log.request import Request, TokenLogprobs
from slipstream.process.protocol import (
    Abort,
    Attach,
    Down,
    Finished,
    Load,
    PromptLogprobs,
    Refused,
    Started,
    Submit,
    ToFront,
    Tokens,
)
from slipstream.serve.engine.link import Link
from slipstream.serve.errors import Failed, Failure

log = logging.getLogger("slipstream.serve")


class Sink(Protocol):
    """Receives one request's tokens and its end: exactly one `finish` or `fail`, as the last call, unless it aborts."""

    def started(self, cached_tokens: int) -> None: ...

    def token(self, token: int, logprobs: TokenLogprobs | None, now: float) -> None:
        """One more committed token; `now` is time.monotonic()."""
        ...

    def drafted(self, verified: int, accepted: int) -> None:
        """A row of the request had so many drafts, and so many of them are among the tokens that come next."""
        ...

    def prompt_logprobs(self, start: int, rows: list[TokenLogprobs]) -> None: ...

    def finish(self, reason: str) -> None:
        """reason: "stop" or "length"."""
        ...

    def fail(self, failure: Failure) -> None: ...

    def flush(self) -> None:
        """Called once after all calls of one turn of the loop."""
        ...


@dataclass(frozen=True)
class RequestLimits:
    """The limits of one request."""

    max_len: int  # prompt and answer together, in tokens
    pages: int = 0
    slots: int = 0


class Engine:
    """Sends requests to the group's leader and its answers to sinks.

    `state` is "starting", "ready", "draining" or "failed"; `reason` says why it is not ready. `on_lost` is called with the
    incarnation of a leader whose link has ended without a message from the supervisor. The supervisor then sends another link.
    """

    inward: Any = ToFront  # the messages of the process at the other end

    def __init__(self, on_load=None):
        self.limits: RequestLimits | None = None
        self.load: Load | None = None
        self.draining = False
        self.reason = "the model is loading"
        self.retry_after = 2.0
        self.incarnation = -1
        self.on_lost: Callable[[int], None] = lambda incarnation: None
        self._on_load = on_load  # called with (Load, whether it is the first of a new leader)
        self._fresh = True
        self._failed = False
        self._link: Link | None = None
        self._live: dict[int, Sink] = {}
        base = secrets.randbits(30) << 32  # several front ends may serve one group
        self._ids = itertools.count(base + 1)

    @property
    def state(self) -> str:
        if self.draining:
            return "draining"
        if self._link is not None:
            return "ready"
        return "failed" if self._failed else "starting"

    @property
    def live(self) -> int:
        """The number of requests that have not ended."""
        return len(self._live)

    async def attach(self, message: Attach, sock: socket.socket) -> None:
        """Connects to a leader that is ready, by its stream `sock`."""
        if self._link is not None:
            self._lose(self._link, "another process has taken the model over")
        holder: list[Link] = []
        link = await Link.open(sock, lambda ms: self._receive(ms, holder), lambda why: self._broke(holder[0], why), self.inward)
        holder.append(link)
        self._link = link
        self._failed, self._fresh = False, message.incarnation != self.incarnation
        self.reason, self.incarnation = "", message.incarnation
        self.limits = RequestLimits(message.max_len, message.pages, message.slots)

    def down(self, message: Down) -> None:
        if message.incarnation < self.incarnation:
            return
        self.retry_after = message.retry_after
        if self._link is not None:
            self._lose(self._link, message.reason)
        self._failed, self.reason = True, message.reason

    def drain(self) -> None:
        """Refuses new requests from now on; running ones go on."""
        self.draining = True
        self.reason = "the server is shutting down"

    def fail_all(self, failure: Failure) -> None:
        """Ends all requests that still run, here and at the leader."""
        for id in list(self._live):
            self._end(id, "fail", failure)
            if self._link is not None:
                self._link.send(Abort(id))

    def check_ready(self) -> RequestLimits:
        """Raises Failed (503) or Overloaded when a new request cannot be taken now."""
        if self.draining or self._link is None or self.limits is None:
            raise Failed(
                Failure(503, self.reason or "the model is not ready", code="unavailable", retry_after=self.retry_after)
            )
        if self._link.full:
            raise Overloaded("the engine does not take requests fast enough; try again later")
        return self.limits

    def next_id(self) -> int:
        return next(self._ids)

    def submit(self, request: Request, sink: Sink, more: Sequence[tuple[Request, Sink]] = ()) -> None:
        """Sends a validated request, with `more` choices: the same request with the next choice numbers.

        They travel together, since their shared prompt may be large. If it raises Failed or Overloaded, nothing was sent.
        """
        self.check_ready()
        assert self._link is not None
        self._live[request.id] = sink
        self._live.update((other.id, its_sink) for other, its_sink in more)
        self._link.send(Submit(request, tuple(other.id for other, _ in more)))

    def abort(self, id: int, kept: int = -1) -> None:
        """The sink has ended by itself, having kept so many generated tokens (-1: all). It hears nothing more."""
        if self._live.pop(id, None) is not None and self._link is not None:
            self._link.send(Abort(id, kept))

    def _broke(self, link: Link, why: str) -> None:
        """The link has ended by itself. The leader may still run, so the supervisor is notified."""
        if link is self._link:
            log.error("the link to the model's process was lost: %s", why)
            self._lose(link, why)
            self.on_lost(self.incarnation)

    def _lose(self, link: Link, why: str) -> None:
        """The leader is gone: each of its requests fails, once."""
        if link is not self._link:
            return
        self._link = None
        self._failed = True
        self.reason = self.reason if self.draining else why
        link.close()
        if self._on_load is not None:
            self._on_load(None, False)
        self.load = None
        failure = Failure(500, f"the model's process was lost: {why}", code="engine_down")
        for id in list(self._live):
            self._end(id, "fail", failure)

    def _receive(self, messages: Iterable[ToFront], holder: list[Link]) -> None:
        if holder and holder[0] is not self._link:
            return
        now = time.monotonic()
        told: dict[int, Sink] = {}
        for m in messages:
            if isinstance(m, Tokens):
                self._tokens(m, now, told)
            elif isinstance(m, Load):
                self.load = m
                if self._on_load is not None:
                    self._on_load(m, self._fresh)
                self._fresh = False
            elif isinstance(m, Finished):
                if m.reason in ("stop", "length"):
                    self._end(m.id, "finish", m.reason)
                elif m.reason == "abort":
                    self._end(m.id, "fail", Failure(503, "the engine ended the request", code="aborted"))
                else:
                    self._end(m.id, "fail", Failure(500, m.error or "the engine ended the request", code="engine_error"))
                told.pop(m.id, None)
            elif isinstance(m, Refused):
                retry = 1.0 if m.status in (429, 503) else None
                self._end(m.id, "fail", Failure(m.status, m.message, m.param, retry_after=retry))
            elif isinstance(m, Started):
                self._tell(m.id, told, "started", m.cached_tokens)
            elif isinstance(m, PromptLogprobs):
                self._tell(m.id, told, "prompt_logprobs", m.start, m.rows)
        for id, sink in told.items():
            if id in self._live:
                self._guard(id, sink.flush)

    def _tokens(self, m: Tokens, now: float, told: dict[int, Sink]) -> None:
        ids, tokens = array("q", m.ids), array("i", m.tokens)
        live, logprobs = self._live, m.logprobs
        for id, (verified, accepted) in (m.drafts or {}).items():
            self._tell(id, told, "drafted", verified, accepted)
        for i, id in enumerate(ids):
            sink = live.get(id)
            if sink is None:
                continue
            told[id] = sink
            try:
                sink.token(tokens[i], logprobs.get(i) if logprobs else None, now)
            except Exception:
                self._broken(id)

    def _tell(self, id: int, told: dict[int, Sink], name: str, *args) -> None:
        sink = self._live.get(id)
        if sink is not None:
            told[id] = sink
            self._guard(id, getattr(sink, name), *args)

    def _guard(self, id: int, call, *args) -> None:
        try:
            call(*args)
        except Exception:
            self._broken(id)

    def _broken(self, id: int) -> None:
        """A bug in a sink: that request ends, the others go on."""
        log.exception("request %d: fault while handling its tokens", id)
        sink = self._live.get(id)
        self.abort(id)
        if sink is not None:
            self._call_end(id, sink, "fail", Failure(500, "internal error", code="internal_error"))

    def _end(self, id: int, how: str, value) -> None:
        sink = self._live.pop(id, None)
        if sink is not None:
            self._call_end(id, sink, how, value)

    def _call_end(self, id: int, sink: Sink, how: str, value) -> None:
        try:
            getattr(sink, how)(value)
        except Exception:
            log.exception("request %d: fault while ending it", id)
