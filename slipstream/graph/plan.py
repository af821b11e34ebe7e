"""One request's path through a walk: its components and links. Refuses plans that could stall or end early. Pure."""

from collections.abc import Collection
from dataclasses import dataclass
from functools import lru_cache

from slipstream.errors import BadRequest
from slipstream.graph.model import Link, Model, Walk


@dataclass(frozen=True)
class WalkPlan:
    """The components and links that a request runs. `links` are indexes into the walk's links, in its order."""

    walk: Walk
    given: tuple[str, ...]
    wanted: tuple[str, ...]
    components: tuple[str, ...]
    links: tuple[int, ...]

    def link(self, index: int) -> Link:
        return self.walk.links[index]


def make_plan(
    model: Model, walk_name: str, wanted: Collection[str] | None = None, given: Collection[str] | None = None
) -> WalkPlan:
    """The plan of a request with the inputs `given` and the outputs `wanted` (default: all of the walk's).

    Components and links that do not lead to a wanted output are left out. Raises BadRequest, naming walk, component and edge,
    if a component would wait for an input that is not given, if an input leads nowhere, or if no output is wanted.

    The request ends when every wanted output has ended. Each ends after its producer has seen the end of all its inputs, so a
    step that runs once per chunk cannot end the request early.
    """
    walk = model.walk_by_name.get(walk_name)
    if walk is None:
        raise BadRequest(f"model {model.name} has no walk {walk_name}; it has {', '.join(model.walk_by_name)}", "walk")
    outs, ins = walk.ports("out"), walk.ports("in")
    want = outs if wanted is None else tuple(o for o in outs if o in wanted)
    for name in wanted or ():
        if name not in outs:
            raise BadRequest(f"walk {walk.name} has no output {name}; it has {', '.join(outs)}", "modalities")
    if not want:
        raise BadRequest(f"walk {walk.name}: no output is requested, so the request would end at once", "modalities")
    have = ins if given is None else tuple(given)
    for name in have:
        if name not in ins:
            raise BadRequest(f"walk {walk.name} has no input {name}; it has {', '.join(ins)}", name)
    components, links = _needed(walk, want)
    for i in links:
        source, port = walk.links[i].source.split(".")
        if source == "in" and port not in have:
            target = walk.links[i].target
            raise BadRequest(
                f"walk {walk.name}: component {target.split('.')[0]} would wait forever: edge in.{port} -> {target} "
                f"carries an input that the request does not give",
                port,
            )
    unread = [p for p in have if not any(walk.links[i].source == f"in.{p}" for i in links)]
    if unread and given is not None:
        raise BadRequest(f"walk {walk.name}: input {unread[0]} leads to none of the outputs {', '.join(want)}", unread[0])
    return WalkPlan(walk, tuple(p for p in have if p not in unread), want, components, links)


@lru_cache(maxsize=256)
def _needed(walk: Walk, wanted: tuple[str, ...]) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Components that lead to the wanted outputs, and the links between them."""
    need: set[str] = set()
    todo = [link.source.split(".")[0] for link in walk.links if link.target in {f"out.{w}" for w in wanted}]
    while todo:
        name = todo.pop()
        if name == "in" or name in need:
            continue
        need.add(name)
        todo += [link.source.split(".")[0] for link in walk.links if link.target.startswith(name + ".")]
    targets = need | {f"out.{w}" for w in wanted}
    links = []
    for i, link in enumerate(walk.links):
        source, target = link.source.split(".")[0], link.target.split(".")[0]
        if (target in targets or link.target in targets) and (source == "in" or source in need):
            links.append(i)
    return tuple(n for n in walk.components if n in need), tuple(links)
