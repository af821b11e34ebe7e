"""Whose prompt is computed next, and how much of it in a step."""

from collections.abc import Callable
from typing import NamedTuple

from slipstream.schedule.queue import AGEING


class PendingPrefill(NamedTuple):
    """A prompt that is under way, or one that waits (`slot` -1) to be compared with those."""

    slot: int
    id: int  # of its request
    left: int  # tokens that are still to be computed; priced as if they stood at its beginning
    arrival: tuple[float, int]  # its place in the queue it came from, in seconds; then its number
    priority: int  # a smaller one is more urgent


class PrefillOrder:
    """The prompts under way in the order in which they are computed.

    The first goes on to its end unless more urgent work comes. A prompt's turn is as long after its arrival as the rest of it
    takes, half a level of priority at most: of those that came together the shortest is next, and none waits for what arrives
    when it could have ended. Prompts as urgent as the first that have less than half as much left overtake it with half of the
    room, the shortest first: they need not wait for it, while of two about equally long ones both would only end later, were
    they to share.
    """

    def __init__(self, prompts: list[PendingPrefill], begun: int, cost: Callable[[float], float]):
        """`begun`: the request that was the first until now. `cost(c)`: seconds of a token with c tokens before it."""
        self._begun = begun
        self._cost = cost
        self._prompts = prompts
        self._in_turn: list[PendingPrefill] = []  # empty: to be sorted
        self._overtaking: list[PendingPrefill] = []

    def add(self, prompt: PendingPrefill) -> None:
        """One more is under way."""
        self._prompts.append(prompt)
        self._in_turn = []

    def _sort(self) -> None:
        if not self._in_turn:
            self._in_turn = sorted(self._prompts, key=self._turn)
            self._overtaking = sorted(filter(self._overtakes, self._in_turn), key=self._place)

    @property
    def first(self) -> PendingPrefill | None:
        self._sort()
        return self._in_turn[0] if self._in_turn else None

    @property
    def left(self) -> int:
        """Tokens that are still to be computed, of all."""
        return sum(prompt.left for prompt in self._prompts)

    def longer_than(self, tokens: int) -> int:
        """How many prompts have more left than that."""
        return sum(prompt.left > tokens for prompt in self._prompts)

    def _turn(self, prompt: PendingPrefill) -> tuple[float, int]:
        second, number = prompt.arrival
        if prompt.id != self._begun:
            second += min(prompt.left * self._cost(prompt.left / 2), AGEING / 2)
        return second, number

    def _overtakes(self, prompt: PendingPrefill) -> bool:
        first = self._in_turn[0]
        return 2 * prompt.left < first.left and prompt.priority <= first.priority

    def _place(self, prompt: PendingPrefill) -> tuple[int, float, int]:
        """Sorts like the order in which prompts are computed; the first and those that overtake it share each step."""
        if prompt.id == self._in_turn[0].id:
            return 0, 0.0, 0
        return (1, prompt.left, prompt.arrival[1]) if self._overtakes(prompt) else (2, *self._turn(prompt))

    def goes_before(self, id: int, waiting: PendingPrefill) -> bool:
        """Whether request `id` has a prompt under way that is computed before the waiting one would be, were that to join.

        The first always is, as it is being computed now.
        """
        self._sort()
        under_way = next((p for p in self._in_turn if p.id == id), None)
        return under_way is not None and self._place(under_way) <= self._place(waiting)

    def cut(self, room: int) -> dict[int, int]:
        """How many tokens each slot gets of `room`, in the order in which their chunks stand in the step."""
        self._sort()
        counts: dict[int, int] = {}
        if self._overtaking and room > 0:
            first = self._in_turn[0]
            counts[first.slot] = min(first.left, room - room // 2)
            room -= counts[first.slot]
        for prompt in (*self._overtaking, *self._in_turn):
            if room <= 0:
                break
            had = counts.get(prompt.slot, 0)
            counts[prompt.slot] = had + min(prompt.left - had, room)
            room -= counts[prompt.slot] - had
        return counts
