"""JSON schemas as grammars: what an answer may be, against what JSON schema says, and what is refused by name."""

import json
import random

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from slipstream.errors import BadRequest
from slipstream.grammar.matcher import Bound, Maker, Vocabulary
from slipstream.serve.text.structured import of_schema
from tests.helpers.json_schema import valid

END = 256
MAKE = Maker(Vocabulary([*(bytes([b]) for b in range(256)), b"<|end|>"], [END], [END], 257))
INTEGER, STRING = {"type": "integer"}, {"type": "string"}
A = {"type": "object", "properties": {"a": INTEGER}, "required": ["a"]}
B = {"type": "object", "properties": {"b": INTEGER}, "required": ["b"]}


def allowed(matcher) -> set[int]:
    return set(np.flatnonzero(np.unpackbits(matcher.mask().view(np.uint8), bitorder="little")).tolist())


class Fits:
    """What fits a schema: `Fits(schema)(value)`, or `.text(text)`."""

    def __init__(self, schema, **options):
        self.grammar = Bound(of_schema(schema, "field", **options)).encode()
        MAKE(self.grammar)

    def __call__(self, value) -> bool:
        return self.text(json.dumps(value))

    def text(self, answer: str) -> bool:
        matcher = MAKE(self.grammar)
        for byte in answer.encode():
            if byte not in allowed(matcher):
                return False
            matcher.accept(byte)
        return END in allowed(matcher)

    def some(self, rng: random.Random, longest: int = 300):
        """A random answer, None where none ends in time."""
        matcher, out = MAKE(self.grammar), bytearray()
        while len(out) < longest:
            now = allowed(matcher)
            byte = END if END in now and rng.random() < 0.5 else rng.choice(sorted(now))
            if byte == END:
                return json.loads(out)
            out.append(byte)
            matcher.accept(byte)
        return None


def check(schema, good, bad, **options):
    fits = Fits(schema, **options)
    assert [fits(value) for value in good] == [True] * len(good), schema
    assert [fits(value) for value in bad] == [False] * len(bad), schema


# --- schemas and answers at random

DATA = [0, 1, 2.5, -3, 2**53, 2**53 + 1, 2**63 - 1, 10**18, True, None, "", "a", "bc", [], [1], {"a": 1}, {"b": "x", "a": 1}]
NUMBERS = st.sampled_from(
    [-(2**63), -(2**53) - 1, -1, 0, 1.5, 2, 2**53 - 1, 2**53, 2**53 + 1, 2**60 + 1, 10**18, 2**63 - 1, 2**64]
)


