"""One choice of one prompt on its way: tokens in, text, ids and log probabilities out, kept aligned.

A Choice is the engine's sink for its request. It ends once: by the engine, or by itself at a stop string. Then it reports to
the engine how many tokens it kept.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from slipstream.log.request import Request, TokenLogprobs
from slipstream.serve.engine.engine import Engine
from slipstream.serve.errors import Failure
from slipstream.serve.observe.metrics import Metrics
from slipstream.serve.text.calls import Part
from slipstream.serve.text.logprobs import pack
from slipstream.serve.text.params import GenerationParams
from slipstream.serve.text.prompts import Prompt
from slipstream.serve.text.reader import Reader
from slipstream.serve.text.stop import StopStrings
from slipstream.tokenize.tokenizer import Tokenizer


class Piece(NamedTuple):
    """The news since the last piece. Those of the three lists that were requested have equal lengths."""

    text: str
    ids: list[int]
    logprobs: list[bytes | None]  # `TokenLogprobs`, packed by `logprobs.pack`
    offsets: list[int]  # where each token begins in the text, the echoed prompt included
    parts: list[Part] = []  # set instead of `text` where the plan has a reading


@dataclass
class Times:
    """Times of a choice's events, in time.monotonic() seconds; 0 for not yet."""

    born: float  # the request arrived
    begun: float = 0.0  # the engine admitted it
    first: float = 0.0  # its first token came
    last: float = 0.0  # its latest token came


