"""Whether one value can fit two JSON schemas, for the branches of `oneOf`. Pure.

A schema is treated as alternatives, each a set of plain facts (types, values, properties, bounds). Facts that are left out
only make a schema look wider. So "disjoint" is certain, and "overlapping" may mean "unknown".
"""

import itertools
import json
from dataclasses import dataclass, field, replace
from typing import Any

from slipstream.grammar.schema_refs import Document, Place, Resource

IN_PLACE = frozenset({"$ref", "$dynamicRef", "$recursiveRef", "allOf", "anyOf", "oneOf", "if", "dependentSchemas"})
OBJECT = frozenset({
    "additionalProperties", "unevaluatedProperties", "patternProperties", "properties", "required", "minProperties",
    "maxProperties", "propertyNames", "dependentRequired",
})  # fmt: skip
MAX_WORK = 30_000  # schemas read and pairs compared for one document; at most about 0.5 s

_TYPES = frozenset({"null", "boolean", "string", "array", "object", "integer", "fraction"})
_BOUNDS = (  # the kind of value that is bounded, and its two keywords
    (frozenset({"integer", "fraction"}), "minimum", "maximum"),
    (frozenset({"string"}), "minLength", "maxLength"),
    (frozenset({"array"}), "minItems", "maxItems"),
    (frozenset({"object"}), "minProperties", "maxProperties"),
)
_DEEPEST = 8  # the depth to which references and branches are followed
_WIDEST = 64  # alternatives of one schema


@dataclass(frozen=True)
class Facts:
    """Every value that fits has one of the types and, unless None, is one of the values (by their JSON)."""

    types: frozenset[str] = _TYPES
    values: dict[str, Any] | None = None
    required: frozenset[str] = frozenset()
    properties: dict[str, tuple[Place, ...]] = field(default_factory=dict)
    names: frozenset[str] | None = None  # the only properties that there may be
    bounds: dict[str, float] = field(default_factory=dict)

    def both(self, other: "Facts") -> "Facts":
        """The facts of a value that fits both."""
        values = self.values if other.values is None else other.values
        if self.values is not None and other.values is not None:
            values = {k: v for k, v in self.values.items() if k in other.values}
        properties = {k: self.properties.get(k, ()) + other.properties.get(k, ()) for k in self.properties | other.properties}
        names = self.names if other.names is None else other.names if self.names is None else self.names & other.names
        bounds = {**self.bounds}
        for key, value in other.bounds.items():
            bounds[key] = (max if key.startswith("min") else min)(value, bounds.get(key, value))
        return Facts(self.types & other.types, values, self.required | other.required, properties, names, bounds)