def _wider(schemas):
    several = st.lists(schemas, min_size=1, max_size=3)
    named = st.dictionaries(st.sampled_from("abc"), schemas, max_size=3)
    keywords = {"allOf": several, "anyOf": several, "oneOf": several, "items": schemas, "properties": named}
    keywords |= {"additionalProperties": schemas, "required": st.lists(st.sampled_from("abd"), unique=True, max_size=2)}
    keywords |= {key: NUMBERS for key in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")}
    keywords |= {key: st.integers(0, 3) for key in ("minLength", "maxLength", "minItems", "maxItems")}
    keywords |= {"type": st.sampled_from(["integer", "number", "string", "object", "array", ["integer", "null"]])}
    keywords |= {"const": st.sampled_from(DATA), "enum": st.lists(st.sampled_from(DATA), min_size=1, max_size=3)}
    keywords |= {"$ref": st.sampled_from(["#/$defs/p", "#/$defs/q"])}
    pair = st.lists(st.sampled_from(sorted(keywords)), min_size=1, max_size=3, unique=True)
    return pair.flatmap(lambda keys: st.fixed_dictionaries({key: keywords[key] for key in keys}))


SCHEMAS = st.recursive(st.sampled_from([True, {}, INTEGER, STRING, {"type": "null"}, A, B]), _wider, max_leaves=6)


@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(st.fixed_dictionaries({"p": SCHEMAS, "q": SCHEMAS}), SCHEMAS, st.randoms(use_true_random=False), st.booleans())
def test_what_a_grammar_lets_through_fits_the_schema(defs, schema, rng, closed):
    """By JSON schema's own rules: an answer may be one of fewer, but never one too many."""
    whole = {"allOf": [schema], "$defs": defs} if isinstance(schema, bool) else {**schema, "$defs": defs}
    try:
        fits = Fits(whole, closed=closed)
    except ValueError:
        return
    for value in [v for v in DATA if fits(v)] + [v for _ in range(4) if (v := fits.some(rng)) is not None]:
        assert valid(value, whole, whole), (whole, value)


# --- names and data are no keywords


def test_properties_may_be_called_like_keywords():
    names = ["$schema", "$id", "$ref", "$anchor", "const", "enum", "properties", "items", "not", "x-guidance"]
    schema = {"type": "object", "properties": {name: INTEGER for name in names}, "required": names}
    check(schema, [{name: 1 for name in names}], [{name: 1 for name in names[1:]}, {name: "x" for name in names}])


@pytest.mark.parametrize("data", [{"$ref": "#/x"}, {"$schema": "x"}, {"$id": "a", "type": "string"}, {"oneOf": 1}])
def test_data_that_looks_like_keywords_is_followed_letter_by_letter(data):
    check({"const": data}, [data], [{}])
    check({"enum": [data, 1]}, [data, 1], [{}])
    check({**INTEGER, "default": data, "examples": [data]}, [1], ["x"])


@pytest.mark.parametrize(
    "schema",
    [
        {"items": {"$ref": "#D"}, "$defs": {"d": {"$anchor": "D", **INTEGER}}},
        {"items": {"$ref": "item.json"}, "$id": "https://a.b/c/root.json", "$defs": {"d": {"$id": "item.json", **INTEGER}}},
        {"items": {"$ref": "https://a.b/i"}, "$defs": {"d": {"$id": "https://a.b/i", **INTEGER}}},
        {"items": {"$ref": "https://a.b/i#D"}, "$defs": {"d": {"$id": "https://a.b/i", "items": {"$anchor": "D", **INTEGER}}}},
        {"items": {"$id": "https://a.b/i", "$ref": "#/$defs/own", "$defs": {"own": INTEGER}}, "$defs": {"own": STRING}},
        {"items": {"$ref": "#/$defs/a~1b~0c%25"}, "$defs": {"a/b~c%": INTEGER}},
        {"items": {"$ref": "#/prefixItems/0"}, "prefixItems": [INTEGER]},
        {"items": {"$ref": "#/components/schemas/X"}, "components": {"schemas": {"X": INTEGER}}},
        {"items": {"$dynamicRef": "#node"}, "$defs": {"d": {"$dynamicAnchor": "node", **INTEGER}}},
        {"items": {"$ref": "#D"}, "definitions": {"d": {"$id": "#D", **INTEGER}}},
        {"items": {"$ref": "i"}, "$schema": "http://json-schema.org/draft-04/schema", "$defs": {"D": {"id": "i", **INTEGER}}},
        {"items": {"$ref": "urn:uuid:1#/$defs/x"}, "$id": "urn:uuid:1", "$defs": {"x": {"$ref": "#/$defs/y"}, "y": INTEGER}},
    ],
)  # fmt: skip
def test_references_resolve_as_json_schema_says(schema):
    check({"type": "array", **schema}, [[1], [1, 2]], [["x"], ["1", "x"]])


@pytest.mark.parametrize("ref", ["#D", "other.json", "https://example.com/schema", "#/$defs/none", "#/type/0", "http://[", 5])
def test_a_reference_to_nothing_is_refused_with_its_text_and_place(ref):
    with pytest.raises(BadRequest, match="field: .ref at #/properties/a: .*does not point to a subschema") as refused:
        of_schema({"type": "object", "properties": {"a": {"$ref": ref}}}, "field")
    assert str(ref) in str(refused.value) and refused.value.param == "field"


def test_recursive_schemas_are_followed():
    tree = {
        "type": "object",
        "properties": {"v": INTEGER, "kids": {"type": "array", "items": {"$ref": "#"}}},
        "required": ["v"],
    }
    check(tree, [{"v": 1, "kids": [{"v": 2, "kids": []}]}], [{"v": 1, "kids": [{}]}, {"v": 1, "kids": [{"v": 1, "w": 1}]}])


# --- keywords that forbid nothing


@pytest.mark.parametrize(
    "schema",
    [
        {"propertyNames": STRING},
        {"propertyNames": True},
        {"propertyNames": {}},
        {"propertyNames": {"$ref": "#/$defs/s"}, "$defs": {"s": {**STRING, "description": "a name"}}},
        {"uniqueItems": False},
        {"not": False},
        {"not": {"not": {}}},
        {"unevaluatedProperties": True},
        {"unevaluatedItems": {}},
        {"dependentRequired": {}},
        {"dependentRequired": {"a": []}},
        {"dependentSchemas": {"a": True}},
        {"dependencies": {}},
        {"if": {"type": "string"}},
        {"if": {"type": "string"}, "then": True, "else": {}},
        {"then": False},
        {"minContains": 3},
        {"maxContains": 0},
        {"contains": STRING, "minContains": 0},
        {"contentSchema": {"type": "nonsense"}},
        {"$comment": "x", "deprecated": True, "x-anything": {"$ref": "#nowhere"}, "nullable": True},
        *({"format": name} for name in ("password", "uuid4", "path", "binary", "regex", "uri-reference", "int64", "unknown")),
    ],
)
def test_keywords_that_forbid_nothing_are_accepted(schema):
    check(schema, [1, "x", {"a": 1}, [1, 1]], [])


def test_a_list_of_at_most_one_item_is_unique_anyhow():
    check({"type": "array", "uniqueItems": True, "maxItems": 1}, [[1], []], [[1, 1]])


@pytest.mark.parametrize(
    "keyword",
    [
        {"uniqueItems": True},
        {"contains": {"type": "string"}},
        {"not": {"type": "string"}},
        {"if": {"type": "string"}, "then": {"maxLength": 1}},
        {"propertyNames": {"pattern": "^a"}},
        {"dependentRequired": {"a": ["b"]}},
        {"dependentSchemas": {"a": {"required": ["b"]}}},
        {"dependencies": {"a": ["b"]}},
        {"unevaluatedProperties": {"type": "string"}},
        {"oneOf": [{"type": "integer"}, {"type": "integer", "minimum": 3}]},
        {"oneOf": [{"type": "integer"}, {"type": "number"}]},
        {"oneOf": [A, {"$ref": "#/$defs/b"}], "$defs": {"b": {"properties": {"a": INTEGER}}}},
    ],
)
def test_what_cannot_be_enforced_is_refused_by_name_and_place_unless_the_client_is_not_strict(keyword):
    name, defs = next(iter(keyword)), keyword.pop("$defs", {})
    for schema, place in ((keyword, "#"), ({"type": "array", "items": keyword}, "#/items")):
        with pytest.raises(BadRequest, match=f"field: {name} at {place}: .*strict: false"):
            of_schema({**schema, "$defs": defs}, "field")
    Fits({**keyword, "$defs": defs}, lenient=True)


@pytest.mark.parametrize(
    "schema, what",
    [
        ({"type": "nonsense"}, "type at #: must be one of null, .*'nonsense'"),
        ({"properties": {"a": 5}}, "schema at #/properties/a: must be an object or a boolean, not 5"),
        ({"properties": [1]}, "properties at #: must be an object of schemas"),
        ({"anyOf": []}, "anyOf at #: must be a list"),
        ({"maxLength": -1}, "maxLength at #: must be a whole number of at least 0, not -1"),
        ({"minimum": "3"}, "minimum at #: must be a number, not '3'"),
    ],
)
def test_a_schema_that_is_none_is_refused_with_what_would_be_right(schema, what):
    with pytest.raises(BadRequest, match=what):
        of_schema(schema, "field")


def test_a_schema_nested_deeper_than_the_library_reads_is_refused():
    def nested(depth: int) -> dict:
        return {"type": "array", "items": nested(depth - 1)} if depth else STRING

    Fits(nested(90))
    for depth in (110, 600, 900):
        with pytest.raises(BadRequest, match="nested too deeply"):
            of_schema(nested(depth), "field")


def test_a_count_may_be_written_with_a_point():
    check({**STRING, "minLength": 2.0}, ["ab"], ["a"])


# --- oneOf


def test_branches_that_no_answer_can_share_are_followed():
    defs = {"$defs": {"a": A, "kind": {"$ref": "#/$defs/a"}}}
    check({"oneOf": [{"$ref": "#/$defs/kind"}, {"type": "null"}], **defs}, [{"a": 1}, None], [{}, 1])
    check({"oneOf": [{**INTEGER, "maximum": 0}, {**INTEGER, "minimum": 1}]}, [0, 1], ["x"])
    check({"oneOf": [{"const": 1}, {"const": "1"}, {"enum": [True, 2]}]}, [1, "1", True, 2], [False])
    tagged = [{"type": "object", "properties": {"k": {"const": k}, k: INTEGER}, "required": ["k"]} for k in "xyz"]
    check({"oneOf": tagged}, [{"k": "x", "x": 1}, {"k": "z"}], [{"k": "x", "z": 1}])
    check({"oneOf": [A, B]}, [{"a": 1}, {"b": 1}], [{"a": 1, "b": 1}, {}])


def test_one_of_is_compared_in_bounded_time():
    """Whatever the branches: 2,000 constants, or references that fan out."""
    constants = {"oneOf": [{"const": f"value {i}", "title": "x"} for i in range(2000)]}
    check(constants, ["value 7"], ["value 2000"])
    with pytest.raises(BadRequest, match="both of its branches 3 and 2000"):
        of_schema({"oneOf": [*constants["oneOf"], {"enum": ["value 3"]}]}, "field")
    fan = {f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 40} for i in range(9)} | {"d9": INTEGER}
    with pytest.raises(BadRequest, match="oneOf at #: .*anyOf"):
        of_schema({"oneOf": [{"$ref": "#/$defs/d0"}, {"type": "null"}], "$defs": fan}, "field")
    of_schema({"properties": {"a": INTEGER}, "allOf": [{"$ref": "#/$defs/d0"}], "$defs": fan}, "field")


