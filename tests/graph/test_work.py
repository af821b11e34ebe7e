import numpy as np
import pytest

from slipstream.errors import BadRequest
from slipstream.graph.chunks import Fixed
from slipstream.graph.messages import Abort, Done, Failed, Feed, Open, Piece, Stop, Took
from slipstream.graph.model import Edge, Fork, Loop, Model, Stream, Until, Walk, check
from slipstream.graph.rows import Result
from slipstream.graph.work import Work

from .toys import Adder, Counter, Echo, component, drive

COUNT = component("count", {"start": "array"}, {"number": "array"}, role="autoregressive")
ECHO = component("echo", {"x": "array/partial"}, {"y": "array"}, role="codec")
ADD = component("add", {"x": "array", "back": "array/partial"}, {"y": "array", "stop": "value"})


def work(*walks, components=(COUNT, ECHO, ADD), here=None, steps=None):
    model = Model("toy", components, walks)
    check(model)
    return Work(model, here or [c.name for c in components], steps or {"count": Counter(), "echo": Echo(), "add": Adder()})


def feed(w, id, link, *values, last=True, tags=None):
    for i, v in enumerate(values):
        w.on(
            Feed(
                id,
                link,
                None if v is None else np.atleast_1d(np.array(v)),
                last and i == len(values) - 1,
                (tags or {}).get(i, 0),
            )
        )


def pieces(w, id, link=None):
    return [
        p.value.tolist()
        for p in w.effects
        if isinstance(p, Piece) and p.id == id and p.value is not None and link in (None, p.link)
    ]


def kinds(w, id):
    return [type(e).__name__ for e in w.effects if e.id == id]


PAIR = Walk(
    "pair", (Edge("in.start", "count.start"), Stream("count.number", "echo.x", Fixed(2, True)), Stream("echo.y", "out.y"))
)


def test_a_stream_flows_and_the_last_is_marked():
    w = work(PAIR)
    w.on(Open(1, "pair", ("y",), {"upto": 9}))
    feed(w, 1, 0, 5)
    for _ in range(20):
        drive(w)
        w.on(Took(1, 2, 1))
    assert sum(pieces(w, 1), []) == [5, 6, 7, 8]
    assert [e.last for e in w.effects if isinstance(e, Piece)][-1] and kinds(w, 1)[-1] == "Done" and not w.requests


def test_credit_bounds_what_is_unread_on_every_edge():
    w = work(PAIR)
    w.on(Open(1, "pair", ("y",)))
    feed(w, 1, 0, 0)
    drive(w)
    assert (
        len(pieces(w, 1)) == 4
        and sum(map(len, pieces(w, 1))) + sum(c._have - c._fresh for c in w.requests[1].jobs["echo"].cutters.values()) <= 12
    )
    before = len(pieces(w, 1))
    w.on(Took(1, 2, 1))
    drive(w)
    assert len(pieces(w, 1)) == before + 1


def test_rows_of_different_walks_share_a_step_and_ff62_each_goes_its_own_way():
    loop = Walk("loop", (Edge("in.x", "add.x"), Loop("add.y", "add.back", Until(4)), Stream("add.y", "out.y", window=9)))
    once = Walk("once", (Edge("in.x", "add.x"), Loop("add.y", "add.back", Until(1)), Edge("add.y", "out.z")))
    seen = []

    def step(rows):
        seen.append({r.walk for r in rows})
        return Adder()(rows)

    w = work(loop, once, steps={"count": Counter(), "echo": Echo(), "add": step})
    for id, (walk, out) in enumerate([("loop", "y"), ("once", "z"), ("loop", "y")]):
        w.on(Open(id, walk, (out,)))
        feed(w, id, 0, 10 * id)
    drive(w)
    assert {"loop", "once"} in seen
    assert pieces(w, 0) == [[1], [2], [3], [4], [5]] and pieces(w, 2) == [[21], [22], [23], [24], [25]]
    assert pieces(w, 1) == [[11, 12]], "an Edge gathers what the loop's turns made and sends it once"
    assert [kinds(w, i).count("Done") for i in range(3)] == [1, 1, 1]


def test_ff63_every_row_of_a_mixed_step_is_ready_again():
    w = work(
        Walk("a", (Edge("in.start", "count.start"), Stream("count.number", "out.y", window=50))),
        Walk("b", (Edge("in.start", "count.start"), Edge("count.number", "out.y"))),
    )
    for id in range(6):
        w.on(Open(id, "ab"[id % 2], ("y",), {"upto": 20}))
        feed(w, id, 0, id)
    drive(w)
    for id in range(6):
        assert sum(pieces(w, id), []) == list(range(id, 20))
    assert max(map(len, w.steps["count"].batches)) == 6


def test_a_loop_ends_at_its_signal():
    w = work(Walk("l", (Edge("in.x", "add.x"), Loop("add.y", "add.back", Until(99, "stop")), Edge("add.y", "out.y"))))
    w.on(Open(1, "l", ("y",), {"limit": 6}))
    feed(w, 1, 0, 2)
    drive(w)
    assert pieces(w, 1) == [[3, 4, 5, 6]] and not w.requests


