"""Checks whether a walk can stall: starts and ends of components wait for others, and a cycle of waits never resolves.

A stream holds `window` pieces that its consumer has not used yet, so a producer reaches its end only if every
component on the way of its pieces starts. A component with an `Edge` to it starts only when that edge's producer has ended.
Pure.
"""

from collections.abc import Collection, Iterator
from typing import NamedTuple

from slipstream.graph.chunks import Policy, Whole


class Connection(NamedTuple):
    """A link by its two places, written "component.port"."""

    source: str
    target: str

    @property
    def producer(self) -> str:
        """The component; each input of the client is a producer of its own."""
        return self.source if self.source.startswith("in.") else self.source.split(".")[0]

    @property
    def consumer(self) -> str:
        return self.target.split(".")[0]


def window_fault(policy: Policy, window: int, piece: int) -> str | None:
    """Why a full window may lack a unit of the next chunk, and what to change; or None. `piece`: the least units in a piece."""
    if isinstance(policy, Whole):
        return "Whole() does not use a piece before the last one has come, so the window fills up; use Edge"
    if piece < 1:
        return "piece must be at least 1"
    if (window - 1) * piece + 1 >= policy.need:  # of the oldest piece, all units but one may be used
        return None
    least = -(-(policy.need - 1) // piece) + 1
    return (
        f"it would stall: a chunk of {policy} takes up to {policy.need} units, and {window} pieces of {piece} may hold fewer; "
        f"window must be at least {least}, or piece= must give the least number of units in a piece"
    )


class Order:
    """The events before a component of a walk starts or ends. Consumers never hold back the `free` components."""

    def __init__(self, edges: Collection[Connection], streams: Collection[Connection], free: Collection[str]):
        self.edges, self.streams, self.free = edges, streams, free

    def fault(self) -> str | None:
        """An edge that waits for its own consumer, and what to change; or None."""
        for edge in self.edges:
            full = self._held_by(edge)
            if full:
                return (
                    f"edge {edge.source} -> {edge.target} would never come: it waits for the end of {edge.producer}, which "
                    f"waits for room in the stream {full.source} -> {full.target}, which waits for the start of "
                    f"{edge.consumer}; write that stream as an Edge, or this edge as a Stream"
                )
        return None

    def _held_by(self, edge: Connection) -> Connection | None:
        """The stream that fills up before the edge's producer can end, because the edge's consumer has not started."""
        todo: list[tuple[bool, str, Connection | None]] = [(True, edge.producer, None)]
        seen: set[tuple[bool, str]] = set()
        while todo:
            ends, name, by = todo.pop()
            if (ends, name) == (False, edge.consumer):
                return by
            if (ends, name) not in seen:
                seen.add((ends, name))
                todo += [(e, n, stream or by) for e, n, stream in self._before(ends, name)]
        return None

    def _before(self, ends: bool, name: str) -> Iterator[tuple[bool, str, Connection | None]]:
        """The events before the end (else the start) of a component, each with the stream that causes the wait."""
        yield from ((True, c.producer, None) for c in self.edges if c.consumer == name)
        yield from ((ends, c.producer, None) for c in self.streams if c.consumer == name)
        if not ends:
            return
        yield False, name, None
        if name not in self.free:
            for stream in self.streams:
                if stream.producer == name:
                    yield from ((False, other, stream) for other in self._flow(stream.consumer))

    def _flow(self, first: str) -> set[str]:
        """The components that must start before pieces flow through `first`: its consumers, and their other producers."""
        todo, seen = [first], set()
        while todo:
            name = todo.pop()
            if name in seen:
                continue
            seen.add(name)
            todo += [c.producer for c in self.streams if c.consumer == name]
            if name not in self.free:
                todo += [c.consumer for c in self.streams if c.producer == name]
        return seen