def test_schemas_of_which_each_leads_to_all_others_are_refused_in_time():
    refs = [{"$ref": f"#/$defs/d{i}"} for i in range(300)]
    web = {f"d{i}": {"properties": {"a": {}}, "allOf": [refs[(i + 1) % 300]]} for i in range(300)}
    with pytest.raises(BadRequest, match="too many branches and references to follow"):
        of_schema({"anyOf": refs, "$defs": web}, "field")


# --- numbers at the limits of their types


@pytest.mark.parametrize("bound", [2**53 - 1, 2**53, 2**53 + 1, 10**18 - 1, 10**18, 2**62, 2**63 - 1, 2**63, 2**64 - 1, 1e300])
@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("kind", ["integer", "number"])
def test_no_number_beyond_its_bound_gets_through(bound, sign, kind):
    """Those that a bound shuts out are shut out; a bound that leaves nothing to write is refused by its name."""
    for keyword in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"):
        schema = {"type": kind, keyword: sign * bound}
        around = [int(sign * bound) + d for d in (-2000, -2, -1, 0, 1, 2, 2000)] + [0, 1, -1]
        try:
            fits = Fits(schema)
        except BadRequest as e:
            assert keyword.lower().removeprefix("exclusive") in str(e) and "beyond" in str(e)
            continue
        wrong = [n for n in around if fits(n) and not valid(n, schema, schema)]
        assert not wrong and ((sign > 0) == keyword.lower().endswith("minimum") or fits(sign))