def test_ff60_a_stop_that_comes_while_a_step_runs_feeds_nothing_back():
    w = work(Walk("l", (Edge("in.x", "add.x"), Loop("add.y", "add.back", Until(99)), Stream("add.y", "out.y", window=50))))
    w.on(Open(1, "l", ("y",)))
    feed(w, 1, 0, 0)
    for _ in range(3):
        name, rows = w.take()
        w.settle(rows, w.run(name, rows))
    name, rows = w.take()
    results = w.run(name, rows)
    w.on(Stop(1, "add"))
    count = len(w.effects)
    w.settle(rows, results)
    assert len(w.effects) == count and w.take() is None and not w.requests
    assert pieces(w, 1) == [[1], [2], [3]] and kinds(w, 1)[-1] == "Done"


def test_ff61_a_stop_reaches_the_component_it_names_and_no_other():
    w = work(PAIR)
    for id in (1, 2):
        w.on(Open(id, "pair", ("y",), {"upto": 1000}))
        feed(w, id, 0, 0)
    name, rows = w.take()
    assert name == "count" and len(rows) == 2
    w.on(Stop(1, "echo"))
    w.settle(rows, w.run(name, rows))
    for _ in range(400):
        drive(w)
        w.on(Took(2, 2, 9))
    assert pieces(w, 1) == [] and sum(pieces(w, 2), []) == list(range(1000))
    assert kinds(w, 1).count("Done") == 1, "the stopped component takes and throws away, so its producer runs to its end"
    assert w.steps["count"].batches[-1] == [(2, "pair")] or w.steps["count"].batches[-1] == [(1, "pair"), (2, "pair")]


def test_ff65_nothing_late_of_a_former_segment_enters_the_next():
    w = work(PAIR)
    w.on(Open(1, "pair", ("y",)))
    feed(w, 1, 0, 0)
    name, rows = w.take()
    w.on(Abort(1))
    w.on(Open(2, "pair", ("y",), {"upto": 102}))
    feed(w, 2, 0, 100)
    w.settle(rows, w.run(name, rows))
    drive(w)
    assert pieces(w, 1) == [] and pieces(w, 2) == [[100], [101]]


def guided(rows):
    """Two running sums per row, of the input and of half of it; the output mixes them. A copy that leaks would change a sum."""
    out = []
    for r in rows:
        x = int(r.inputs["x"].data[0]) if "x" in r.inputs else 1
        if r.branches == [None]:
            out.append(Result({"y": np.array([x])}, state=[x], again=True))
            continue
        for i, branch in enumerate(r.branches):
            branch.append(x * (i + 1))
        mixed = sum(sum(b) * (i + 1) for i, b in enumerate(r.branches))
        steps = len(r.branches[0])
        out.append(Result({"y": np.array([mixed])}, branches=r.branches, again=steps < 4, done=steps >= 4))
    return out


class Guided:
    def __init__(self):
        self.forks = 0

    def __call__(self, rows):
        return guided(rows)

    def fork(self, state):
        self.forks += 1
        return list(state)


def test_ff64_forks_are_scoped_to_the_rows_that_ask_for_them():
    sums = component("sums", {"x": "array"}, {"y": "array"}, role="autoregressive")
    links = (Edge("in.x", "sums.x"), Edge("sums.y", "out.y"))
    alone = {}
    for order in ([1, 2, 3, 4], [4, 1, 3], [2], [3, 2], [1], [4]):
        step = Guided()
        w = work(Walk("plain", links), Walk("guided", links, (Fork("sums", 2),)), components=(sums,), steps={"sums": step})
        for id in order:
            w.on(Open(id, "guided" if id % 2 else "plain", ("y",)))
            feed(w, id, 0, id * 100)
        drive(w)
        assert step.forks == sum(id % 2 for id in order)
        for id in order:
            assert alone.setdefault(id, pieces(w, id)) == pieces(w, id)
    assert alone[2] == [[200, 201, 202, 203]]
    assert alone[1] == [[100, 101 + 2 * 102, 102 + 2 * 104, 103 + 2 * 106]]


def test_ff66_an_abort_returns_every_tag_it_held():
    w = work(Walk("e", (Stream("in.x", "echo.x", Fixed(3)), Stream("echo.y", "out.y", window=1))))
    w.on(Open(1, "e", ("y",)))
    feed(w, 1, 0, [1, 2], [3, 4], [5, 6], [7, 8], last=False, tags={0: 11, 1: 12, 2: 13, 3: 14})
    name, rows = w.take()
    w.on(Abort(1))
    assert set(w.released) <= {12, 13, 14}
    w.settle(rows, w.run(name, rows))
    assert sorted(w.released) == [11, 12, 13, 14]
    feed(w, 1, 0, [9], tags={0: 15})
    assert sorted(w.released) == [11, 12, 13, 14, 15], "a piece that comes for a request that is gone is released at once"
    assert kinds(w, 1) == ["Done"]


