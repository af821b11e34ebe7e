"""Rewrites a client's JSON schema into one that the library follows exactly. Pure.

References by `$id`, `$anchor` or pointer become plain ones into one `$defs`. Keywords that forbid nothing are left out.
`oneOf` becomes `anyOf` if no answer can fit two branches. Bounds of numbers become ones that can be followed exactly. A keyword
that cannot be enforced is refused by its name and place, or left to the model if the client is not strict.

Objects are closed: a schema that names properties and does not mention others allows no others. JSON Schema itself would let
a model invent properties until max_tokens.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from slipstream.errors import BadRequest
from slipstream.grammar.schema_closing import OPEN, Closing, closing
from slipstream.grammar.schema_numbers import bounds, check_data
from slipstream.grammar.schema_overlap import IN_PLACE, Overlap
from slipstream.grammar.schema_refs import Document, Place

MAX_DEPTH = 100  # of JSON; the library reads 128
_FORMATS = {
    "date-time",
    "time",
    "date",
    "duration",
    "email",
    "hostname",
    "ipv4",
    "ipv6",
    "uuid",
    "uri",
}  # other formats are annotations
_REFS = ("$ref", "$dynamicRef", "$recursiveRef")
_TYPES = ["null", "boolean", "integer", "number", "string", "array", "object"]


class _Node(NamedTuple):
    """One schema while it is rewritten."""

    place: Place
    at: tuple[str, ...]  # the JSON pointer's tokens
    closing: Closing
    out: dict[str, Any]


class Simplifier:
    """`add` documents; the schemas that it returns point into `defs`, which all of them share."""

    def __init__(self, closed: bool = True):
        """closed: see this module's first lines."""
        self.closed = closed
        self.defs: dict[str, Any] = {}
        self.open = False  # whether an object that names properties allows others too

    def add(self, schema: dict[str, Any], param: str, lenient: bool = False) -> Any:
        """The schema, rewritten. lenient: leaves keywords that cannot be enforced to the model.

        Raises BadRequest, with `param`, naming the keyword and its place.
        """
        return _Rewriter(self, Document(schema), param, lenient).whole()


