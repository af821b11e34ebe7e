"""Which prompt is computed next, and how much of it joins a step."""

from collections.abc import Callable
from typing import NamedTuple

from slipstream.schedule.queue import PRIORITY_LEVEL_S


class PendingPrefill(NamedTuple):
    """A prompt that is under way, or a waiting one (`slot` -1) that is compared with those."""

    slot: int
    id: int  # of its request
    left: int  # tokens still to compute; priced as if they stood at the beginning of the prompt
    arrival: tuple[float, int]  # its place in the queue: seconds, then a number
    priority: int  # a smaller one is more urgent


class PrefillOrder:
    """The prompts under way in the order in which they are computed.

    The first prompt goes on to its end unless more urgent work comes. A prompt's turn is its arrival plus the time that its
    remaining tokens take, at most half a level of priority. So the shortest of the prompts that came together is next, and no
    prompt waits for one that arrives when it could have ended already.

    A prompt overtakes the first one if it is as urgent and has less than half as many tokens left. The overtaking prompts,
    the shortest first, get half of the room, so they do not wait for a long one. Two prompts of similar length do not share:
    sharing would only make one of them end later.
    """

    def __init__(self, prompts: list[PendingPrefill], begun: int, cost: Callable[[float], float]):
        """`begun`: the request that was first until now. `cost(c)`: seconds of a token with c tokens before it."""
        self._begun = begun
        self._cost = cost
        self._prompts = prompts
        self._in_turn: list[PendingPrefill] = []  # empty: to be sorted
        self._overtaking: list[PendingPrefill] = []

    def add(self, prompt: PendingPrefill) -> None:
        """Adds a prompt that has just joined."""
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
        """Tokens still to compute in all prompts."""
        return sum(prompt.left for prompt in self._prompts)

    def longer_than(self, tokens: int) -> int:
        """How many prompts have more than `tokens` left to compute."""
        return sum(prompt.left > tokens for prompt in self._prompts)

    def _turn(self, prompt: PendingPrefill) -> tuple[float, int]:
        second, number = prompt.arrival
        if prompt.id != self._begun:
            second += min(prompt.left * self._cost(prompt.left / 2), PRIORITY_LEVEL_S / 2)
        return second, number

    def _overtakes(self, prompt: PendingPrefill) -> bool:
        first = self._in_turn[0]
        return 2 * prompt.left < first.left and prompt.priority <= first.priority

    def _place(self, prompt: PendingPrefill) -> tuple[int, float, int]:
        """A sort key in the order of computing. The first prompt and those that overtake it share each step."""
        if prompt.id == self._in_turn[0].id:
            return 0, 0.0, 0
        return (1, prompt.left, prompt.arrival[1]) if self._overtakes(prompt) else (2, *self._turn(prompt))

    def goes_before(self, id: int, waiting: PendingPrefill) -> bool:
        """Whether the prompt of request `id` is under way and would be computed before the waiting one if that joined.

        This is always true of the first prompt, because it is being computed now.
        """
        self._sort()
        under_way = next((p for p in self._in_turn if p.id == id), None)
        return under_way is not None and self._place(under_way) <= self._place(waiting)

    def cut(self, room: int) -> dict[int, int]:
        """How many tokens of `room` each slot gets, in the order of their chunks in the step."""
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