def test_the_limits_of_integer_types_leave_the_numbers_people_write():
    check({**INTEGER, "minimum": -(2**63), "maximum": 2**63 - 1}, [0, -(2**62), 9 * 10**18], [2**63, -(2**63) - 1])
    check({**INTEGER, "minimum": 0, "maximum": 2**64 - 1}, [0, 9 * 10**18], [-1, 2**64])
    check({"type": "number", "minimum": -1.7976931348623157e308, "maximum": 1.7976931348623157e308}, [0, -2.5, 10**15], [])
    check({**INTEGER, "exclusiveMinimum": 2**53}, [2**53 + 2], [2**53])
    with pytest.raises(BadRequest, match=r"minimum and maximum at #: no number from"):
        of_schema({**INTEGER, "minimum": 2**53 + 1, "maximum": 2**53 + 1}, "field")


@pytest.mark.parametrize("value", [2**53 + 1, 2**64 - 1, -(2**63) + 1, [1, {"a": 2**53 + 1}]])
def test_a_constant_that_would_come_out_as_another_number_is_refused(value):
    for schema in ({"const": value}, {"enum": [1, value]}):
        with pytest.raises(BadRequest, match="cannot be followed exactly"):
            of_schema(schema, "field")


def test_constants_that_are_doubles_are_written_as_they_are():
    check({"enum": [2**53, 10**18, 0.1, 1e300]}, [2**53, 10**18, 0.1, 10**300], [2**53 + 1])