def test_ff70_a_codec_that_ends_before_its_input_is_caught():
    def hasty(rows):
        return [Result({"y": r.inputs["x"].data}, done=True) for r in rows]

    w = work(
        Walk("e", (Stream("in.x", "echo.x"), Stream("echo.y", "out.y"))),
        steps={"count": Counter(), "echo": hasty, "add": Adder()},
    )
    w.on(Open(1, "e", ("y",)))
    feed(w, 1, 0, [1], last=False)
    drive(w)
    assert w.effects[-1] == Failed(1, "echo", "it ended before its input")


def test_a_raise_or_a_refusal_ends_its_rows_and_names_the_component():
    def step(rows):
        if any(r.params.get("raise") for r in rows):
            raise ZeroDivisionError("oops")
        return [
            Result(error="no such voice", refused=True) if r.params.get("bad") else Result({"y": r.inputs["x"].data})
            for r in rows
        ]

    w = work(
        Walk("e", (Edge("in.x", "echo.x"), Edge("echo.y", "out.y"))), steps={"count": Counter(), "echo": step, "add": Adder()}
    )
    for id, params in ((1, {}), (2, {"bad": True})):
        w.on(Open(id, "e", ("y",), params))
        feed(w, id, 0, [id])
    drive(w)
    w.on(Open(3, "e", ("y",), {"raise": True}))
    feed(w, 3, 0, [3])
    drive(w)
    assert pieces(w, 1) == [[1]]
    assert [e for e in w.effects if isinstance(e, Failed)] == [
        Failed(2, "echo", "no such voice", 400),
        Failed(3, "echo", "ZeroDivisionError: oops", 500),
    ]
    assert not w.requests


def test_an_empty_stream_ends_without_a_step_and_an_empty_text_is_a_value():
    say = component("say", {"text": "text"}, {"y": "text"})
    w = work(
        Walk("t", (Edge("in.t", "say.text"), Edge("say.y", "out.y"))),
        Walk("e", (Stream("in.x", "echo.x"), Stream("echo.y", "out.y"))),
        components=(say, ECHO),
        steps={"say": lambda rows: [Result({"y": f"<{r.inputs['text'].data}>"}) for r in rows], "echo": Echo()},
    )
    w.on(Open(1, "t", ("y",)))
    w.on(Feed(1, 0, None, True))
    w.on(Open(2, "e", ("y",)))
    w.on(Feed(2, 0, None, True))
    drive(w)
    assert [(e.id, e.value, e.last) for e in w.effects if isinstance(e, Piece)] == [(2, None, True), (1, "<>", True)]
    assert {e.id for e in w.effects if isinstance(e, Done)} == {1, 2}


def test_unwanted_outputs_are_not_computed():
    walk = Walk(
        "w",
        (
            Edge("in.start", "count.start"),
            Stream("count.number", "echo.x", window=99),
            Stream("echo.y", "out.y"),
            Edge("count.number", "out.n"),
        ),
    )
    w = work(walk)
    w.on(Open(1, "w", ("n",), {"upto": 3}))
    feed(w, 1, 0, 0)
    drive(w)
    assert pieces(w, 1) == [[0, 1, 2]] and not w.steps["echo"].seen
    with pytest.raises(BadRequest):
        w.on(Open(2, "w", ("nothing",)))


@pytest.mark.parametrize("marked", [True, False])
def test_a_component_that_closes_sees_the_end_once_however_it_comes(marked):
    rows_seen = []

    def step(rows):
        rows_seen.extend((sorted(r.inputs), r.last) for r in rows)
        total = (rows[0].branches[0] or 0) + sum(int(c.data.sum()) for c in rows[0].inputs.values())
        return [Result({"y": np.array([total])} if rows[0].last else {}, state=total)]

    tail = component("tail", {"x": "array/partial"}, {"y": "array"}, closes=True)
    w = work(Walk("t", (Stream("in.x", "tail.x"), Stream("tail.y", "out.y"))), components=(tail,), steps={"tail": step})
    w.on(Open(1, "t", ("y",)))
    feed(w, 1, 0, [1], last=False)
    drive(w)
    feed(w, 1, 0, [2], *([] if marked else [None]))
    if not marked:
        w.effects.clear()
    drive(w)
    assert pieces(w, 1) == [[3]] and [last for _, last in rows_seen] == ([False, True]) and not w.requests


def test_a_row_steps_again_without_taking_input():
    def step(rows):
        left = rows[0].branches[0] if not rows[0].inputs else int(rows[0].inputs["x"].data[0])
        return [Result({"y": np.array([left])}, state=left - 1, again=left > 1)]

    w = work(
        Walk("e", (Stream("in.x", "echo.x"), Stream("echo.y", "out.y", window=99))), components=(ECHO,), steps={"echo": step}
    )
    w.on(Open(1, "e", ("y",)))
    feed(w, 1, 0, [3], [2])
    drive(w)
    assert pieces(w, 1) == [[3], [2], [1], [2], [1]] and not w.requests
