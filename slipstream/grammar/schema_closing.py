"""Decides where a JSON schema's objects are closed implicitly, and to which properties. Pure."""

from collections.abc import Callable
from typing import NamedTuple

from slipstream.grammar.schema_overlap import IN_PLACE, OBJECT, opens
from slipstream.grammar.schema_refs import Document, Place


class Closing(NamedTuple):
    """The decision for one schema."""

    names: list[str] | None  # the only properties that its object may have; None: not closed here
    branches: bool  # whether schemas in its place (anyOf, $ref, ...) close theirs
    below: Callable[[str], bool]  # whether an object one level down is closed, by the property's name ("" for others)


OPEN = Closing(None, False, lambda name: False)


def closing(document: Document, place: Place, count: Callable[[], None]) -> Closing:
    """Of a schema that may be closed. count: called for each schema that is read; it may raise.

    A single branch without other keywords is the object itself. Otherwise the object is closed here, to the names of all
    branches. An object that two places describe is closed in neither, since each would forbid the other's names.
    """
    schema = place.schema
    applied = IN_PLACE & schema.keys()
    if not {"then", "else"} & schema.keys():  # an `if` alone has no effect
        applied -= {"if"}
    if len(applied) == 1 and not OBJECT & schema.keys() and len(schema.get("allOf", ".")) == 1:
        return Closing(None, True, lambda name: True)
    own = _described(document, place._replace(schema={k: v for k, v in schema.items() if k not in applied}), count)
    other = _described(document, place._replace(schema={k: schema[k] for k in applied}), count)
    shared, crowded = frozenset(other.names), bool(applied) or {"properties", "patternProperties"} <= schema.keys()

    def below(name: str) -> bool:
        return not other.open and name not in shared if name else not crowded

    if own.open or other.open or not (own.lists or other.lists):
        return Closing(None, False, below)
    return Closing(list(dict.fromkeys([*own.names, *other.names])), False, below)


class _Described(NamedTuple):
    names: list[str]  # of properties
    open: bool  # it allows others explicitly
    lists: bool  # it has `properties`


def _described(document: Document, place: Place, count: Callable[[], None]) -> _Described:
    """The statements of a schema, and of all schemas in its place, on an object's properties."""
    names: list[str] = []
    todo, seen, lists = [place], set(), False
    while todo:
        schema, home = todo.pop()
        if not isinstance(schema, dict) or id(schema) in seen:
            continue
        seen.add(id(schema))
        count()
        if opens(schema) or {"if", "dependentSchemas", "$dynamicRef", "$recursiveRef"} & schema.keys():
            return _Described(names, True, lists)
        properties, required = schema.get("properties"), schema.get("required")
        if isinstance(properties, dict):
            names, lists = names + [*properties], True
        names += [name for name in required if isinstance(name, str)] if isinstance(required, list) else []
        groups = [schema[key] for key in ("allOf", "anyOf", "oneOf") if isinstance(schema.get(key), list)]
        below = [document.place(sub, home) for group in groups for sub in group]
        if isinstance(ref := schema.get("$ref"), str) and (target := document.resolve(ref, home)) is not None:
            below.append(target)
        todo += reversed(below)
    return _Described(names, False, lists)