# --- objects are closed


def test_objects_are_closed_to_the_properties_they_name():
    check({"properties": {"a": A}}, [{"a": {"a": 1}}, {}], [{"b": 1}, {"a": {"a": 1, "b": 1}}])
    check(
        {"type": "array", "items": {"anyOf": [{"$ref": "#/$defs/a"}, B]}, "$defs": {"a": A}}, [[{"a": 1}]], [[{"a": 1, "c": 1}]]
    )
    check({"type": "object", "properties": {}}, [{}], [{"a": 1}])
    check({"properties": {"a": INTEGER}, "required": ["b"]}, [{"a": 1, "b": "x"}], [{"a": 1, "b": 1, "c": 1}])


def test_objects_that_say_what_more_there_may_be_stay_open():
    for more in ({"additionalProperties": True}, {"additionalProperties": INTEGER}, {"unevaluatedProperties": True}):
        check({**A, **more}, [{"a": 1, "b": 1}], [{"b": 1}])
    check({"type": "object"}, [{"x": 1}], [])
    check({**A, "patternProperties": {"^x": INTEGER}}, [{"a": 1, "x1": 1}], [{"a": 1, "x1": "y"}])
    check(A, [{"a": 1, "b": 1}], [{"b": 1}], closed=False)


def test_an_object_that_several_schemas_describe_is_closed_to_what_all_of_them_name():
    base = {"$defs": {"base": A}}
    both = {"allOf": [{"$ref": "#/$defs/base"}, {"properties": {"b": INTEGER}}], **base}
    check(both, [{"a": 1, "b": 2}, {"a": 1}], [{"a": 1, "c": 1}, {"b": 1}])
    beside = {"$ref": "#/$defs/base", "properties": {"b": INTEGER}, **base}
    check(beside, [{"a": 1}, {"a": 1, "b": 1}], [{"a": 1, "c": 1}])
    either = {"properties": {"a": INTEGER, "b": INTEGER}, "anyOf": [{"required": ["a"]}, {"required": ["b"]}]}
    check(either, [{"a": 1}, {"b": 1}], [{}, {"a": 1, "c": 1}])
    shared = {"allOf": [{"properties": {"x": A}}, {"properties": {"x": B}}]}
    check(shared, [{"x": {"a": 1, "b": 1}}], [{"x": {"a": 1}}])
    check({"allOf": [{"$ref": "#/$defs/base"}], "description": "one", **base}, [{"a": 1}], [{"a": 1, "b": 1}])


def test_false_unevaluated_properties_close_an_object():
    check({**A, "unevaluatedProperties": False}, [{"a": 1}], [{"a": 1, "b": 1}], closed=False)


def test_a_key_cannot_stand_twice_by_an_escaped_spelling():
    schema = {**A, "additionalProperties": True}
    for key in ("\\u0061", "\\u0061\\u0062"):
        assert not Fits(schema).text(f'{{"a": 1, "{key}": "x"}}')
    named = {"type": "object", "properties": {"a\n": INTEGER, "b/": INTEGER}, "additionalProperties": True}
    assert Fits(named).text('{"a\\n": 1, "b/": 1, "c": "x"}')
    for key in ("a\\u000a", "a\\u000A", "b\\/", "b\\u002f"):
        assert not Fits(named).text(f'{{"{key}": "x"}}')
