"""What JSON schema (2020-12) says of a value, by its own rules and slowly: what the tests of grammars compare with."""

from typing import Any

TYPES = {
    "null": lambda v: v is None,
    "boolean": lambda v: isinstance(v, bool),
    "integer": lambda v: is_number(v) and (isinstance(v, int) or v.is_integer()),
    "number": lambda v: is_number(v),
    "string": lambda v: isinstance(v, str),
    "array": lambda v: isinstance(v, list),
    "object": lambda v: isinstance(v, dict),
}
NUMBERS = {
    "minimum": lambda v, b: v >= b,
    "maximum": lambda v, b: v <= b,
    "exclusiveMinimum": lambda v, b: v > b,
    "exclusiveMaximum": lambda v, b: v < b,
}
LENGTHS = {"minLength": (str, 1), "maxLength": (str, -1), "minItems": (list, 1), "maxItems": (list, -1)}


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def equal(a: Any, b: Any) -> bool:
    if isinstance(a, bool) or isinstance(b, bool):
        return a is b
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(equal, a, b))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(equal(a[k], b[k]) for k in a)
    return a == b


def valid(value: Any, schema: Any, root: Any) -> bool:
    """Whether the value fits, for schemas of the keywords below and `#/$defs/NAME` references into `root`."""
    if isinstance(schema, bool):
        return schema
    below = lambda sub, v=value: valid(v, sub, root)
    types = schema.get("type", [*TYPES])
    rules = [any(TYPES[t](value) for t in ([types] if isinstance(types, str) else types))]
    rules += [equal(value, schema["const"])] if "const" in schema else []
    rules += [any(equal(value, v) for v in schema["enum"])] if "enum" in schema else []
    rules += [below(root["$defs"][schema["$ref"].rsplit("/", 1)[1]])] if "$ref" in schema else []
    rules += [all(map(below, schema.get("allOf", ()))), not schema.get("anyOf") or any(map(below, schema["anyOf"]))]
    rules += [not schema.get("oneOf") or sum(map(below, schema["oneOf"])) == 1]
    if is_number(value):
        rules += [fits(value, schema[key]) for key, fits in NUMBERS.items() if key in schema]
    for key, (kind, sign) in LENGTHS.items():
        if key in schema and isinstance(value, kind):
            rules.append(sign * (len(value) - schema[key]) >= 0)
    if isinstance(value, list):
        rules += [below(schema.get("items", True), item) for item in value]
    if isinstance(value, dict):
        properties, rest = schema.get("properties", {}), schema.get("additionalProperties", True)
        rules += [below(properties.get(name, rest), v) for name, v in value.items()]
        rules += [name in value for name in schema.get("required", ())]
    return all(rules)
