"""What clients get from a group, and what they may get: judged from outside, without asking the machines."""

from typing import Any

from slipstream.log.entries import Admit, Drop, Entry
from slipstream.verify.check.world import ABORTED, LIVE, OVER, Client, World
from slipstream.verify.common.memory import Violation


def with_client(world: World, i: int, client: Client) -> World:
    return world._replace(front=(*world.front[:i], client, *world.front[i + 1 :]))


def end_group(world: World) -> World:
    """The supervisor ends the group: every client gets an error."""
    front = tuple(c._replace(phase=OVER) if c.phase in (LIVE, ABORTED) else c for c in world.front)
    return world._replace(front=front, poisoned=True)


class Clients:
    """The answers that requests must get, and the check of the messages that they do get."""

    def __init__(self, expected: list[tuple[list[int], str]], own_clocks: bool):
        """`own_clocks`: ranks may end requests by themselves, so an end needs neither an abort nor a drop."""
        self.expected, self.own_clocks = expected, own_clocks

    def see(self, world: World, entry: Entry) -> World:
        """Notes which requests the log admits and drops."""
        for command in entry.commands:
            if isinstance(command, Admit):
                world = with_client(world, command.id, world.front[command.id]._replace(admitted=True))
            elif isinstance(command, Drop):
                world = with_client(world, command.id, world.front[command.id]._replace(drop=entry.seq))
        return world

    def tell(self, world: World, kind: str, id: int, what: Any) -> World:
        """A request gets a token or its end. Raises Violation if it must not."""
        if not 0 <= id < len(world.front) or world.front[id].phase not in (LIVE, ABORTED):
            raise Violation(f"request {id} hears {kind} {what} before its start or after its end")
        client = world.front[id]
        received = client.received
        tokens, reason = self.expected[id]
        if kind == "token":
            if received >= len(tokens) or tokens[received] != what:
                raise Violation(f"request {id} gets token {what} at {received}, not one of {tokens}")
            return with_client(world, id, client._replace(received=received + 1))
        if what == "abort":
            if client.phase != ABORTED and not self.own_clocks:
                raise Violation(f"request {id} was never aborted")
        elif received != len(tokens) or what != reason:
            raise Violation(f"request {id} ends with {what!r} after {received} of {len(tokens)} tokens; {reason!r} is right")
        if client.admitted and not self.own_clocks:
            self._acknowledged(world, id)
        return with_client(world, id, Client(OVER, received))

    def _acknowledged(self, world: World, id: int) -> None:
        """Checks that a client gets an end only after the leader has every rank's answer to the entry of the drop."""
        drop = world.front[id].drop
        missing = [i for i, site in enumerate(world.sites) if drop < 0 or site.heard < drop]
        if missing:
            entry = f"entry {drop} drops it" if drop >= 0 else "no entry drops it"
            raise Violation(f"request {id} hears of its end; {entry}, and ranks {missing} have not acknowledged that")
