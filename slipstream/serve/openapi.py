"""The OpenAPI document: a table of operations, and bodies from the same structs that decode them."""

import re
from collections.abc import Collection, Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import msgspec

import slipstream
from slipstream.serve.anthropic.messages_body import CountTokensBody, MessagesBody
from slipstream.serve.openai.bodies import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from slipstream.serve.openai.responses_body import InputTokensBody, ResponsesBody

JSON, EVENTS, TEXT = "application/json", "text/event-stream", "text/plain"
Schema = dict[str, Any]


class Operation(NamedTuple):
    """One method of one path. Path parameters stand in the path and are strings."""

    summary: str
    body: type | None = None  # a struct, sent as JSON
    form: Schema | None = None  # of a multipart body
    query: Mapping[str, Schema] = MappingProxyType({})
    answers: tuple[str, ...] = (JSON,)  # media types of a 200
    errors: tuple[int, ...] | None = None  # None: the usual ones


Operations = Mapping[tuple[str, str], Operation]  # by (method, path)

_TEXT = {"type": "string"}
_SECONDS = {"type": "number", "exclusiveMinimum": 0, "maximum": 600}
_RESUME = {"stream": {"type": "boolean"}, "starting_after": {"type": "integer", "minimum": 0}}
_PAGE = {
    "after": _TEXT,
    "limit": {"type": "integer", "minimum": 1, "maximum": 100},
    "order": {"enum": ["asc", "desc"]},
}
OPERATIONS: Operations = {
    ("post", "/v1/chat/completions"): Operation("Answer a conversation", ChatBody, answers=(JSON, EVENTS)),
    ("post", "/v1/completions"): Operation("Continue texts or token ids", CompletionBody, answers=(JSON, EVENTS)),
    ("post", "/v1/responses"): Operation("Answer, in the form of OpenAI's responses", ResponsesBody, answers=(JSON, EVENTS)),
    ("post", "/v1/responses/input_tokens"): Operation("Tokens of a response's input", InputTokensBody),
    ("get", "/v1/responses/{id}"): Operation("A stored response", query=_RESUME, answers=(JSON, EVENTS)),
    ("delete", "/v1/responses/{id}"): Operation("Delete a stored response"),
    ("post", "/v1/responses/{id}/cancel"): Operation("Cancel a background response"),
    ("get", "/v1/responses/{id}/input_items"): Operation("The items of a stored response's input", query=_PAGE),
    ("post", "/v1/messages"): Operation("Answer a conversation, in Anthropic's form", MessagesBody, answers=(JSON, EVENTS)),
    ("post", "/v1/messages/count_tokens"): Operation("Tokens of a conversation, in Anthropic's form", CountTokensBody),
    ("post", "/tokenize"): Operation("Text or conversation to token ids", TokenizeBody),
    ("post", "/detokenize"): Operation("Token ids to text", DetokenizeBody),
    ("get", "/tokenizer_info"): Operation("The tokenizer's special tokens and chat template"),
    ("get", "/v1/models"): Operation("The model served"),
    ("get", "/v1/models/{id}"): Operation("The model, by its name"),
    ("get", "/health"): Operation("200 when requests are served, else 503 with the reason", errors=(503,)),
    ("get", "/ready"): Operation("200 when a new request would be served now, else 503", errors=(503,)),
    ("get", "/version"): Operation("The server's version"),
    ("get", "/metrics"): Operation("Prometheus metrics", answers=(TEXT,)),
    ("get", "/openapi.json"): Operation("This document"),
}
DEBUG_OPERATIONS: Operations = {
    ("get", "/debug/ranks"): Operation("Where each rank stands"),
    ("get", "/debug/timeline"): Operation("The ranks' last seconds as a Chrome trace", query={"seconds": _SECONDS}),
}