class Choice:
    """State of one choice. `notify` is called with it whenever there is something new to send."""

    def __init__(
        self,
        index: int,
        prompt: Prompt,
        request: Request,
        plan: GenerationParams,
        tokenizer: Tokenizer,
        engine: Engine,
        metrics: Metrics,
        notify: Callable[["Choice"], None],
        now: float,
    ):
        self.index = index
        self.prompt = prompt
        self.request = request
        self.plan = plan
        self.cached_tokens = 0
        self.drafts_verified = self.drafts_accepted = 0
        self.admitted = False
        self.ids: list[int] = []
        self.finish_reason: str | None = None
        self.stop_reason: str | int | None = None
        self.failure: Failure | None = None
        self.prompt_rows: list[bytes | None] = []
        self.opened = False  # whether its first event has been written
        self._engine = engine
        self._metrics = metrics
        self._notify = notify
        self.reasoning_tokens = 0
        reading = plan.reading
        self._reader = Reader(reading, prompt.thinking) if reading is not None else None
        keep = reading.keep if reading is not None else frozenset()
        self._stream = tokenizer.stream(skip_special_tokens=plan.skip_special, continues=True, keep=keep)
        self._stops = StopStrings(plan.stops, plan.include_stop, plan.stop_names.values()) if plan.stops else None
        self._stop_ids = frozenset(request.sampling.stop_ids)
        self._end_token: int | None = None
        self._fresh: list[str] = []  # text that the writer has not taken yet
        self._parts: list[Part] = []  # the same, if there is a reader
        self._logprobs: list[bytes | None] = []
        self._offsets: list[int] = []
        self._length = len(prompt.text) if plan.echo else 0  # characters so far, including those held back or cut off
        self._taken = 0  # tokens taken
        self.times = Times(now)

    @property
    def ended(self) -> bool:
        return self.finish_reason is not None or self.failure is not None

    # calls by the engine

    def started(self, cached_tokens: int) -> None:
        if not self.admitted:
            self.admitted = True
            self.cached_tokens = cached_tokens
            self.times.begun = time.monotonic()
            self._metrics.prompt(len(self.prompt.ids))

    def drafted(self, verified: int, accepted: int) -> None:
        self.drafts_verified += verified
        self.drafts_accepted += accepted

    def prompt_logprobs(self, start: int, rows: list[TokenLogprobs]) -> None:
        if not self.prompt_rows:
            self.prompt_rows = [None] * len(self.prompt.ids)
        self.prompt_rows[start : start + len(rows)] = map(pack, rows)

    def token(self, token: int, logprobs: TokenLogprobs | None, now: float) -> None:
        metrics, times = self._metrics, self.times
        metrics.token()
        if times.last:
            metrics.inter_token.observe(now - times.last)
        else:
            times.first = now
            metrics.time_to_first.observe(now - times.born)
        times.last = now
        plan = self.plan
        if plan.discard:
            if logprobs is not None and len(self.prompt.ids) > 1:  # the token is the prompt's last
                self.prompt_logprobs(len(self.prompt.ids) - 1, [logprobs])
            return
        ids = self.ids
        ids.append(token)
        if plan.logprobs >= 0:
            self._logprobs.append(logprobs and pack(logprobs))
            self._offsets.append(self._length)
        if token in self._stop_ids:
            self._end_token = token
            if token in plan.end_ids or not plan.include_stop:
                return
        text, armed = self._stream.push(token), len(ids) >= plan.min_tokens
        if token in plan.stop_names:
            self._named(plan.stop_names[token], armed)
        elif self._reader is not None:
            thought = self._reader.thinks
            self._read(self._reader.push(text), armed)
            self.reasoning_tokens += thought or self._reader.thinks
        elif text:
            self._length += len(text)
            self._text(text, armed)

    def _named(self, name: str, armed: bool) -> None:
        """Takes a special token that is not shown, but that occurs in a stop string."""
        if self._reader is not None and self._reader.thinks:
            self.reasoning_tokens += 1
            return
        self._text(name, armed, hidden=True)
        if self._reader is not None:
            self._tell_content()

    def _text(self, text: str, armed: bool, hidden: bool = False) -> bool:
        """Passes text through the stop strings; returns whether one was found, which ends the answer."""
        if self._stops is None:
            self._fresh.append(text)
            return False
        text, found = self._stops.push(text, armed, hidden)
        if text:
            self._fresh.append(text)
        if found is None:
            return False
        self._engine.abort(self.request.id, kept=len(self.ids))
        self._finished("stop", found)
        return True

    def _read(self, parts: list[Part], armed: bool) -> bool:
        """Takes the reader's parts; looks for stop strings in content only. Returns whether the answer has ended."""
        assert self._reader is not None
        for part in parts:
            if part.kind == "content":
                ended = self._text(part.text, armed)
                self._tell_content()
                if ended:
                    return True
            else:
                if self._stops is not None:
                    self._fresh.append(self._stops.flush())
                    self._tell_content()
                self._parts.append(part)
        if self._reader.done:  # the only call that is allowed is complete
            self._engine.abort(self.request.id, kept=len(self.ids))
            self._finished("stop", None)
            return True
        return False

    def _tell_content(self) -> None:
        text = "".join(self._fresh)
        self._fresh.clear()
        if text:
            self._parts.append(Part("content", text))

    def finish(self, reason: str) -> None:
        if self.ended:
            return
        armed, tail = len(self.ids) >= self.plan.min_tokens, self._stream.flush()
        if self._reader is not None:
            if self._read([*self._reader.push(tail), *self._reader.finish(cut=reason == "length")], armed):
                return
        elif tail:
            self._length += len(tail)
            if self._text(tail, armed):
                return
        if self._stops is not None:
            self._fresh.append(self._stops.flush())
        if self._reader is not None:
            self._tell_content()
        end = self._end_token if reason == "stop" else None
        self._finished("length" if self.plan.discard else reason, None if end in self.plan.end_ids else end)

    def _finished(self, reason: str, stop_reason: str | int | None) -> None:
        called = self._reader is not None and self._reader.called
        self.finish_reason = "tool_calls" if called and reason == "stop" else reason
        self.stop_reason = stop_reason
        self._metrics.ended(reason, self.times.last - self.times.born if self.times.last else 0.0)
        self._notify(self)

    def fail(self, failure: Failure) -> None:
        if not self.ended:
            self.failure = failure
            self._metrics.ended("error", None)
            self._notify(self)

    def flush(self) -> None:
        self._notify(self)

    # calls by the client's side

    def abort(self) -> None:
        """The client has left, or no longer needs the answer."""
        if not self.ended:
            self.failure = Failure(499, "the client went away")
            self._metrics.ended("abort", None)
            self._engine.abort(self.request.id)

    def take(self) -> Piece:
        """Everything new since the last call."""
        if self._reader is not None:
            self._tell_content()
        parts, self._parts = self._parts, []
        text = "".join(self._fresh)
        self._fresh.clear()
        at, self._taken = self._taken, len(self.ids)
        if self.plan.plain_text:
            return Piece(text, [], [], [], parts)
        return Piece(text, self.ids[at:], self._logprobs[at:], self._offsets[at:], parts)
