"""A leader in this process over a group of CPU executors: real scheduling of real steps, without processes or a front end."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from slipstream.log.batch import Batch
from slipstream.log.grammar import Matcher
from slipstream.log.replica import Replica
from slipstream.log.request import Request, TokenLogprobs
from slipstream.process.protocol import Abort, Finished, PromptLogprobs, Refused, Submit, Tokens
from slipstream.rank.effects import Interpreter, queue
from slipstream.rank.events import (
    Arrived,
    DeviceEffect,
    Launch,
    LaunchForward,
    Poison,
    Prepare,
    ResourcesReady,
    Send,
    SendReply,
    SendToFront,
    Span,
    Wake,
)
from slipstream.rank.leader import Leader
from slipstream.schedule.budget import Budget
from slipstream.schedule.planner import Planner
from tests.device.groups import Group


class Answered(NamedTuple):
    tokens: list[int]
    reason: str
    error: str
    logprobs: list[TokenLogprobs]
    prompt: list[TokenLogprobs]


class Led(Interpreter):
    """Runs requests to their ends. `make`: the matcher of a request with a grammar."""

    def __init__(self, group: Group, asynchronous: bool, cap: int = 2048, make: Callable[[bytes], Matcher] | None = None):
        self.group, self.make, self.now = group, make, 0.0
        replica = Replica(group.limits)
        self.leader = Leader(replica, Planner(replica, Budget(cap), 10_000), 1, asynchronous)
        self.batches: list[Batch] = []
        self.flights = 0
        self.tokens: dict[int, list[int]] = {}
        self.logprobs: dict[int, list[TokenLogprobs]] = {}
        self.prompts: dict[int, dict[int, TokenLogprobs]] = {}  # by position: a preempted prompt is scored twice
        self.ends: dict[int, Finished] = {}
        self.events: list[ResourcesReady] = []

    def run(self, requests: list[Request], leaving: dict[int, int] | None = None) -> dict[int, Answered]:
        """`leaving`: request id -> after how many tokens its client leaves."""
        leaving = dict(leaving or {})
        for r in requests:
            self.on(Submit(r))
        for _ in range(10_000):
            if all(r.id in self.ends for r in requests):
                break
            while self.events:
                self.on(self.events.pop())
            for id, after in list(leaving.items()):
                if len(self.tokens.get(id, ())) >= after:
                    del leaving[id]
                    self.on(Abort(id))
            if self.flights:
                self.flights -= 1
                self.on(Arrived(self.group.outcome()))
            else:
                self.on(None)
        assert all(r.id in self.ends for r in requests), "not all requests have ended"
        replica = self.leader.replica
        assert replica.cache.available == replica.cache.total, "pages are still held"
        return {
            id: Answered(
                self.tokens.get(id, []), e.reason, e.error, self.logprobs.get(id, []), list(self.prompts.get(id, {}).values())
            )
            for id, e in self.ends.items()
        }

    def on(self, event) -> None:
        self.now += 10.0  # a step is planned as soon as the device can take one
        self.perform(self.leader.on(event, self.now))

    def device(self, effect: DeviceEffect) -> None:
        if isinstance(effect, Launch | LaunchForward):
            self.batches.append(effect.batch)
            self.flights += 1
        for rank in self.group.ranks:
            queue(rank, effect)

    def send_to_front(self, effect: SendToFront) -> None:
        message = effect.message
        if isinstance(message, Tokens):
            ids, tokens = np.frombuffer(message.ids, "<i8").tolist(), np.frombuffer(message.tokens, "<i4").tolist()
            for i, (id, token) in enumerate(zip(ids, tokens, strict=True)):
                assert id not in self.ends
                self.tokens.setdefault(id, []).append(token)
                if message.logprobs and i in message.logprobs:
                    self.logprobs.setdefault(id, []).append(message.logprobs[i])
        elif isinstance(message, PromptLogprobs):
            self.prompts.setdefault(message.id, {}).update(enumerate(message.rows, message.start))
        elif isinstance(message, Finished):
            self.ends[message.id] = message
        assert not isinstance(message, Refused), message

    def prepare(self, effect: Prepare) -> None:
        assert self.make is not None
        self.events.append(ResourcesReady(effect.id, {"grammar": self.make(effect.resources[0].spec)}))

    def poison(self, effect: Poison) -> None:
        raise AssertionError(effect.reason)

    def send(self, effect: Send) -> None:
        """There are no other machines: the ranks get the leader's own batches."""

    def reply(self, effect: SendReply) -> None:
        """The leader notes its own."""

    def wake(self, effect: Wake) -> None:
        """Virtual time passes with every event."""

    def span(self, effect: Span) -> None:
        """The phases are not timed."""
