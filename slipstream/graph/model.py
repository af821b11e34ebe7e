"""A model as a value: components, the edges between them, the walks over them. Pure; `check` names what does not fit.

A place is written "component.port". In a walk, "in.NAME" is an input from the client and "out.NAME" an output to it.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property

from slipstream.errors import ConfigError
from slipstream.graph.chunks import Fixed, Policy, Whole, faults
from slipstream.graph.stall import Connection, Order, window_fault

KINDS = ("text", "array", "value")  # texts; numpy arrays cut along their first axis; anything msgpack can carry, never cut
ROLES = ("function", "encoder", "autoregressive", "codec", "language_model")
TAKES = ("whole", "chunks", "partial")


@dataclass(frozen=True)
class Port:
    """An input: the kind of its values, and whether it takes them whole, in chunks of exact size, or in pieces of any size."""

    kind: str
    takes: str = "whole"


@dataclass(frozen=True)
class Component:
    """One module with a step function over rows of requests.

    `step` is "package.module:callable"; called once in the group's process with the component's settings, it returns the step
    function (see `graph/rows.py`). A "language_model" has no step: its group is served by the log. A "function" runs in the
    front end's process and must be quick. A component that `closes` is stepped once more, without input, if its inputs end
    after its last step. `step_ms` is the time of its longest step that cannot be split, on the machine it is meant for.
    """

    name: str
    role: str
    inputs: dict[str, Port]
    outputs: dict[str, str]  # port -> kind
    step: str = ""
    max_rows: int = 8
    step_ms: float = 0.0
    closes: bool = False


@dataclass(frozen=True)
class Edge:
    """Carries an output whole: the producer's group gathers its pieces and sends them once, at the end."""

    source: str
    target: str


@dataclass(frozen=True)
class Stream:
    """Carries an output in pieces, at most `window` of them unread at a time, cut for the consumer by `policy`.

    `piece` is the least number of units in a piece, except the last one. A window must hold the units of a chunk.
    """

    source: str
    target: str
    policy: Policy = Fixed(1, allow_partial=True)
    window: int = 4
    piece: int = 1


@dataclass(frozen=True)
class Until:
    """When a loop ends: after `steps` turns, or earlier at a true value of the source component's output `signal`."""

    steps: int
    signal: str | None = None


@dataclass(frozen=True)
class Loop:
    """Feeds an output back to an input of the same group, one piece a turn."""

    source: str
    target: str
    until: Until | None = None


Link = Edge | Stream | Loop


@dataclass(frozen=True)
class Fork:
    """After its first step, a row of this component has `branches` copies of its state, and each step gets them together."""

    component: str
    branches: int


@dataclass(frozen=True)
class Walk:
    """One path of requests through a model. `components` are in the order in which the links name them."""

    name: str
    links: tuple[Link, ...]
    forks: tuple[Fork, ...] = ()

    @cached_property
    def components(self) -> tuple[str, ...]:
        names = (place.split(".")[0] for link in self.links for place in (link.source, link.target))
        return tuple(dict.fromkeys(n for n in names if n not in ("in", "out")))

    def ports(self, end: str) -> tuple[str, ...]:
        """Names of the client's inputs ("in") or outputs ("out")."""
        places = (link.source if end == "in" else link.target for link in self.links)
        return tuple(dict.fromkeys(p.split(".")[1] for p in places if p.startswith(end + ".")))


@dataclass(frozen=True)
class Model:
    """A composite model as its author writes it; `check` raises if it cannot run."""

    name: str
    components: tuple[Component, ...]
    walks: tuple[Walk, ...]
    settings: dict[str, dict] = field(default_factory=dict)  # by component: the settings for its step's builder

    @cached_property
    def by_name(self) -> dict[str, Component]:
        return {c.name: c for c in self.components}

    @cached_property
    def walk_by_name(self) -> dict[str, Walk]:
        return {w.name: w for w in self.walks}


def policy_of(link: Link) -> Policy:
    """The policy that cuts a link's values for its consumer."""
    match link:
        case Stream(policy=policy):
            return policy
        case Loop():
            return Fixed(1, allow_partial=True)
    return Whole()


def check(model: Model) -> None:
    """Raises ConfigError, naming component and edge, for a model that could not run. Called at start, before anything loads."""
    if len(model.by_name) != len(model.components):
        raise ConfigError(f"model {model.name}: two components have one name, {_repeated(c.name for c in model.components)}")
    for component in model.components:
        _check_component(component)
    if len(model.walk_by_name) != len(model.walks):
        raise ConfigError(f"model {model.name}: two walks have one name, {_repeated(w.name for w in model.walks)}")
    for walk in model.walks:
        _check_walk(model, walk)


def _repeated(names: Iterable[str]) -> str:
    return next(name for name, count in Counter(names).items() if count > 1)


def _check_component(c: Component) -> None:
    if c.name in ("in", "out") or not c.name.replace("_", "").isalnum():
        raise ConfigError(f"component {c.name!r}: the name must be letters, digits and _, and neither in nor out")
    if c.role not in ROLES:
        raise ConfigError(f"component {c.name}: role {c.role!r} is not one of {', '.join(ROLES)}")
    if not c.inputs or not c.outputs:
        raise ConfigError(f"component {c.name}: it needs an input and an output")
    for port, p in c.inputs.items():
        if p.kind not in KINDS:
            raise ConfigError(f"component {c.name}: input {port} carries {p.kind!r}, which is not one of {', '.join(KINDS)}")
        if p.takes not in TAKES:
            raise ConfigError(f"component {c.name}: input {port} takes {p.takes!r}, which is not one of {', '.join(TAKES)}")
    for port, kind in c.outputs.items():
        if kind not in KINDS:
            raise ConfigError(f"component {c.name}: output {port} carries {kind!r}, which is not one of {', '.join(KINDS)}")
    if c.max_rows < 1:
        raise ConfigError(f"component {c.name}: max_rows must be at least 1")
    if bool(c.step) == (c.role == "language_model"):
        raise ConfigError(f"component {c.name}: a {c.role} {'has no' if c.step else 'needs a'} step")


