"""A step's inputs and results, and a group's state of a request between steps. Values and plain state, no behaviour."""

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
    last: bool  # every input has ended, and these are the last chunks
    job: "Job" = field(repr=False)


@dataclass(eq=False)
class Result:
    """A step's result for a row."""

    outputs: dict[str, Any] = field(default_factory=dict)  # by port; absent or None if there is no value
    state: Any = None
    branches: list[Any] | None = None  # the states of a forked row, which replace `state`
    again: bool = False  # step this row again without new input
    done: bool = False  # the row has ended
    error: str | None = None  # the request ends with this message
    refused: bool = False  # whether the request's content is at fault
    param: str | None = None  # the parameter at fault


StepFunction = Callable[[Sequence[Row]], Sequence[Result]]


@dataclass(eq=False)
class Job:
    """One component's part of one request."""

    request: "ComponentRequest"
    component: Component
    cutters: dict[str, Cutter]
    looped: frozenset[str]  # inputs that only a loop feeds; not needed for the first step
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
    sizes: dict[int, int] = field(default_factory=dict)  # by link: the size of the gathered pieces, see `chunks.size_of`
    turns: dict[int, int] = field(default_factory=dict)  # by link: pieces that a loop has fed
    closed: set[int] = field(default_factory=set)  # loops that have ended
