"""Reasoning and tool calls in an answer's text, cut anywhere."""

import json
import random

import pytest

from slipstream.serve.openai.read_writer import gather
from slipstream.serve.text.calls import read_calls
from slipstream.serve.text.reader import Reader, Reading
from slipstream.serve.text.stop import StopStrings

F = frozenset({"f", "g"})
HERMES = Reading("qwen3", "hermes", F)
LLAMA3 = Reading("none", "llama3", F)
BOUND = Reading("none", "bound", F)
R1 = Reading("deepseek_r1")


def read(reading: Reading, text: str, prompt: str = "", step: int = 1) -> list:
    reader, parts = Reader(reading, prompt), []
    for i in range(0, len(text), step):
        parts += reader.push(text[i : i + step])
    return parts + reader.finish()


def said(reading: Reading, text: str, prompt: str = "") -> tuple:
    """(content, reasoning, calls), the same however the text is cut."""
    found = {}
    for step in (1, 2, 3, 5, 11, 10_000):
        got = gather(read(reading, text, prompt, step))
        found[got.content, got.reasoning, tuple((n, a) for _, n, a in got.calls)] = step
    assert len(found) == 1, found
    return next(iter(found))


CALL = '<tool_call>\n{"name": "f", "arguments": {"a": "}</tool_call>\\""}}\n</tool_call>'


@pytest.mark.parametrize(
    "reading,text,content,reasoning,calls",
    [
        (HERMES, "plain text ", "plain text ", "", ()),
        (HERMES, CALL, "", "", (("f", '{"a": "}</tool_call>\\""}'),)),
        (HERMES, f"Sure.\n{CALL}\n{CALL}\n", "Sure.", "", (("f", '{"a": "}</tool_call>\\""}'),) * 2),
        (HERMES, f"<think>\nhm\n</think>\n\n{CALL}", "", "hm", (("f", '{"a": "}</tool_call>\\""}'),)),
        (HERMES, '<tool_call>[{"name": "f"}, {"name": "g", "parameters": {"x": 1}}]', "", "", (("f", "{}"), ("g", '{"x": 1}'))),
        (HERMES, '<tool_call>{"name": "f", "arguments": "{\\"x\\": 2}"}</tool_call>', "", "", (("f", '{"x": 2}'),)),
        (
            LLAMA3,
            '{"name": "f", "parameters": {"x": 1}}; {"name": "g", "parameters": {}}',
            "",
            "",
            (("f", '{"x": 1}'), ("g", "{}")),
        ),
        (LLAMA3, ' <|python_tag|>{"type": "function", "name": "f", "parameters": {}}', "", "", (("f", "{}"),)),
        (BOUND, '{"name": "f", "arguments": {"x": [1, {"y": "}"}]}}', "", "", (("f", '{"x": [1, {"y": "}"}]}'),)),
        (
            BOUND,
            '[{"name": "f", "arguments": {}},\n {"name":"g","arguments":{"a":1}}]',
            "",
            "",
            (("f", "{}"), ("g", '{"a":1}')),
        ),
    ],
)
def test_what_an_answer_says_does_not_depend_on_how_it_was_cut(reading, text, content, reasoning, calls):
    assert said(reading, text) == (content, reasoning, calls)


@pytest.mark.parametrize(
    "reading,text",
    [
        (HERMES, '<tool_call>{"name": "f", "arguments": {"a": 1}</tool_call> and on'),  # a brace is missing
        (HERMES, '<tool_call>{"name": "f", "arguments": {"a": 1'),  # cut off
        (HERMES, '<tool_call>{"name": "unknown", "arguments": {}}</tool_call>'),
        (HERMES, '<tool_call>{"name": "f", "arguments": [1]}</tool_call>'),
        (HERMES, '<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>'),
        (HERMES, '<tool_call>{"name": "f", "arguments": {"a": 1e999}}</tool_call>'),
        (HERMES, "<tool_call>f(1)</tool_call>"),
        (HERMES, "a <tool_ca"),
        (LLAMA3, '{"city": "Paris"} is a city'),
        (LLAMA3, 'It is {"name": "f", "parameters": {}}'),
        (LLAMA3, '<|python_tag|>f.call(query="x")'),
        (BOUND, '{"name": "other", "arguments": {}}'),
    ],
)
def test_what_is_no_whole_call_stays_text(reading, text):
    assert said(reading, text) == (text, "", ())


def test_a_call_that_was_cut_off_is_no_call_of_a_whole_answer():
    assert said(BOUND, '{"name": "f", "arguments": {"x": [1') == ("", "", ())


def test_without_parallel_calls_nothing_follows_the_first():
    reader = Reader(Reading("none", "hermes", F, parallel=False))
    parts = reader.push(f"a {CALL} b {CALL}")
    assert [p.kind for p in parts] == ["content", "call", "arguments"] and reader.done


def test_arguments_of_calls_always_parse():
    rng = random.Random(5)
    pieces = [
        "<tool_call>",
        "</tool_call>",
        '{"name": "f", "arguments": ',
        '{"a": 1}',
        "}",
        "{",
        '"',
        "\\",
        "\ud800",
        "\n",
        "é",
        "NaN",
    ]
    for _ in range(3000):
        text = "".join(rng.choice(pieces) for _ in range(rng.randrange(12)))
        for reading in (HERMES, LLAMA3):
            for _, name, arguments in gather(read(reading, text, step=rng.randrange(1, 9))).calls:
                assert name == "f" and isinstance(json.loads(arguments), dict)
                arguments.encode()


def test_half_a_surrogate_in_arguments_is_escaped():
    ((_, arguments),) = read_calls('{"name": "f", "arguments": {"a": "\\ud800"}}', F) or []
    assert arguments == '{"a": "\\ud800"}'


@pytest.mark.parametrize(
    "reading,prompt,text,content,reasoning",
    [
        (HERMES, "", "<think>\na\n\nb </think>\n\nc\n", "c\n", "a\n\nb"),
        (HERMES, "open", "a</think>c", "c", "a"),
        (HERMES, "open", "<think>\na</think>c", "c", "a"),
        (HERMES, "closed", "c", "c", ""),
        (HERMES, "", "c about <think> tags", "c about <think> tags", ""),
        (HERMES, "", "c</think>d", "cd", ""),
        (HERMES, "", "<think></think>c", "c", ""),
        (HERMES, "open", "never ends", "", "never ends"),
        (R1, "", "a</think>\nc", "c", "a"),
        (R1, "closed", "c", "c", ""),
    ],
)
def test_reasoning_is_told_from_the_answer(reading, prompt, text, content, reasoning):
    assert said(reading, text, prompt) == (content, reasoning, ())


def test_ff81_a_marker_never_reaches_content_however_text_is_cut_and_stopped():
    """Stop strings are looked for in content alone, so they cannot cut a marker in two."""
    rng = random.Random(7)
    pieces = ["<think>", "</think>", "</", "think>", "<", "hm", "\n\n", " so ", "</thi", "nk>"]
    for _ in range(2000):
        text = "<think>" + "".join(rng.choice(pieces[5:8]) for _ in range(5)) + "</think>" + rng.choice(["ok", "a </think> b"])
        stops = StopStrings(tuple(rng.sample(["think", ">", "</", "\n\n", "k"], 2)))
        content = "".join(p.text for p in read(HERMES, text, step=rng.randrange(1, 6)) if p.kind == "content")
        assert "</" not in content and "think>" not in content
        assert "</" not in stops.push(content)[0]
