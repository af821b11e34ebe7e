"""A JSON schema's bounds and constants of numbers, in a form that the library follows exactly. Pure.

The library computes with doubles and 64 bits. A bound beyond 2**53 is moved inwards to the next one that it follows exactly,
so that an answer always fits the client's bound. A bound that leaves no number, or a constant that cannot be written, is
refused.
"""

import math
from collections.abc import Iterator
from typing import Any

EXACT = 2**53  # whole numbers up to here are doubles, and the library writes them digit by digit
MOST_INTEGER = 2**63 - 1024  # the largest double below 2**63
LONG = 10**18  # from here on the library needs a bound on both sides


def bounds(schema: dict[str, Any], fractions: bool) -> dict[str, Any]:
    """The four keywords as the library follows them. fractions: whether numbers that are not whole are allowed too.

    Raises ValueError naming the keyword.
    """
    if not {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"} & schema.keys():
        return {}
    lower, upper = _bound(schema, "inimum", 1), _bound(schema, "aximum", -1)
    most = EXACT if fractions else MOST_INTEGER
    out: dict[str, Any] = {}
    for (value, strict), sign, name, strict_name in (
        (lower, 1, "minimum", "exclusiveMinimum"),
        (upper, -1, "maximum", "exclusiveMaximum"),
    ):
        if value is None:
            continue
        if abs(value) < EXACT:
            out[strict_name if strict else name] = value
        else:
            out[name] = sign * _inwards(sign * value, strict, most, name)
    if not fractions and "maximum" not in out and "exclusiveMaximum" not in out and out.get("minimum", 0) >= LONG:
        out["maximum"] = MOST_INTEGER
    if not fractions and "minimum" not in out and "exclusiveMinimum" not in out and out.get("maximum", 0) <= -LONG:
        out["minimum"] = -MOST_INTEGER
    if (
        lower[0] is not None
        and upper[0] is not None
        and lower[0] <= upper[0]
        and out.get("minimum", -most) > out.get("maximum", most)
    ):
        raise ValueError(
            f"minimum and maximum: no number from {lower[0]} to {upper[0]} can be followed exactly; widen the range"
        )
    return out


def _bound(schema: dict[str, Any], suffix: str, sign: int) -> tuple[int | float | None, bool]:
    """The tightest bound of a side, and whether it is excluded. In draft 4, `exclusiveMinimum: true` refers to `minimum`."""
    name, strict_name = "m" + suffix, "exclusiveM" + suffix
    plain, strict = schema.get(name), schema.get(strict_name)
    for key, value in ((name, plain), (strict_name, strict)):
        if key in schema and (not isinstance(value, int | float) or (key == name and isinstance(value, bool))):
            raise ValueError(f"{key}: must be a number, not {value!r:.100}")
    if isinstance(strict, bool):
        return plain, strict
    if plain is None or (strict is not None and sign * strict >= sign * plain):
        return strict, strict is not None
    return plain, False


def _inwards(value: int | float, strict: bool, most: int, name: str) -> int:
    """The least whole number that is a double, at least `value` (greater, if strict) and within `most` of zero."""
    if value > most or (strict and value == most):
        raise ValueError(f"{name}: must be within {most} of zero; beyond that no number can be followed exactly")
    if value < -most:
        return -most
    value = math.floor(value) + 1 if strict else math.ceil(value)
    found = int(float(value))
    return found if found >= value else int(math.nextafter(float(value), math.inf))


def check_data(value: Any) -> None:
    """Whether a `const` can be written. Raises ValueError for a number that would be written as another one."""
    for number in _integers(value):
        if abs(number) > MOST_INTEGER or int(float(number)) != number:
            raise ValueError(f"{number} cannot be followed exactly; give a whole number within {EXACT} of zero, or a string")


def _integers(value: Any) -> Iterator[int]:
    todo = [value]
    while todo:
        at = todo.pop()
        if isinstance(at, int) and not isinstance(at, bool):
            yield at
        elif isinstance(at, list):
            todo += at
        elif isinstance(at, dict):
            todo += at.values()
