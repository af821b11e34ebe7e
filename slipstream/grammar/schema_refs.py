"""A JSON schema as a document: its subschemas, and the targets of its references (JSON Schema 2020-12, core,
8.2).

Only schema positions are read as schemas. A property's name and the data of `const`, `enum`, `default` or `examples` may
look like keywords and are not. Nothing is fetched: a reference to another document points to nothing. Pure.
"""

from typing import Any, NamedTuple
from urllib.parse import unquote, urljoin

ONE = (
    "additionalProperties", "unevaluatedProperties", "propertyNames", "items", "additionalItems", "unevaluatedItems",
    "contains", "not", "if", "then", "else", "contentSchema",
)  # fmt: skip
SEVERAL = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies")


class Resource(NamedTuple):
    """A schema with an identifier of its own, or the whole document: the target of `#` below it."""

    uri: str
    root: Any
    anchors: dict[str, Any]


class Place(NamedTuple):
    """A subschema, and the resource that its references start from."""

    schema: Any
    resource: Resource


class Document:
    """Reading starts at `root`; `resolve` follows a reference. The schema must not change meanwhile."""

    def __init__(self, schema: dict[str, Any]):
        self._id = "id" if "draft-04" in str(schema.get("$schema")) else "$id"
        self._resources: dict[str, Resource] = {}
        self._home: dict[int, Resource] = {}  # of each subschema, by identity
        self._dynamic: dict[str, int] = {}  # how many subschemas have this $dynamicAnchor
        self.root = Place(schema, self._read(schema, Resource("", schema, {})))

    def _read(self, schema: Any, outer: Resource) -> Resource:
        """Records the identifiers and anchors of every subschema; returns the resource of the schema itself."""
        self._resources.setdefault("", outer)
        todo = [(schema, outer)]
        while todo:
            at, resource = todo.pop()
            if not isinstance(at, dict):
                continue
            resource = self._home[id(at)] = self._named(at, resource)
            todo += [(sub, resource) for sub in subschemas(at)]
        return self._home[id(schema)]

    def _named(self, at: dict[str, Any], resource: Resource) -> Resource:
        own = at.get(self._id)
        uri, _, fragment = own.partition("#") if isinstance(own, str) else ("", "", "")
        if uri:
            resource = Resource(_join(resource.uri, uri), at, {})
            self._resources.setdefault(resource.uri, resource)
        for anchor in (fragment, at.get("$anchor"), at.get("$dynamicAnchor")):
            if isinstance(anchor, str) and anchor:
                resource.anchors.setdefault(anchor, at)
        if isinstance(dynamic := at.get("$dynamicAnchor"), str):
            self._dynamic[dynamic] = self._dynamic.get(dynamic, 0) + 1
        return resource

    def place(self, schema: Any, near: Resource) -> Place:
        """A subschema that was found near this resource."""
        return Place(schema, self._home.get(id(schema), near))

    def ambiguous(self, anchor: str) -> bool:
        """Whether the target of a $dynamicRef to this anchor depends on the path that led to it."""
        return self._dynamic.get(anchor, 0) > 1

    def resolve(self, ref: str, near: Resource) -> Place | None:
        """The reference's target, or None. near: the resource that holds the reference."""
        uri, _, fragment = ref.partition("#")
        resource = self._resources.get(_join(near.uri, uri)) if uri else near
        if resource is None:
            return None
        fragment = unquote(fragment)
        if not fragment or fragment.startswith("/"):
            return self._pointer(fragment, resource)
        return self.place(resource.anchors[fragment], resource) if fragment in resource.anchors else None

    def _pointer(self, pointer: str, resource: Resource) -> Place | None:
        at, home = resource.root, resource
        for token in pointer.split("/")[1:]:
            token = token.replace("~1", "/").replace("~0", "~")
            if isinstance(at, dict) and token in at:
                at = at[token]
            elif isinstance(at, list) and token.isascii() and token.isdigit() and int(token) < len(at):
                at = at[int(token)]
            else:
                return None
            home = self._home.get(id(at), home)
        return Place(at, home)


def subschemas(schema: dict[str, Any]) -> list[Any]:
    """The subschemas in the schema positions of one schema."""
    out = [schema[key] for key in ONE if key in schema and not isinstance(schema[key], list)]
    out += [sub for key in SEVERAL if isinstance(schema.get(key), list) for sub in schema[key]]
    return out + [sub for key in NAMED if isinstance(schema.get(key), dict) for sub in schema[key].values()]


def _join(base: str, uri: str) -> str:
    try:
        return urljoin(base, uri)
    except ValueError:  # not an address
        return uri