class Overlap:
    """Compares subschemas of one document. Raises ValueError if that takes too much work."""

    def __init__(self, document: Document):
        self._document = document
        self._work = 0
        self._known: dict[tuple[int, bool], list[Facts]] = {}

    def pair(self, branches: list[Place], closed: bool) -> tuple[int, int] | None:
        """Two branches that one value may fit, None if there are none.

        closed: whether the answer's branch allows only the properties that it names; the others follow JSON Schema.
        """
        wide = [self._alternatives(branch, 0, False) for branch in branches]
        if all(len(facts) == 1 and facts[0].values is not None for facts in wide):
            return _twice([facts[0].values or {} for facts in wide])
        own = [self._alternatives(branch, 0, True) for branch in branches] if closed else wide
        for i, j in itertools.combinations(range(len(branches)), 2):
            if self._disjoint(wide[i], wide[j], 0):
                continue
            if not (closed and self._disjoint(own[i], wide[j], 0) and self._disjoint(wide[i], own[j], 0)):
                return i, j
        return None

    def _disjoint(self, ours: list[Facts], theirs: list[Facts], depth: int) -> bool:
        """Whether it is certain that no value fits both."""
        return all(self._apart(a, b, depth) for a in ours for b in theirs)

    def _apart(self, a: Facts, b: Facts, depth: int) -> bool:
        self.count()
        types, values = a.types & b.types, a.values if b.values is None else b.values
        if values is not None:
            shared = values if a.values is None or b.values is None else {k: v for k, v in a.values.items() if k in b.values}
            return not any(_types_of(value) & types for value in shared.values())
        if types == {"object"}:
            return any(self._impossible(name, a, b, depth) for name in a.required | b.required)
        bounds = a.both(b).bounds if a.bounds and b.bounds else {}
        return not types or any(
            types <= kinds and {least, most} <= bounds.keys() and bounds[least] > bounds[most] for kinds, least, most in _BOUNDS
        )

    def _impossible(self, name: str, a: Facts, b: Facts, depth: int) -> bool:
        """Whether a required property has no value that fits both schemas."""
        if any(facts.names is not None and name not in facts.names for facts in (a, b)):
            return True
        if depth > _DEEPEST:
            return False
        ours, theirs = ([self._alternatives(p, depth + 1, False) for p in f.properties.get(name, ())] for f in (a, b))
        return any(self._disjoint(x, y, depth + 1) for x in ours for y in theirs)

    def count(self) -> None:
        self._work += 1
        if self._work > MAX_WORK:
            raise ValueError("too many branches and references to follow")

    def _alternatives(self, place: Place, depth: int, closed: bool) -> list[Facts]:
        """Alternatives: one of them holds for every value that fits the schema."""
        key = id(place.schema), closed
        if key not in self._known:
            self._known[key] = self._look(place, depth, closed)
        return self._known[key]

    def _look(self, place: Place, depth: int, closed: bool) -> list[Facts]:
        self.count()
        schema, home = place
        if schema is False:
            return []
        if not isinstance(schema, dict) or depth > _DEEPEST:
            return [Facts()]
        found, inner = [self._own(place, closed)], closed and not OBJECT & schema.keys()
        for group in self._groups(schema, home):
            more = [facts for sub in group for facts in self._alternatives(sub, depth + 1, inner)]
            if len(found) * len(more) <= _WIDEST:
                found = [a.both(b) for a in found for b in more]
        return found

    def _groups(self, schema: dict[str, Any], home: Resource) -> list[list[Place]]:
        """Groups: a value that fits the schema fits one member of each group."""
        out = []
        for key in ("anyOf", "oneOf"):
            if isinstance(schema.get(key), list):
                out.append([self._document.place(sub, home) for sub in schema[key]])
        if isinstance(schema.get("allOf"), list):
            out += [[self._document.place(sub, home)] for sub in schema["allOf"]]
        target = self._document.resolve(schema["$ref"], home) if isinstance(schema.get("$ref"), str) else None
        return out + [[target]] if target is not None else out

    def _own(self, place: Place, closed: bool) -> Facts:
        schema, home = place
        facts = Facts()
        if "type" in schema:
            named = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
            named = list(filter(_is_text, named))
            types = {*named, "fraction", "integer"} if "number" in named else {*named}
            facts = replace(facts, types=_TYPES & types)
        values = [schema["const"]] if "const" in schema else schema.get("enum")
        if isinstance(values, list):
            facts = replace(facts, values={_key(value): value for value in values})
        properties, required = schema.get("properties"), schema.get("required")
        properties = properties if isinstance(properties, dict) else {}
        required = frozenset(filter(_is_text, required)) if isinstance(required, list) else frozenset()
        names = None
        if schema.get("additionalProperties") is False and not schema.get("patternProperties"):
            names = frozenset(properties)
        elif closed and properties and not opens(schema) and not IN_PLACE & schema.keys():
            names = frozenset(properties) | required
        return replace(
            facts,
            required=required,
            properties={name: (self._document.place(sub, home),) for name, sub in properties.items()},
            names=names,
            bounds={key: schema[key] for _, *pair in _BOUNDS for key in pair if isinstance(schema.get(key), int | float)},
        )


def _twice(constants: list[dict[str, Any]]) -> tuple[int, int] | None:
    """Two branches with a common constant; fast for very many branches."""
    seen: dict[str, int] = {}
    for i, values in enumerate(constants):
        for key in values:
            if key in seen:
                return seen[key], i
            seen[key] = i
    return None


def opens(schema: dict[str, Any]) -> bool:
    """Whether an object's schema says itself whether other properties are allowed."""
    return (
        bool({"additionalProperties", "patternProperties"} & schema.keys())
        or schema.get("unevaluatedProperties", False) is not False
    )


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _types_of(value: Any) -> frozenset[str]:
    if isinstance(value, bool) or value is None:
        return frozenset({"null" if value is None else "boolean"})
    if isinstance(value, int | float):
        return frozenset({"fraction" if isinstance(value, float) and not value.is_integer() else "integer"})
    return frozenset({{str: "string", list: "array", dict: "object"}[type(value)]})


def _key(value: Any) -> str:
    """A key, equal for values that are equal in JSON Schema: 1 and 1.0, and objects in any order."""
    return json.dumps(_plain(value), sort_keys=True)


def _plain(value: Any) -> Any:
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return {k: _plain(v) for k, v in value.items()} if isinstance(value, dict) else value
