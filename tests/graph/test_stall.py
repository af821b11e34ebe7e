"""Walks that the check accepts end; those that it refuses stall, where more pieces come than a window holds."""

import asyncio

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.errors import ConfigError
from slipstream.graph.chunks import Fixed
from slipstream.graph.conductor import Conductor, RequestFailed
from slipstream.graph.groups import LocalGroup
from slipstream.graph.model import Edge, Model, Stream, Walk, check
from slipstream.graph.rows import Result
from slipstream.graph.work import Work

from .toys import component

PIECES = 12  # that each component makes and the client gives, more than any window


def edge(source, target):
    return Edge(source, target)


def stream(source, target, window=4):
    return Stream(source, target, Fixed(1), window)


def toy(*links, role="function"):
    """The model of a walk over components named a to d, whose inputs take what the links bring."""
    inputs: dict[str, dict[str, str]] = {name: {} for name in "abcd"}
    for link in links:
        name, port = link.target.split(".")
        if name != "out":
            inputs[name][port] = "array/chunks" if isinstance(link, Stream) else "array"
    parts = [component(n, ports, {"y": "array"}, role=role) for n, ports in inputs.items() if ports]
    return Model("toy", tuple(parts), (Walk("w", links),))


REFUSED = [
    ([edge("in.x", "a.x"), stream("a.y", "b.x"), edge("a.y", "b.z"), edge("b.y", "out.y")], "a.y -> b.z", "a.y -> b.x"),
    ([stream("in.x", "b.x"), edge("in.x", "b.z"), edge("b.y", "out.y")], "in.x -> b.z", "in.x -> b.x"),
    (  # through another component
        [edge("in.x", "a.x"), stream("a.y", "b.x"), stream("b.y", "c.x"), edge("a.y", "c.z"), edge("c.y", "out.y")],
        "a.y -> c.z",
        "a.y -> b.x",
    ),
    (  # each waits for the other's end
        [
            edge("in.x", "a.x"), edge("in.x", "b.x"), stream("a.y", "c.x"), edge("b.y", "c.z"), stream("b.y", "d.x"),
            edge("a.y", "d.z"), edge("c.y", "out.c"), edge("d.y", "out.d"),
        ],
        "b.y -> c.z",
        "-> ",
    ),
    (  # what else the consumer needs waits for the producer's end
        [edge("in.x", "a.x"), stream("a.y", "d.x"), edge("a.y", "b.x"), stream("b.y", "d.z"), edge("d.y", "out.y")],
        "a.y -> b.x",
        "a.y -> d.x",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("links", "late", "full"), REFUSED)
def test_an_edge_that_waits_for_its_own_consumer_is_refused_with_what_to_change(links, late, full):
    with pytest.raises(ConfigError, match="write that stream as an Edge, or this edge as a Stream") as e:
        check(toy(*links))
    assert f"edge {late} would never come" in str(e.value) and full in str(e.value)
    assert not ends(toy(*links)), "and it does stall"


def test_a_language_model_is_not_held_back_by_its_consumers():
    lm = component("lm", {"p": "value"}, {"text": "text", "all": "text"}, role="language_model", step="")
    say = component("say", {"x": "text/chunks", "z": "text"}, {"y": "text"})
    links = (Edge("in.p", "lm.p"), Stream("lm.text", "say.x", Fixed(1)), Edge("lm.all", "say.z"), Edge("say.y", "out.y"))
    check(Model("m", (lm, say), (Walk("w", links),)))


def ends(model: Model) -> bool:
    """Whether a request ends. A component makes a piece for each that it gets, and `PIECES` of a whole input."""

    def step(rows):
        out = []
        for row in rows:
            left = row.branches[0] if row.branches[0] is not None else PIECES
            lone = not any(p.takes != "whole" for p in row.job.component.inputs.values())
            out.append(Result({"y": np.zeros(1)}, state=left - 1, again=lone and left > 1))
        return out

    async def main() -> bool:
        steps = {c.name: step for c in model.components}
        groups = [LocalGroup(Work(model, (name,), steps)) for name in steps]
        conductor = Conductor(model, groups, step_timeout=0.02)
        run = conductor.open("w")

        async def feed(port):
            for i in range(PIECES):
                await run.feed(port, np.zeros(1), i == PIECES - 1)

        fed = asyncio.gather(*map(feed, run.plan.given), return_exceptions=True)
        try:
            async for _ in run:
                pass
        except RequestFailed:
            return False
        finally:
            await fed
        return True

    return asyncio.run(asyncio.wait_for(main(), 60))


@st.composite
def walks(draw):
    names = "abcd"[: draw(st.integers(2, 4))]
    links, used = [], set()
    for i, name in enumerate(names):
        for port in "xz"[: draw(st.integers(1, 2))]:
            source = draw(st.sampled_from(["in.p", *(f"{n}.y" for n in names[:i])]))
            used.add(source[0])
            links.append(draw(st.sampled_from([edge, stream]))(source, f"{name}.{port}"))
    return [*links, *(Edge(f"{n}.y", f"out.{n}") for n in names if n not in used)]


@settings(max_examples=150, deadline=None)
@given(walks())
def test_a_walk_is_refused_exactly_where_it_stalls(links):
    model = toy(*links)
    try:
        check(model)
    except ConfigError as e:
        accepted = False
        assert "would never come" in str(e)
    else:
        accepted = True
    assert ends(model) == accepted
