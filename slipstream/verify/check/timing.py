"""The critical path of a step, walked in the model: how many messages lie between a step's end and the next one's start.

The walk takes the model's own actions in the order of time: a message takes one unit, a step a thousand, and a host nothing.
"""

from typing import NamedTuple

from slipstream.log.caches import one_table
from slipstream.verify.check.cases import Case, request
from slipstream.verify.check.model import Model
from slipstream.verify.check.world import Action, Protocol, World

STEP = 1000.0
SKIP = 3  # steps at the beginning and the end that are not steady


class Path(NamedTuple):
    hops: int  # messages on the way from a step's end to the next one's start
    ahead: bool  # whether each step was queued on every rank before the one before it had ended


def critical_path(protocol: Protocol, size: int) -> Path:
    """Of steady decoding of two requests."""
    tokens = tuple(range(1, 13))
    case = Case("steady", (request(0, 1, 12), request(1, 1, 12)), (tokens, tokens), one_table(40, 2, 16, 2))
    model = Model(case, protocol, size)
    walk = Walk(model)
    walk.run()
    gaps = walk.gaps[SKIP:-SKIP]
    return Path(round(max(late for late, _ in gaps)), all(ahead for _, ahead in gaps))


class Walk:
    def __init__(self, model: Model):
        self.model = model
        self.now = 0.0
        self.free_at = 0.0  # when the device ends its last step
        self.gaps: list[tuple[float, bool]] = []  # (idle time before a step, whether it was queued before the last one's end)
        none: list[float] = []
        self.inbox = [none.copy() for _ in range(model.size)]
        self.back = [none.copy() for _ in range(model.size)]
        self.arrived = [none.copy() for _ in range(model.size)]
        self.world = model.start()
        self._note(World((), ()), self.world)

    def run(self) -> None:
        while actions := self._actions():
            times = [(self._time(a), a[0] != "plan", n) for n, a in enumerate(actions)]
            when, _, n = min(times)
            self.now = max(self.now, when)
            before, action = self.world, actions[n]
            for queues, kind in ((self.inbox, "read"), (self.back, "hear"), (self.arrived, "arrive")):
                if action[0] == kind:
                    queues[action[1]].pop(0)
            after = self.model.apply(before, action)
            self._note(before, after)
            self.world = after
        self.model.check_end(self.world)

    def _actions(self) -> list[Action]:
        """All actions but a plan that would come to nothing."""
        actions = self.model.actions(self.world)
        return [a for a in actions if a[0] != "plan" or self.model.apply(self.world, a) != self.world]

    def _time(self, action) -> float:
        queues = {"read": self.inbox, "hear": self.back, "arrive": self.arrived}.get(action[0])
        return self.now if queues is None else queues[action[1]][0]

    def _note(self, before: World, after: World) -> None:
        """Gives times to what the action has put on its way."""
        begins = False
        for i, site in enumerate(after.sites):
            for times, things in ((self.inbox[i], site.inbox), (self.back[i], site.back)):
                times += [self.now + 1] * (len(things) - len(times))
            new = len(site.arrived) - len(self.arrived[i])
            if new and not begins:
                begins = True
                self.gaps.append((max(0.0, self.now - self.free_at), self.now < self.free_at))
                self.free_at = max(self.now, self.free_at) + STEP
            self.arrived[i] += [self.free_at] * new
