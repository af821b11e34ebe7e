"""Detects a stalled request: nothing has moved for long, and every group reports that nothing can. No I/O."""

import time
from collections.abc import Collection
from typing import Any


class StallWatch:
    """The watch of one request. Groups are asked for its state, and answer after all that they had sent before. So if all
    groups have answered and nothing moved in between, no message is on its way either.
    """

    def __init__(self, inputs: Collection[str]):
        self.since = time.monotonic()  # time of the last move
        self.unfed = set(inputs)  # inputs that the client has not ended
        self.blocked = 0  # calls of `feed` that wait for room
        self._waits: dict[Any, dict[str, str]] = {}  # by group: its answer since the last move

    def moved(self) -> None:
        self.since = time.monotonic()
        self._waits.clear()

    def stands_since(self, seconds: float) -> bool:
        """Whether nothing has moved for that long and no input of the client is missing."""
        return time.monotonic() - self.since >= seconds and not (self.unfed and not self.blocked)

    def answer(self, group: Any, moves: bool, waits: dict[str, str]) -> None:
        """A group's answer: a step is running or due, or what each of its components waits for."""
        if moves:
            self.moved()
        else:
            self._waits[group] = waits

    def verdict(self, groups: Collection[Any], components: Collection[str]) -> tuple[str, str] | None:
        """(component, why it has stalled) once all of the request's `groups` have reported that nothing moves."""
        if not all(group in self._waits for group in groups):
            return None
        waits = {name: why for answer in self._waits.values() for name, why in answer.items()}
        stuck = [f"{name} {waits[name]}" for name in components if name in waits]
        return (stuck[0].split()[0], "; ".join(stuck)) if stuck else None
