"""Matchers against brute force over small vocabularies, and what they do at their edges."""

import json
import random

import numpy as np
import pytest

from slipstream.grammar.matcher import FORCED_BYTES, Bound, GrammarMatcher, Maker, Vocabulary
from slipstream.serve.text.structured import of_choice, of_grammar, of_regex, of_schema

END, OTHER = 0, 1
WIDTH = 320  # wider than the vocabulary, and no multiple of 32 tokens
BYTES = [bytes([b]) for b in range(256)]
WORDS = [b"ab", b"abc", b"bc", b"ca", b"aa", b'{"', b'":', b'": "', b'"}', b"a" * 20, "é".encode(), b"<|end|>"]
TOKENS = [b"<|end|>", b"<|other|>", *BYTES, *WORDS]
VOCABULARY = Vocabulary(TOKENS, [END, OTHER], [END], WIDTH)
MAKE = Maker(VOCABULARY)


def matcher(text: str, **bound) -> GrammarMatcher:
    return MAKE(Bound(text, **bound).encode())


def allowed(m: GrammarMatcher) -> set[int]:
    mask = m.mask()
    assert mask.dtype == np.uint32 and len(mask) == WIDTH // 32
    return set(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist())


def accepts(text: str, answer: str) -> bool:
    """Whether an answer, byte by byte, is one that the grammar describes."""
    m = matcher(text)
    for byte in answer.encode():
        if 2 + byte not in allowed(m):
            return False
        m.accept(2 + byte)
    return END in allowed(m)


def walk(m: GrammarMatcher, rng: random.Random, limit: int = 400) -> str | None:
    """A random answer, None where it has no end within the limit."""
    out = []
    for _ in range(limit):
        token = rng.choice(sorted(allowed(m)))
        if token == END:
            return b"".join(out).decode()
        out.append(TOKENS[token])
        m.accept(token)
    return None


@pytest.mark.parametrize("seed", range(12))
def test_masks_are_those_of_brute_force(seed):
    rng = random.Random(seed)
    texts = sorted({"".join(rng.choice("abc") for _ in range(rng.randint(1, 7))) for _ in range(rng.randint(1, 9))})
    m, written = matcher(of_choice(texts, "choice")), b""
    while True:
        rest = [t.encode()[len(written) :] for t in texts if t.encode().startswith(written)]
        fitting = {i for i, token in enumerate(TOKENS) if i > OTHER and any(r.startswith(token) for r in rest)}
        ends = {END} if b"" in rest else set()
        got = allowed(m)
        if ends or len({r[:1] for r in rest}) > 1:
            assert got == fitting | ends
        else:  # one way on: one of the tokens that go it
            assert got and got <= fitting
        token = rng.choice(sorted(got))
        if token == END:
            assert written.decode() in texts
            return
        written += TOKENS[token]
        m.accept(token)


def test_after_the_end_of_the_grammar_only_end_tokens_follow():
    m = matcher(of_regex("ab", "regex"))
    m.accept(TOKENS.index(b"ab"))
    assert allowed(m) == {END}
    m.accept(END)
    assert allowed(m) == {END}


def test_ends_are_held_back_as_long_as_anything_else_may_follow():
    for bound in ({"min_tokens": 3}, {"ignore_end": True}):
        m = matcher(of_regex("[ab]{1,4}", "regex"), **bound)
        for i in range(4):
            assert (END in allowed(m)) == (bool(bound.get("min_tokens")) and i >= 3)
            m.accept(TOKENS.index(b"a"))
        assert allowed(m) == {END}
    short = matcher(of_regex("a", "regex"), min_tokens=9)
    short.accept(TOKENS.index(b"a"))
    assert allowed(short) == {END}, "the grammar wins where nothing else may follow"


def test_stop_tokens_are_held_back_for_min_tokens():
    a, b = TOKENS.index(b"a"), TOKENS.index(b"b")
    m = matcher(of_regex("[ab]{1,30}", "regex"), min_tokens=2, stop_ids=(b, WIDTH + 5))
    assert a in allowed(m) and b not in allowed(m)
    m.accept(a)
    m.accept(a)
    assert b in allowed(m)


def test_a_token_that_was_not_allowed_and_too_much_work_are_dead_ends():
    m = matcher(of_regex("ab", "regex"))
    m.accept(TOKENS.index(b"c"))
    assert allowed(m) == set()
    ambiguous = matcher('start: s\ns: s s | /[a-c]/ | ""')
    for _ in range(200):
        if not (now := allowed(ambiguous)):
            return
        ambiguous.accept(min(now - {END}))
    pytest.fail("an ambiguous grammar never reached its limit")


def test_copies_do_not_know_of_each_other():
    m = matcher(of_regex("(ab|ba)c", "regex"))
    other = m.copy()
    m.accept(TOKENS.index(b"a"))
    assert TOKENS.index(b"b") in allowed(other) and TOKENS.index(b"a") in allowed(other)
    other.accept(TOKENS.index(b"b"))
    assert allowed(m) == {TOKENS.index(b"bc")} and allowed(other) == {TOKENS.index(b"a")}


