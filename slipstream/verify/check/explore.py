"""Breadth-first search through a model's worlds, so that the first violation found has the shortest interleaving.

With two ranks all interleavings are explored. With more, followers that differ only in name are one, and a follower's own steps
are merged. Such a step changes only the follower, its part of the device and its messages to the leader, which the leader may
receive at any later time. So taking the step at once loses no outcome. (That the order of a
follower's own steps does not matter is what the exhaustive search at two ranks shows.) A rank that may die is never merged.
"""

from collections import deque
from collections.abc import Hashable
from typing import NamedTuple

from slipstream.verify.check.model import Model
from slipstream.verify.check.world import Action, World
from slipstream.verify.common.memory import Violation


class Found(NamedTuple):
    """What a search has seen. `trace`: the actions of the shortest way to the violation."""

    states: int
    transitions: int
    entries: int
    complete: bool
    violation: str = ""
    trace: tuple[Action, ...] = ()


def explore(model: Model, merged: bool, most: int = 5_000_000) -> Found:
    """Visits every world, or `most` of them. `merged`: take followers' own steps at once."""
    parents: list[tuple[int, tuple[Action, ...]]] = []
    seen: dict[Hashable, None] = {}
    queue: deque[tuple[int, World]] = deque()
    transitions = 0

    def fail(at: int, actions: tuple[Action, ...], text: str) -> Found:
        path = actions
        while at >= 0:
            at, before = parents[at]
            path = before + path
        return Found(len(seen), transitions, model.entries, False, text, path)

    def visit(at: int, actions: tuple[Action, ...], world: World) -> None:
        key = model.key(world)
        if key not in seen:
            seen[key] = None
            queue.append((len(parents), world))
            parents.append((at, actions))

    try:
        world = model.start()
        world, actions = settle(model, world) if merged else (world, ())
    except Violation as e:
        return Found(1, 0, model.entries, False, str(e))
    visit(-1, actions, world)
    while queue:
        at, world = queue.popleft()
        actions = model.actions(world)
        if not actions:
            try:
                model.check_end(world)
            except Violation as e:
                return fail(at, (), str(e))
        for action in actions:
            transitions += 1
            path: list[Action] = [action]
            try:
                after = model.apply(world, action)
                if merged:
                    after, more = settle(model, after, path)
            except Violation as e:
                return fail(at, tuple(path), str(e))
            visit(at, tuple(path), after)
        if len(seen) > most:
            return Found(len(seen), transitions, model.entries, False)
    return Found(len(seen), transitions, model.entries, True)


def settle(model: Model, world: World, path: list[Action] | None = None) -> tuple[World, tuple[Action, ...]]:
    """Lets followers take all their own steps. `path` gets the steps, that of a violation last."""
    taken = path if path is not None else []
    free = [i for i in range(1, model.size) if not (model.case.dies and i == model.size - 1)]
    moved = True
    while moved and not world.poisoned:
        moved = False
        for i in free:
            while not world.sites[i].dead and (actions := model.local(world, i)):
                if actions[0][0] in ("copied",):
                    actions = [a for a in actions if a[0] != "copied"]
                    if not actions:
                        break
                taken.append(actions[0])
                world = model.apply(world, actions[0])
                moved = True
    return world, tuple(taken)
