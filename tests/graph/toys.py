"""Small components and a driver for tests of the graph."""

import os
import time

import numpy as np

from slipstream.graph.chunks import Fixed
from slipstream.graph.model import Component, Edge, Model, Port, Stream, Walk
from slipstream.graph.rows import Result
from slipstream.graph.work import Work


def component(name, inputs, outputs, role="function", **kw):
    ports = {p: Port(*k.split("/")) for p, k in inputs.items()}
    return Component(name, role, ports, outputs, step=kw.pop("step", "tests.graph.toys:unused"), **kw)


class Counter:
    """Emits start, start+1, ... one number a step; `upto` numbers, or for ever. Its state is the next number."""

    def __init__(self):
        self.batches = []

    def __call__(self, rows):
        self.batches.append([(r.id, r.walk) for r in rows])
        out = []
        for r in rows:
            n = r.branches[0] if r.branches[0] is not None else int(r.inputs["start"].data[0])
            upto = r.params.get("upto", 1 << 30)
            out.append(Result({"number": np.array([n])}, state=n + 1, again=n + 1 < upto, done=n + 1 >= upto))
        return out


class Echo:
    """Passes each chunk of its one input on, joined with nothing."""

    def __init__(self, port_in="x", port_out="y"):
        self.ports, self.seen = (port_in, port_out), []

    def __call__(self, rows):
        self.seen += [(r.id, r.inputs[self.ports[0]]) for r in rows if self.ports[0] in r.inputs]
        return [Result({self.ports[1]: r.inputs[self.ports[0]].data}) for r in rows]


class Adder:
    """A loop's body: adds 1 to what is fed back, says stop at `limit`."""

    def __call__(self, rows):
        out = []
        for r in rows:
            x = r.inputs["back"].data if "back" in r.inputs else r.inputs["x"].data
            limit = r.params.get("limit", 1 << 30)
            out.append(Result({"y": x + 1, "stop": bool(x[0] + 1 >= limit)}))
        return out


def drive(work: Work, limit=10_000):
    """Steps until nothing is ready. Fails if it never ends."""
    for _ in range(limit):
        taken = work.take()
        if taken is None:
            return
        name, rows = taken
        work.settle(rows, work.run(name, rows))
    raise AssertionError("the work never ends")


class Tone:
    """One array of `size` numbers per text, each the text's length; "slow" sleeps, "die" kills, "raise" and "bad" fail."""

    def __init__(self, size=8, name="tone"):
        self.size = size

    def __call__(self, rows):
        out = []
        for r in rows:
            text = r.inputs["text"].data.lower()
            if "die" in text:
                os.kill(os.getpid(), 9)
            if "raise" in text:
                raise RuntimeError("no tone for this")
            if "slow" in text:
                time.sleep(0.2)
            if "bad" in text:
                out.append(Result(error="not a text to say", refused=True))
                continue
            out.append(Result({"audio": np.full(self.size, len(text), np.int32)}))
        return out


def broken(**settings):
    raise FileNotFoundError("no weights here")


def words(**settings):
    def step(rows):
        return [Result({"word": r.inputs["text"].data.strip().upper()}) for r in rows]

    return step


def total(**settings):
    def step(rows):
        return [Result({"sum": np.array([float(r.inputs["audio"].data.sum())])}) for r in rows]

    return step


WORDS = component("words", {"text": "text/partial"}, {"word": "text"}, step="tests.graph.toys:words")
TONE = component("tone", {"text": "text/partial"}, {"audio": "array"}, role="codec", step="tests.graph.toys:Tone", max_rows=2)
SUM = component("sum", {"audio": "array"}, {"sum": "array"}, role="encoder", step="tests.graph.toys:total")
BROKEN = component("broken", {"text": "text"}, {"audio": "array"}, role="codec", step="tests.graph.toys:broken")
SAY = (Stream("in.text", "words.text"), Stream("words.word", "tone.text", Fixed(1, True)))
TOY = Model(
    "toy",
    (WORDS, TONE, SUM),
    (
        Walk("say", (*SAY, Stream("tone.audio", "out.audio"), Stream("words.word", "out.text"))),
        Walk("add", (*SAY, Edge("tone.audio", "sum.audio"), Edge("sum.sum", "out.sum"))),
    ),
)
UNREADY = Model("unready", (BROKEN,), (Walk("w", (Edge("in.text", "broken.text"), Edge("broken.audio", "out.audio"))),))
