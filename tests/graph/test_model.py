import pytest

from slipstream.errors import BadRequest, ConfigError
from slipstream.graph.chunks import Fixed, LeftContext, SlidingWindow, Whole
from slipstream.graph.model import Edge, Fork, Loop, Model, Stream, Until, Walk, check
from slipstream.graph.plan import make_plan

from .toys import component

HEAR = component("hear", {"audio": "array"}, {"text": "text"}, role="encoder")
SAY = component("say", {"text": "text/chunks"}, {"audio": "array"}, role="codec")
TALK = component(
    "talk",
    {"prompt": "text", "back": "array/partial"},
    {"text": "text", "code": "array", "stop": "value"},
    role="autoregressive",
)
IN, OUT, BACK = (
    Edge("in.audio", "hear.audio"),
    Stream("say.audio", "out.audio"),
    Loop("talk.code", "talk.back", Until(9, "stop")),
)
GOOD = (
    IN,
    Edge("hear.text", "talk.prompt"),
    BACK,
    Stream("talk.text", "say.text", Fixed(1)),
    Stream("talk.text", "out.text"),
    OUT,
)


def model(*links, forks=(), components=(HEAR, SAY, TALK), name="w"):
    return Model("toy", components, (Walk(name, links, forks),))


def test_a_good_model_passes():
    check(model(*GOOD))


@pytest.mark.parametrize(
    ("links", "says"),
    [
        ([IN, Edge("hear.text", "nobody.x"), OUT], "hear.text -> nobody.x: there is no component nobody"),
        ([IN, Edge("hear.words", "talk.prompt")], "hear.words -> talk.prompt: component hear has no output words; it has text"),
        ([IN, Edge("hear.text", "hear.audio")], "carry text to an input that takes array"),
        ([Stream("in.audio", "hear.audio")], "in.audio -> hear.audio: hear.audio takes its input whole; use Edge"),
        ([Stream("in.text", "say.text"), OUT], "say.text takes chunks of full size, and the policy allows partial ones"),
        ([Stream("in.text", "say.text", Fixed(0)), OUT], "in.text -> say.text: Fixed(n=0)"),
        ([Stream("in.text", "say.text", LeftContext(1, -1)), OUT], "LeftContext"),
        ([Stream("in.text", "say.text", Fixed(1), window=0), OUT], "window must be at least 1"),
        ([*GOOD[:2], *GOOD[3:]], "component talk: no edge feeds its input back, so it would wait forever"),
        ([*GOOD, Edge("in.other", "hear.audio")], "hear.audio is fed by in.audio and by in.other"),
        ([*GOOD[:2], Loop("talk.code", "talk.back"), *GOOD[3:]], "a loop needs a stop condition"),
        ([*GOOD[:2], Loop("talk.code", "talk.back", Until(0)), *GOOD[3:]], "a loop needs a stop condition"),
        ([*GOOD[:2], Loop("talk.code", "talk.back", Until(3, "end")), *GOOD[3:]], "stop signal end is not an output of talk"),
        ([IN, Edge("hear.text", "out.text"), Edge("out.x", "hear.audio")], "out.x is at the wrong end"),
        ([Edge("in", "hear.audio")], "'in' must be written component.port"),
        ([IN], "needs an edge from in. and one to out."),
    ],
)
def test_what_does_not_fit_is_refused_at_start_naming_component_and_edge(links, says):
    with pytest.raises(ConfigError) as e:
        check(model(*links))
    assert says in str(e.value) and "walk w" in str(e.value)


def test_components_that_wait_for_each_other_are_refused():
    a, b = (component(n, {"x": "array", "y": "array"}, {"z": "array"}) for n in "ab")
    links = (Edge("in.x", "a.x"), Edge("in.x", "b.x"), Edge("a.z", "b.y"), Edge("b.z", "a.y"), Edge("a.z", "out.z"))
    with pytest.raises(ConfigError, match="components a, b wait for each other"):
        check(model(*links, components=(a, b)))
    links = (Edge("in.x", "a.x"), Loop("b.z", "a.y", Until(3)), Edge("in.x", "b.x"), Edge("a.z", "b.y"), Edge("a.z", "out.z"))
    check(model(*links, components=(a, b)))


