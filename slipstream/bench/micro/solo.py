"""A leader of a group of one, in this process, with tokens of the simulated device; shared by the measurements here."""

from slipstream.device.sim import SimTokens
from slipstream.log.batch import Batch, InitSlot
from slipstream.rank.effects import Interpreter
from slipstream.rank.events import DeviceEffect, Launch, Poison, Prepare, Send, SendReply, SendToFront, Span, Wake
from slipstream.rank.leader import Leader


class Solo(Interpreter):
    """A subclass defines launches, messages and phases for its measurement. The requests here need no resources."""

    def __init__(self, leader: Leader, vocab: int):
        self.leader = leader
        self.tokens = SimTokens(leader.replica.limits.slots, vocab)

    def launch(self, batch: Batch) -> None:
        raise NotImplementedError

    def device(self, effect: DeviceEffect) -> None:
        if isinstance(effect, Launch):
            self.launch(effect.batch)
        elif isinstance(effect, InitSlot):
            self.tokens.init_slot(effect.slot, effect.request)
        # pages and states are empty here

    def send(self, effect: Send) -> None:
        """There are no followers."""

    def reply(self, effect: SendReply) -> None:
        """The leader notes its own."""

    def send_to_front(self, effect: SendToFront) -> None:
        """There is no front end."""

    def wake(self, effect: Wake) -> None:
        """Outcomes come one at a time, in order."""

    def span(self, effect: Span) -> None:
        """The phases are not timed."""

    def prepare(self, effect: Prepare) -> None:
        raise AssertionError(f"request {effect.id} needs resources")

    def poison(self, effect: Poison) -> None:
        raise AssertionError(effect.reason)