_ERRORS = {
    400: "The request is wrong; the error names the field",
    401: "The key is missing or wrong",
    403: "The request's Host or Origin is not allowed",
    404: "There is no such model, response or path",
    408: "The body did not arrive in time",
    413: "The body is too large",
    415: "The body's media type is not supported",
    429: "Too many requests wait already; see Retry-After",
    500: "The engine failed while it answered",
    503: "The server is not ready; see Retry-After",
}
_OF_BODIES = {408, 413, 415, 429}
_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "integer", "null"]},
            },
        }
    },
}
_ANTHROPIC_ERROR = {
    "type": "object",
    "required": ["type", "error"],
    "properties": {
        "type": {"const": "error"},
        "error": {
            "type": "object",
            "required": ["message", "type"],
            "properties": {"message": {"type": "string"}, "type": {"type": "string"}, "details": {"type": "object"}},
        },
    },
}
_UNAVAILABLE = {"type": "object", "properties": {"reason": {"type": "string"}}}  # of /health and /ready
_SCHEMES = {
    "bearer": {"type": "http", "scheme": "bearer"},
    "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
}


def document(
    debug: bool, needs_key: bool = False, more: Operations = MappingProxyType({}), without: Collection[str] = ()
) -> dict[str, Any]:
    """`more`: further operations of this server; each replaces one with the same method and path. `without`: paths."""
    operations = {**OPERATIONS, **(DEBUG_OPERATIONS if debug else {}), **more}
    operations = {key: operation for key, operation in operations.items() if key[1] not in without}
    bodies = [operation.body for operation in operations.values() if operation.body is not None]
    schemas, components = msgspec.json.schema_components(bodies, ref_template="#/components/schemas/{name}")
    of_body = dict(zip(bodies, schemas, strict=True))
    paths: dict[str, Any] = {}
    for (method, path), operation in operations.items():
        paths.setdefault(path, {})[method] = _described(method, path, operation, of_body)
    for array in _arrays(components):
        array.setdefault("items", {})  # msgspec leaves it out for lists of any type
    errors = {"Error": _ERROR, "AnthropicError": _ANTHROPIC_ERROR, "Unavailable": _UNAVAILABLE}
    return {
        "openapi": "3.1.0",
        "info": {"title": "Slipstream", "version": slipstream.__version__},
        "security": [{name: []} for name in _SCHEMES] + ([] if needs_key else [{}]),
        "paths": paths,
        "components": {"schemas": {**components, **errors}, "securitySchemes": _SCHEMES},
    }


def _described(method: str, path: str, operation: Operation, of_body: dict[type, Schema]) -> dict[str, Any]:
    id = re.sub(r"[^a-z0-9]+", "_", f"{method}{path}").strip("_")
    out: dict[str, Any] = {"operationId": id, "summary": operation.summary}
    parameters = [
        *({"name": name, "in": "path", "required": True, "schema": _TEXT} for name in re.findall(r"{(\w+)}", path)),
        *({"name": name, "in": "query", "schema": schema} for name, schema in operation.query.items()),
    ]
    if parameters:
        out["parameters"] = parameters
    if operation.body is not None:
        out["requestBody"] = {"required": True, "content": {JSON: {"schema": of_body[operation.body]}}}
    elif operation.form is not None:
        out["requestBody"] = {"required": True, "content": {"multipart/form-data": {"schema": operation.form}}}
    answers = {kind: {"schema": {} if kind in (JSON, EVENTS) else _TEXT} for kind in operation.answers}
    out["responses"] = {"200": {"description": "OK", "content": answers}, **_failures(path, operation)}
    if operation.errors is not None:
        out["security"] = []  # probes do not need the key
    return out


def _failures(path: str, operation: Operation) -> dict[str, Any]:
    has_body = operation.body is not None or operation.form is not None
    name = "AnthropicError" if path.startswith("/v1/messages") else "Error"
    if operation.errors is not None:
        name = "Unavailable"
    content = {JSON: {"schema": {"$ref": f"#/components/schemas/{name}"}}}
    statuses = operation.errors or [s for s in _ERRORS if has_body or s not in _OF_BODIES]
    return {str(status): {"description": _ERRORS[status], "content": content} for status in statuses}


def _arrays(schema: Any) -> Iterator[Schema]:
    if isinstance(schema, dict):
        if schema.get("type") == "array" and "prefixItems" not in schema:
            yield schema
        for value in schema.values():
            yield from _arrays(value)
    elif isinstance(schema, list):
        for value in schema:
            yield from _arrays(value)