class _Rewriter:
    def __init__(self, to: Simplifier, document: Document, param: str, lenient: bool):
        self._to, self._document, self._param, self._lenient = to, document, param, lenient
        self._overlap = Overlap(document)
        self._names: dict[tuple[int, bool], str] = {}
        self._todo: list[tuple[str, Place, bool, tuple[str, ...]]] = []

    def whole(self) -> Any:
        root = self._schema(self._document.root, self._to.closed, ())
        while self._todo:
            name, place, close, at = self._todo.pop()
            self._to.defs[name] = self._schema(place, close, at)
        return root

    def _refused(self, at: tuple[str, ...], keyword: str, why: str) -> BadRequest:
        pointer = "#" + "".join("/" + t.replace("~", "~0").replace("/", "~1") for t in at)
        return BadRequest(f"{self._param}: {keyword} at {pointer[:200]}: {why}", self._param)

    def _unsupported(self, node: _Node, keyword: str, why: str = "cannot be enforced") -> None:
        """Leaves a keyword to the model, or refuses it."""
        if not self._lenient:
            raise self._refused(node.at, keyword, f"{why}; leave it out, or leave it to the model with strict: false")

    def _schema(self, place: Place, close: bool, at: tuple[str, ...]) -> Any:
        schema, home = place
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, dict):
            raise self._refused(at, "schema", f"must be an object or a boolean, not {schema!r:.100}")
        if len(at) > MAX_DEPTH:
            raise BadRequest(f"{self._param}: nested too deeply, more than {MAX_DEPTH} levels", self._param)
        try:
            found = closing(self._document, place, self._overlap.count) if close else OPEN
        except ValueError as e:
            raise self._refused(at, "schema", str(e)) from None
        node = _Node(place, at, found, {})
        for key, value in schema.items():
            if step := _STEPS.get(key):
                step(self, node, key, value)
        self._numbers(node)
        if found.names is not None:
            properties = node.out.get("properties", {})
            node.out["properties"] = {**properties, **{name: True for name in found.names if name not in properties}}
            node.out["additionalProperties"] = False
        elif {"properties", "required", "patternProperties"} & node.out.keys() and node.out.get(
            "additionalProperties"
        ) is not False:
            self._to.open = True
        return node.out

    # --- one keyword each

    def _copy(self, node: _Node, key: str, value: Any) -> None:
        node.out[key] = value

    def _type(self, node: _Node, key: str, value: Any) -> None:
        for name in value if isinstance(value, list) else [value]:
            if name not in _TYPES:
                raise self._refused(node.at, key, f"must be one of {', '.join(_TYPES)}, or a list of them, not {name!r:.100}")
        node.out[key] = value

    def _data(self, node: _Node, key: str, value: Any) -> None:
        try:
            check_data(value)
        except ValueError as e:
            raise self._refused(node.at, key, str(e)) from None
        node.out[key] = value

    def _count(self, node: _Node, key: str, value: Any) -> None:
        if isinstance(value, bool) or not isinstance(value, int | float) or value < 0 or value != value // 1:
            raise self._refused(node.at, key, f"must be a whole number of at least 0, not {value!r:.100}")
        node.out[key] = int(value)

    def _numbers(self, node: _Node) -> None:
        types = node.out.get("type", _TYPES)
        try:
            node.out.update(bounds(node.place.schema, "number" in types))
        except ValueError as e:
            keyword, _, why = str(e).partition(": ")
            raise self._refused(node.at, keyword, why) from None

    def _format(self, node: _Node, key: str, value: Any) -> None:
        if value in _FORMATS:
            node.out[key] = value

    def _ref(self, node: _Node, key: str, value: Any) -> None:
        schema, home = node.place
        if key == "$dynamicRef" and self._document.ambiguous(str(value).rpartition("#")[2]):
            return self._unsupported(node, key, "the schema has several anchors of this name")
        target = self._document.resolve(value, home) if isinstance(value, str) else None
        if target is None:
            raise self._refused(node.at, key, f"{value!r:.100} does not point to a subschema of this schema")
        name = self._names.get((id(target.schema), node.closing.branches)) if isinstance(target.schema, dict) else None
        if name is None:
            name = self._names[id(target.schema), node.closing.branches] = f"d{len(self._to.defs)}"
            self._to.defs[name] = None
            self._todo.append((name, target, node.closing.branches, tuple(value.strip("#/").split("/"))))
        _also(node.out, {"$ref": f"#/$defs/{name}"})

    def _below(self, node: _Node, schema: Any, *tokens: str, close: bool) -> Any:
        return self._schema(self._document.place(schema, node.place.resource), close, (*node.at, *tokens))

    def _one(self, node: _Node, key: str, value: Any) -> None:
        node.out[key] = self._below(node, value, key, close=node.closing.below(""))

    def _items(self, node: _Node, key: str, value: Any) -> None:
        """In drafts before 2020-12 a list means `prefixItems`, and `additionalItems` holds for the items after it."""
        if isinstance(value, list):
            self._several(node, "prefixItems", value)
            if "additionalItems" in node.place.schema:
                self._one(node, "items", node.place.schema["additionalItems"])
        else:
            self._one(node, key, value)

    def _several(self, node: _Node, key: str, value: Any) -> None:
        if not isinstance(value, list) or not value:
            raise self._refused(node.at, key, "must be a list of at least one schema")
        close = node.closing.below("") if key == "prefixItems" else node.closing.branches
        _also(node.out, {key: [self._below(node, sub, key, str(i), close=close) for i, sub in enumerate(value)]})

    def _named(self, node: _Node, key: str, value: Any) -> None:
        if not isinstance(value, dict):
            raise self._refused(node.at, key, "must be an object of schemas")
        of = str if key == "properties" else lambda pattern: ""
        node.out[key] = {n: self._below(node, sub, key, n, close=node.closing.below(of(n))) for n, sub in value.items()}

    def _one_of(self, node: _Node, key: str, value: Any) -> None:
        self._several(node, "anyOf", value)
        try:
            pair = self._overlap.pair([self._document.place(sub, node.place.resource) for sub in value], node.closing.branches)
            why = pair and f"an answer may fit both of its branches {pair[0]} and {pair[1]}, which"
        except ValueError as e:
            why = f"it has {e}, so it"
        if why and not self._lenient:
            raise self._refused(
                node.at,
                key,
                f"{why} cannot be enforced; use anyOf, or where the field has it strict: false, which takes it as anyOf",
            )

    def _not(self, node: _Node, key: str, value: Any) -> None:
        if value is not False and not (isinstance(value, dict) and self._allows_all(value.get("not"), node)):
            self._unsupported(node, key)

    def _if(self, node: _Node, key: str, value: Any) -> None:
        schema = node.place.schema
        if not all(self._allows_all(schema.get(branch, True), node) for branch in ("then", "else")):
            self._unsupported(node, key)

    def _allowing(self, node: _Node, key: str, value: Any) -> None:
        """Keywords that are supported only where they allow everything."""
        if not self._allows_all(value, node):
            self._unsupported(node, key)

    def _unevaluated(self, node: _Node, key: str, value: Any) -> None:
        """If no other keyword evaluates properties or items, false has the meaning of `additionalProperties` and `items`."""
        plain, schema = {"unevaluatedProperties": "additionalProperties", "unevaluatedItems": "items"}[key], node.place.schema
        if plain in schema or (value is False and not (IN_PLACE | {"contains"}) & schema.keys()):
            node.out.setdefault(plain, False)
        else:
            self._allowing(node, key, value)

    def _property_names(self, node: _Node, key: str, value: Any) -> None:
        if not self._allows_all(value, node, "string"):
            self._unsupported(node, key)

    def _unique(self, node: _Node, key: str, value: Any) -> None:
        most = node.place.schema.get("maxItems")
        if value is not False and not (isinstance(most, int) and most <= 1):
            self._unsupported(node, key)

    def _contains(self, node: _Node, key: str, value: Any) -> None:
        if node.place.schema.get("minContains") != 0 or "maxContains" in node.place.schema:
            self._unsupported(node, key)

    def _dependent(self, node: _Node, key: str, value: Any) -> None:
        """`dependencies` of older drafts has both forms: names of required properties, or a schema."""
        required = set(map(str, _list(node.place.schema.get("required"))))
        for dependents in value.values() if isinstance(value, dict) else [value]:
            asks = (
                not required >= set(map(str, dependents))
                if isinstance(dependents, list)
                else not self._allows_all(dependents, node)
            )
            if asks:
                return self._unsupported(node, key)

    def _allows_all(self, schema: Any, node: _Node, kind: str = "", depth: int = 0) -> bool:
        """Whether the schema certainly fits every value (of the type `kind`, if given)."""
        if not isinstance(schema, dict):
            return schema is True
        asking = _STEPS.keys() & schema.keys() | {k for k in schema if "imum" in k}
        if asking == {"$ref"} and depth < 8 and isinstance(schema["$ref"], str):
            home = self._document.place(schema, node.place.resource).resource
            target = self._document.resolve(schema["$ref"], home)
            return target is not None and self._allows_all(target.schema, node, kind, depth + 1)
        named = schema.get("type")
        return not asking or (asking == {"type"} and kind != "" and kind in (named if isinstance(named, list) else [named]))


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _also(out: dict[str, Any], more: dict[str, Any]) -> None:
    """Adds a keyword. If it is there already, both hold."""
    ((key, value),) = more.items()
    if key == "allOf":
        out["allOf"] = [*out.get("allOf", ()), *value]
    elif key in out:
        out["allOf"] = [*out.get("allOf", ()), more]
    else:
        out[key] = value


_STEPS: dict[str, Callable[[_Rewriter, _Node, str, Any], None]] = {
    "type": _Rewriter._type,
    **dict.fromkeys(("const", "enum"), _Rewriter._data),
    **dict.fromkeys(("pattern", "multipleOf", "required"), _Rewriter._copy),
    **dict.fromkeys(("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"), _Rewriter._count),
    "format": _Rewriter._format,
    **dict.fromkeys(_REFS, _Rewriter._ref),
    **dict.fromkeys(("allOf", "anyOf", "prefixItems"), _Rewriter._several),
    "oneOf": _Rewriter._one_of,
    **dict.fromkeys(("properties", "patternProperties"), _Rewriter._named),
    "additionalProperties": _Rewriter._one,
    "items": _Rewriter._items,
    "not": _Rewriter._not,
    "if": _Rewriter._if,
    **dict.fromkeys(("unevaluatedProperties", "unevaluatedItems"), _Rewriter._unevaluated),
    "propertyNames": _Rewriter._property_names,
    "uniqueItems": _Rewriter._unique,
    "contains": _Rewriter._contains,
    **dict.fromkeys(("dependentRequired", "dependentSchemas", "dependencies"), _Rewriter._dependent),
}
