"""An interleaving in readable lines: what happened, and what it led to."""

from typing import Any

from slipstream.log.entries import Entry, Forget, Prepared, Reply, RequestBody
from slipstream.verify.check.model import Model
from slipstream.verify.check.world import Action, World
from slipstream.verify.common.memory import Violation


def narrate(model: Model, trace: tuple[Action, ...]) -> list[str]:
    """One line for each action of the trace, with what the acting rank queued and sent."""
    world = model.start()
    lines: list[str] = []
    if model.case.all_at_once:
        lines.append(f"{len(model.case.requests)} requests are there from the start{consequences(model, None, world)}")
    for action in trace:
        text = act(model, world, action)
        try:
            after = model.apply(world, action)
        except Violation as e:
            lines.append(f"{text}: {e}")
            return lines
        lines.append(text + consequences(model, world, after))
        world = after
    try:
        model.check_end(world)
    except Violation as e:
        lines.append(str(e))
    return lines


def act(model: Model, world: World, action: Action) -> str:
    kind, *what = action
    if kind == "submit":
        return f"request {what[0]} comes"
    if kind == "abort":
        return f"the client of request {what[0]} leaves"
    if kind == "plan":
        return "the leader plans ahead of the running step"
    if kind == "read":
        return f"rank {what[0]} reads {message(model.thing(world.sites[what[0]].inbox[0]))}"
    if kind == "hear":
        return f"the leader hears from rank {what[0]}: {message(model.thing(world.sites[what[0]].back[0]))}"
    if kind == "arrive":
        seq = model.thing(world.sites[what[0]].arrived[0]).name[1]
        return f"the outcome of entry {seq} arrives on rank {what[0]}"
    if kind == "compiled":
        return f"rank {what[0]} has compiled the grammar of request {what[1]}"
    if kind == "copied":
        return f"rank {what[0]} has copied the leased pages of request {what[1]}"
    if kind == "expire":
        return f"by the clock of rank {what[0]} the time of request {what[1]} is over"
    if kind == "garble":
        i, how = what
        return f"the next reply of rank {i} {'comes twice' if how == 'twice' else 'has a wrong digest'}"
    if kind == "die":
        return f"rank {what[0]} dies"
    return f"the supervisor finds rank {what[0]} dead and ends the group"


def message(m: Any) -> str:
    if isinstance(m, Entry):
        commands = [
            f"{type(c).__name__.lower()} {' '.join(str(getattr(c, f)) for f in c.__struct_fields__)}" for c in m.commands
        ]
        inside = "; ".join([*commands, *(["a step"] if m.step is not None else [])])
        return f"entry {m.seq} ({inside or 'nothing'}, settles through {m.settled_to})"
    if isinstance(m, RequestBody):
        return f"the body of request {m.request.id}"
    if isinstance(m, Forget):
        return f"to forget request {m.id}"
    if isinstance(m, Reply):
        return f"it has applied entry {m.seq}"
    if isinstance(m, Prepared):
        return f"it has prepared request {m.id}"
    fields = ", ".join(f"{name} {getattr(m, name)}" for name in m.__struct_fields__ if name != "rank")
    return f"{type(m).__name__.lower()} ({fields})"


def consequences(model: Model, before: World | None, after: World) -> str:
    """What an action made ranks queue and send."""
    parts: list[str] = []
    for i in range(len(after.sites)):
        machine, old = model.machine(after, i), None
        if before is not None:
            old = model.machine(before, i)
        launched = [f.seq for f in machine.replica.flights if old is None or f.seq not in {x.seq for x in old.replica.flights}]
        if launched:
            parts.append(f"rank {i} launches entry {', '.join(map(str, launched))}")
        pages, was = machine.replica.cache, None if old is None else old.replica.cache
        if was is not None and pages.available > was.available:
            parts.append(f"rank {i} has {pages.available} pages free")
    sent = after.sites[1].inbox[0 if before is None else len(before.sites[1].inbox) :]
    if sent and (before is None or after.sites[0] != before.sites[0]):
        parts.append("the leader sends " + " and ".join(message(model.thing(m)) for m in sent))
    return " -> " + "; ".join(parts) if parts else ""