@pytest.mark.parametrize(
    ("policy", "least"),
    [
        (Fixed(5), 5),
        (SlidingWindow(8, 4), 8),
        (LeftContext(6, 2), 8),
        (LeftContext(2, 4), 6),
        (Fixed(4), 4),
        (Fixed(9, True), 1),
    ],
)
def test_a_window_that_cannot_hold_a_chunk_is_refused_with_the_least_that_can(policy, least):
    eat = component("eat", {"x": "array/partial"}, {"y": "array"})

    def stream(**kw):
        return model(Stream("in.x", "eat.x", policy, **kw), Stream("eat.y", "out.y"), components=(eat,))

    check(stream(window=least))
    check(stream(window=2, piece=max(1, least - 1)))
    if least > 1:
        with pytest.raises(ConfigError, match=f"in.x -> eat.x: it would stall: .* window must be at least {least}, or piece="):
            check(stream(window=least - 1))


def test_a_stream_that_is_wanted_whole_is_refused():
    eat = component("eat", {"x": "array/partial"}, {"y": "array"})
    with pytest.raises(ConfigError, match=r"in.x -> eat.x: Whole\(\) does not use a piece .* use Edge"):
        check(model(Stream("in.x", "eat.x", Whole(), window=99), Stream("eat.y", "out.y"), components=(eat,)))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"role": "wizard"}, "role 'wizard'"),
        ({"name": "in"}, "component 'in'"),
        ({"inputs": {"x": "smell"}}, "input x carries 'smell'"),
        ({"outputs": {}}, "needs an input and an output"),
        ({"max_rows": 0}, "max_rows"),
        ({"step": ""}, "needs a step"),
        ({"role": "language_model"}, "has no step"),
    ],
)
def test_a_component_that_cannot_be_is_named(change, says):
    kw = {"name": "c", "inputs": {"x": "text"}, "outputs": {"y": "text"}, **change}
    with pytest.raises(ConfigError, match=says.replace("(", r"\(")):
        check(Model("toy", (component(**kw),), ()))


def test_forks_and_names_are_checked():
    with pytest.raises(ConfigError, match="fork of hear"):
        check(model(*GOOD, forks=(Fork("hear", 1),)))
    with pytest.raises(ConfigError, match="two components have one name"):
        check(model(*GOOD, components=(HEAR, HEAR)))
    with pytest.raises(ConfigError, match="two walks"):
        check(Model("toy", (HEAR, SAY, TALK), (Walk("w", GOOD), Walk("w", GOOD))))


def test_a_plan_holds_what_leads_to_the_wanted_outputs_and_no_more():
    m = model(*GOOD)
    assert make_plan(m, "w").components == ("hear", "talk", "say")
    text = make_plan(m, "w", ("text",))
    assert text.components == ("hear", "talk") and [text.link(i).target for i in text.links] == [
        "hear.audio",
        "talk.prompt",
        "talk.back",
        "out.text",
    ]


@pytest.mark.parametrize(
    ("walk", "wanted", "given", "says"),
    [
        ("v", None, None, "no walk v; it has w"),
        ("w", ("smell",), None, "no output smell; it has text, audio"),
        ("w", (), None, "would end at once"),
        ("w", None, (), "component hear would wait forever: edge in.audio -> hear.audio"),
        ("w", None, ("audio", "x"), "no input x"),
    ],
)
def test_ff70_plans_that_could_stall_or_end_early_are_refused_when_the_request_is_read(walk, wanted, given, says):
    with pytest.raises(BadRequest) as e:
        make_plan(model(*GOOD), walk, wanted, given)
    assert says in str(e.value)


def test_ff70_an_input_that_leads_nowhere_is_refused():
    links = (*GOOD, Edge("in.note", "note.text"), Edge("note.y", "out.note"))
    m = model(*links, components=(HEAR, SAY, TALK, component("note", {"text": "text"}, {"y": "text"})))
    with pytest.raises(BadRequest, match="input note leads to none of the outputs audio"):
        make_plan(m, "w", ("audio",), ("audio", "note"))