def test_two_makers_give_equal_masks_whatever_they_made_before():
    """The ranks of a group compile in the same order but share no state; one may still hold the grammar from before."""
    text = of_schema({"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "string"}}}, "schema")
    first, second = Maker(VOCABULARY), Maker(VOCABULARY)
    walk(second(Bound(text).encode()), random.Random(9))
    one, two, rng = first(Bound(text).encode()), second(Bound(text).encode()), random.Random(3)
    for _ in range(60):
        assert one.mask().tobytes() == two.mask().tobytes()
        token = rng.choice(sorted(allowed(one)))
        one.accept(token)
        two.accept(token)


def test_special_tokens_are_no_text():
    m = matcher(of_regex(".*", "regex"))
    assert allowed(m) & {END, OTHER} == {END}
    assert max(allowed(m)) < len(TOKENS)
    named = matcher(of_grammar('start: <|other|> "a"', "grammar"))
    assert allowed(named) == {OTHER}


def test_forced_text_is_tokenized_as_the_model_would():
    own = [TOKENS.index(b"bc"), TOKENS.index(b"a")]
    make = Maker(VOCABULARY._replace(encode=lambda text: own if text == "bca" else []))
    assert allowed(make(Bound(of_regex("bca", "regex")).encode())) == {own[0]}


def test_of_a_long_text_that_is_forced_only_the_beginning_is_tokenized():
    """Else each token of it would cost as much as the whole."""
    asked = []

    def encode(text: str) -> list[int]:
        asked.append(len(text.encode()))
        return [2 + byte for byte in text.encode()]

    text = "é" * 40_000
    m = Maker(VOCABULARY._replace(encode=encode))(Bound(of_regex(text, "regex")).encode())
    for byte in text[:300].encode():
        assert allowed(m) == {2 + byte}
        m.accept(2 + byte)
    assert asked and max(asked) <= FORCED_BYTES


def test_text_that_spells_a_special_token_stays_text():
    """A tokenizer reads `<|end|>` in a text as the end token; a grammar's text means its characters."""
    make = Maker(VOCABULARY._replace(encode=lambda text: [END]))
    m = make(Bound(of_choice(["<|end|>"], "choice")).encode())
    assert allowed(m) == {TOKENS.index(b"<|end|>", 2)}


@pytest.mark.parametrize(
    "text, why",
    [
        ("start: nothing", "unknown name"),
        ("", "Empty"),
        (of_regex("(", "regex"), "unclosed group"),
        (of_regex("a(?=b)", "regex"), "look-around"),
        (of_schema({"minimum": 3, "maximum": 1, "type": "integer"}, "s"), "Unsatisfiable"),
        (of_schema({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}, "s"), "matches no text"),
    ],
)
def test_what_cannot_be_compiled_is_refused_with_a_reason(text, why):
    with pytest.raises(ValueError, match=why):
        matcher(text)


def test_a_model_without_an_end_token_is_refused():
    with pytest.raises(ValueError, match="no end token"):
        Maker(VOCABULARY._replace(end_ids=[]))


PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 5},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 2},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}


def test_random_answers_fit_their_schema():
    text, ends = of_schema(PERSON, "schema"), 0
    for seed in range(30):
        answer = walk(matcher(text), random.Random(seed))
        if answer is None:
            continue
        ends += 1
        value = json.loads(answer)
        assert {"name", "age"} <= set(value) <= {"name", "age", "tags"}
        assert len(value["name"]) <= 5 and 0 <= value["age"] <= 150 and type(value["age"]) is int
        assert len(value.get("tags", [])) <= 2 and set(value.get("tags", [])) <= {"a", "b"}
    assert ends >= 20


def test_white_space_in_json_is_bounded():
    text = of_schema({"type": "array", "items": {"type": "integer"}}, "schema")
    assert accepts(text, "[\n    1,\n    2\n]") and accepts(text, "[1, 2]")
    assert not accepts(text, "[  1]") and not accepts(text, "[\n\n1]")
    bare = of_schema({"type": "array", "items": {"type": "integer"}}, "schema", spaces="")
    assert accepts(bare, "[1,2]") and not accepts(bare, "[1, 2]")


@pytest.mark.parametrize(
    "schema, good, bad",
    [
        ({"type": "integer", "multipleOf": 3}, 6, 7),
        ({"type": "number", "exclusiveMaximum": 3}, 2.5, 3),
        ({"type": "object", "minProperties": 1, "maxProperties": 2}, {"a": 1}, {}),
        ({"type": "array", "prefixItems": [{"type": "string"}], "items": False}, ["a"], ["a", 1]),
        ({"type": "object", "patternProperties": {"^a": {"type": "integer"}}}, {"ab": 1}, {"ab": "x"}),
        ({"oneOf": [{"type": "string"}, {"type": "null"}]}, None, 1),
        ({"allOf": [{"type": "integer"}, {"minimum": 3}]}, 5, 1),
        ({"type": "string", "pattern": "^[a-z]+$", "minLength": 2}, "ab", "a"),
        ({"type": "string", "format": "date"}, "2024-02-03", "today"),
        ({"$defs": {"a": {"type": "integer"}}, "type": "array", "items": {"$ref": "#/$defs/a"}}, [1], ["a"]),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}], "title": "T", "default": None, "description": "d"}, None, "a"),
    ],
)
def test_keywords_of_json_schema_are_enforced(schema, good, bad):
    text = of_schema(schema, "schema")
    assert accepts(text, json.dumps(good)) and not accepts(text, json.dumps(bad))


@pytest.mark.parametrize("choices", [["a.b", "(c)", "x\ny"], ["é-ü", '"q"', "\\", "a b", "日本"]])
def test_choices_are_taken_letter_by_letter(choices):
    text = of_choice(choices, "choice")
    assert all(accepts(text, c) for c in choices)
    assert not accepts(text, "aXb") and not accepts(text, choices[0] + choices[1])


def test_grammars_in_both_notations():
    lark = of_grammar('start: "x" NUMBER ("," NUMBER)*\nNUMBER: /[0-9]+/', "grammar")
    gbnf = of_grammar('root ::= "x" number ("," number)*\nnumber ::= [0-9]+\n', "grammar")
    for text in (lark, gbnf):
        assert accepts(text, "x1,23") and not accepts(text, "x1,") and not accepts(text, "1")
