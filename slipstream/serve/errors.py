"""Errors on their way to a client: OpenAI's error body, and the one place where the engine's errors get an HTTP status.

Messages name fields, limits and numbers, never the text of a prompt or an answer.
"""

import re
from dataclasses import dataclass
from typing import Any

import msgspec
from starlette.responses import Response

from slipstream.errors import BadRequest, EngineDown, Overloaded

_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
_ANTHROPIC = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


@dataclass(frozen=True)
class Failure:
    """A failure as a value: the body of an error response, or the last event of an open stream."""

    status: int
    message: str
    param: str | None = None
    code: str | None = None
    retry_after: float | None = None
    details: dict[str, Any] | None = None  # a reason that Anthropic's clients act on; only in Anthropic's form

    def body(self) -> bytes:
        kind = _TYPES.get(self.status) or ("invalid_request_error" if self.status < 500 else "server_error")
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.code or self.status}
        return msgspec.json.encode({"error": error})

    def anthropic_body(self) -> bytes:
        """The same in the form of Anthropic's API."""
        kind = _ANTHROPIC.get(self.status) or ("invalid_request_error" if self.status < 500 else "api_error")
        error = {"type": kind, "message": self.message} | ({"details": self.details} if self.details else {})
        return msgspec.json.encode({"type": "error", "error": error})

    def response(self, path: str = "") -> Response:
        """path: the request's path; it decides whether the error has OpenAI's or Anthropic's form."""
        headers = {}
        if self.retry_after is not None:
            headers["retry-after"] = str(max(1, round(self.retry_after)))
        if self.status == 415:
            headers["accept-encoding"] = "identity"  # RFC 9110, section 15.5.16
        if self.status == 501:
            headers["x-should-retry"] = "false"  # without it, OpenAI's and Anthropic's clients send the request twice more
        if self.status == 401:
            headers["www-authenticate"] = "Bearer"
        body = self.anthropic_body() if path.startswith("/v1/messages") else self.body()
        return Response(body, self.status, headers, media_type="application/json")


class Failed(Exception):
    """Carries a Failure up to the route."""

    def __init__(self, failure: Failure):
        super().__init__(failure.message)
        self.failure = failure


def to_failure(error: Exception) -> Failure:
    """The HTTP answer to an exception. An unexpected one becomes a 500 that says nothing about the request."""
    if isinstance(error, Failed):
        return error.failure
    if isinstance(error, BadRequest):
        return Failure(error.status, str(error), error.param)
    if isinstance(error, Overloaded):
        return Failure(429, str(error), code="queue_full", retry_after=1)
    if isinstance(error, EngineDown):
        return Failure(503, str(error), code="unavailable", retry_after=2)
    return Failure(500, "internal error", code="internal_error")


_AT = re.compile(r" - at `(?:key` in `)?\$\.?(.*)`$")
_FIELD = re.compile(r"(?:unknown|required) field `([^`]*)`")
_BOUND = re.compile(r"^Expected `(\w+)` (?:of length )?(>=|<=|>|<) (\S+)$")
_TYPE = re.compile(r"^Expected `([^`]+)`, got `([^`]+)`$")
_THAN = {">=": "at least", "<=": "at most", ">": "more than", "<": "less than"}
_UNITS = {"str": "characters", "array": "items", "object": "fields"}
_NAMES = {
    "str": "a string",
    "int": "an integer",
    "float": "a number",
    "bool": "a boolean",
    "array": "a list",
    "object": "an object",
}


def to_bad_request(error: msgspec.ValidationError, raw: bytes | bytearray = b"") -> BadRequest:
    """A client's message from msgspec's. The path `$.messages[0].role` becomes the param `messages[0].role`.

    raw: the body, from which a number out of range is quoted.
    """
    text = str(error)
    at = _AT.search(text)
    path = at.group(1) if at else ""
    message = text[: at.start()] if at else text
    field = _FIELD.search(message)
    if field:
        path = f"{path}.{field.group(1)}" if path else field.group(1)
        if "lora" in field.group(1).lower():
            return BadRequest(f"{path[:200]}: LoRA adapters are not supported; serve the merged weights as a model", path[:200])
        kind = "unknown parameter" if "unknown" in message else "missing parameter"
        return BadRequest(f"{kind}: {path[:200]}", path[:200])
    number = _number_at(raw, path)
    path = path[:200].replace("[...]", "")
    if message.startswith("Expected `null`,") or message.endswith("of length <= 0"):
        return BadRequest(f"{path}: is not supported here; leave it out", path)
    return BadRequest(f"{path or 'body'}: {_in_words(message, number)[:300]}", path or None)


def _in_words(message: str, number: str) -> str:
    """`Expected `float` <= 2.0` as "must be at most 2.0, not 5"."""
    bound, kinds = _BOUND.match(message), _TYPE.match(message)
    if bound:
        kind, than, limit = bound.groups()
        if kind in _UNITS:
            return f"must have {_THAN[than]} {limit} {_UNITS[kind][:-1] if limit == '1' else _UNITS[kind]}"
        return f"must be {_THAN[than]} {limit}" + (f", not {number}" if number else "")
    if kinds:
        wanted = " or ".join(_NAMES.get(kind, kind) for kind in kinds[1].split(" | "))
        return f"must be {wanted}, not {_NAMES.get(kinds[2], kinds[2])}"
    return message


def _number_at(raw: bytes | bytearray, path: str) -> str:
    """The number at a path of the body, "" if there is none. A text is never quoted: it may be a prompt's."""
    try:
        value = msgspec.json.decode(raw)
        for step in re.findall(r"[^.\[\]]+", path):
            value = value[int(step)] if isinstance(value, list) else value[step]
        return str(value)[:40] if type(value) in (int, float) else ""
    except (msgspec.DecodeError, ValueError, KeyError, IndexError, TypeError, RecursionError):
        return ""
