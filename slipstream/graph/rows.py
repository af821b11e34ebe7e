"""What a step sees and returns, and what a group keeps of a request meanwhile. Values and plain state, no behaviour."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from slipstream.graph.chunks import Chunk, Cutter
from slipstream.graph.model import Component, Fork
from slipstream.graph.plan import WalkPlan


@dataclass(eq=False)
class Row:
    """One request's part of a step. `branches[0]` is its state, None before the first step; a forked row has one per branch."""

    id: int
    walk: str
    params: dict[str, Any]
    inputs: dict[str, Chunk]
    branches: list[Any]
    last: bool  # every input has ended, and this is the last of each
    job: "Job" = field(repr=False)


@dataclass(eq=False)
class Result:
    """What a step made of a row."""

    outputs: dict[str, Any] = field(default_factory=dict)  # by port; absent or None where there is nothing
    state: Any = None
    branches: list[Any] | None = None  # the states of a forked row; `state` is not read then
    again: bool = False  # step this row again without new input
    done: bool = False  # the row has ended
    error: str | None = None  # the request ends with this message
    refused: bool = False  # and its content is at fault
    param: str | None = None  # and of that, this parameter


StepFunction = Callable[[Sequence[Row]], Sequence[Result]]


@dataclass(eq=False)
class Job:
    """One component's part of one request."""

    request: "ComponentRequest"
    component: Component
    cutters: dict[str, Cutter]
    looped: frozenset[str]  # inputs that a loop alone feeds: not needed for the first step
    routes: dict[str, tuple[int, ...]]  # output -> links
    fork: Fork | None
    branches: list[Any] = field(default_factory=lambda: [None])
    steps: int = 0
    again: bool = False
    busy: bool = False  # a row of it is between take and settle
    queued: bool = False
    closed: bool = False  # a step has seen the end of every input
    ended: bool = False


@dataclass(eq=False)
class ComponentRequest:
    """A group's part of one request."""

    id: int
    plan: WalkPlan
    params: dict[str, Any]
    jobs: dict[str, Job]
    credit: dict[int, int]  # by link: pieces of a stream that may still be sent
    gathered: dict[int, list[Any]] = field(default_factory=dict)  # by link: pieces of an Edge
    sizes: dict[int, int] = field(default_factory=dict)  # by link: of the pieces gathered, see `chunks.size_of`
    turns: dict[int, int] = field(default_factory=dict)  # by link: pieces that a loop has fed
    closed: set[int] = field(default_factory=set)  # loops that have ended
