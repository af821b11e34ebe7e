from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.components.sentences import MAX_SENTENCE, SentenceStep, speakable, split
from slipstream.graph.chunks import Chunk

CASES = [
    ("Hello there. How are you? Fine!", ["Hello there.", "How are you?", "Fine!"]),
    ("Dr. Smith met Mrs. Jones at 3.5 km. They left.", ["Dr. Smith met Mrs. Jones at 3.5 km.", "They left."]),
    ("The U.S. economy grew, e.g. by 2.5%. Good.", ["The U.S. economy grew, e.g. by 2.5%.", "Good."]),
    ("J. K. Rowling wrote it. Yes.", ["J. K. Rowling wrote it.", "Yes."]),
    ("1. Paris is first. 2. Lyon is second.", ["1. Paris is first.", "2. Lyon is second."]),
    ('He said "Stop." Then he left.', ['He said "Stop."', "Then he left."]),
    ("Wait... what? No way", ["Wait...", "what?", "No way"]),
    ("A title\nThen text.", ["A title", "Then text."]),
    ("She paid $9.99 at 7:30 p.m. and went home.", ["She paid $9.99 at 7:30 p.m. and went home."]),
]  # fmt: skip


def stream(text, sizes):
    out, rest, at = [], "", 0
    for size in sizes:
        found, rest = split(rest + text[at : at + size], False)
        out, at = out + found, at + size
    found, rest = split(rest + text[at:], True)
    assert not rest
    return out + found


@pytest.mark.parametrize(("text", "want"), CASES)
def test_sentences_end_where_a_reader_would_end_them(text, want):
    assert [s.strip() for s in stream(text, [])] == want
    assert [s.strip() for s in stream(text, [1] * len(text))] == want, "the same when it comes letter by letter"


@given(st.text(alphabet="ab A.!?,;\n1", max_size=900), st.lists(st.integers(1, 40), max_size=30))
@settings(max_examples=200, deadline=None)
def test_nothing_is_lost_and_every_sentence_is_bounded(text, sizes):
    out = stream(text, sizes)
    assert "".join(out) == text and all(len(s) <= MAX_SENTENCE for s in out)


def test_long_sentences_are_cut_at_clauses_then_at_spaces_then_hard():
    clause = "this goes on and on, " * 40
    assert all(s.endswith((", ", ",")) for s in split(clause, True)[0])
    assert all(len(s) <= MAX_SENTENCE and s.endswith(" ") for s in split("word " * 200, False)[0])
    assert [len(s) for s in split("x" * 500, True)[0]] == [MAX_SENTENCE, MAX_SENTENCE, 20]


def test_marks_of_formatting_are_not_spoken():
    assert speakable("**Paris** is the `capital`. ") == "Paris is the capital."
    assert speakable(" --- \n") == "" and speakable("...") == ""


def speak(pieces, marked):
    """What the step says of a stream of pieces, one list a piece."""
    step, state, out = SentenceStep(), None, []
    rows = [({"text": Chunk(p, 0, False)}, marked and i == len(pieces) - 1) for i, p in enumerate(pieces)]
    for inputs, last in rows if marked else [*rows, ({}, True)]:
        said, again = [], True
        while again:
            (result,) = step([SimpleNamespace(inputs=inputs, branches=[state], last=last)])
            state, again, inputs = result.state, result.again, {}
            said += [result.outputs["sentence"]] if result.outputs["sentence"] else []
        out.append(said)
    return out


@pytest.mark.parametrize("marked", [True, False])
def test_speech_begins_with_a_clause_and_goes_on_in_sentences(marked):
    text = "Paris, the capital of the country called France, is a large city, and old, too. It lies on a river, the Seine."
    said = speak([text[i : i + 7] for i in range(0, len(text), 7)], marked)
    assert [s for turn in said for s in turn] == [
        "Paris, the capital of the country called France,",
        "is a large city, and old, too.",
        "It lies on a river, the Seine.",
    ]
    assert said.index(["Paris, the capital of the country called France,"]) == 48 // 7, "as soon as the clause is complete"
    assert speak(["One. Two! Three?"], marked)[0][0] == "One."
    assert speak([], False) == [[]]