def _check_walk(model: Model, walk: Walk) -> None:
    for link in walk.links:
        fault = _link_fault(model, link)
        if fault:
            raise ConfigError(f"walk {walk.name}: edge {link.source} -> {link.target}: {fault}")
    fed: dict[str, str] = {}
    for link in walk.links:
        if isinstance(link, Loop):
            continue
        if link.target in fed:
            raise ConfigError(f"walk {walk.name}: {link.target} is fed by {fed[link.target]} and by {link.source}")
        fed[link.target] = link.source
    looped = {link.target for link in walk.links if isinstance(link, Loop)}
    for name in walk.components:
        missing = [p for p in model.by_name[name].inputs if f"{name}.{p}" not in fed and f"{name}.{p}" not in looped]
        if missing:
            raise ConfigError(
                f"walk {walk.name}: component {name}: no edge feeds its input {missing[0]}, so it would wait forever"
            )
        if all(f"{name}.{p}" not in fed for p in model.by_name[name].inputs):
            raise ConfigError(f"walk {walk.name}: component {name}: only loops feed it, so it would never start")
    _check_order(walk)
    if fault := _order(model, walk).fault():
        raise ConfigError(f"walk {walk.name}: {fault}")
    for fork in walk.forks:
        if fork.component not in walk.components or fork.branches < 2:
            raise ConfigError(f"walk {walk.name}: fork of {fork.component}: no such component here, or fewer than 2 branches")
    if not walk.ports("in") or not walk.ports("out"):
        raise ConfigError(f"walk {walk.name}: it needs an edge from in. and one to out.")


def _link_fault(model: Model, link: Link) -> str | None:
    ends = []
    for place, table in ((link.source, "outputs"), (link.target, "inputs")):
        name, _, port = place.partition(".")
        if not port:
            return f"{place!r} must be written component.port"
        if name in ("in", "out"):
            if (name == "in") != (table == "outputs"):
                return f"{place} is at the wrong end of the edge"
            ends.append(None)
            continue
        if name not in model.by_name:
            return f"there is no component {name}"
        ports = getattr(model.by_name[name], table)
        if port not in ports:
            return f"component {name} has no {table[:-1]} {port}; it has {', '.join(ports)}"
        ends.append(ports[port])
    source, target = ends
    if source and target and source != target.kind:
        return f"it would carry {source} to an input that takes {target.kind}"
    if isinstance(link, Stream):
        return _stream_fault(link, source, target)
    if isinstance(link, Loop):
        return _loop_fault(model, link)
    return None


def _stream_fault(link: Stream, source: str | None, target: Port | None) -> str | None:
    if fault := faults(link.policy):
        return fault
    if link.window < 1:
        return "window must be at least 1"
    if target and (fault := window_fault(link.policy, link.window, link.piece)):
        return fault
    if source == "value" or (target and target.kind == "value"):
        return "a value cannot be streamed; use Edge"
    if target and target.takes == "whole":
        return f"{link.target} takes its input whole; use Edge"
    partial = isinstance(link.policy, Fixed) and link.policy.allow_partial
    if target and partial and target.takes != "partial":
        return f"{link.target} takes chunks of full size, and the policy allows partial ones"
    return None


def _loop_fault(model: Model, link: Loop) -> str | None:
    if "in" in (link.source.split(".")[0], link.target.split(".")[0]) or link.target.startswith("out."):
        return "a loop goes from a component to a component"
    if link.until is None or link.until.steps < 1:
        return "a loop needs a stop condition: until=Until(steps) with steps of at least 1"
    outputs = model.by_name[link.source.split(".")[0]].outputs
    if link.until.signal and link.until.signal not in outputs:
        return f"the stop signal {link.until.signal} is not an output of {link.source.split('.')[0]}"
    return None


def _check_order(walk: Walk) -> None:
    """Refuses a cycle of edges that are not loops, since each of its components would wait for another."""
    left: dict[str, set[str]] = {name: set() for name in walk.components}
    for link in walk.links:
        source, target = link.source.split(".")[0], link.target.split(".")[0]
        if target in left and not isinstance(link, Loop):
            left[target].add(source)
    while left:
        free = [n for n, before in left.items() if not before & left.keys()]
        if not free:
            raise ConfigError(
                f"walk {walk.name}: components {', '.join(left)} wait for each other; write the edge back as a Loop"
            )
        for n in free:
            del left[n]


def _order(model: Model, walk: Walk) -> Order:
    """A language model writes at its own pace: its streams have no credit (see `graph/groups.py`)."""
    inner = [link for link in walk.links if not link.target.startswith("out.")]
    edges = [Connection(link.source, link.target) for link in inner if isinstance(link, Edge)]
    streams = [Connection(link.source, link.target) for link in inner if isinstance(link, Stream)]
    return Order(edges, streams, [c.name for c in model.components if c.role == "language_model"])
