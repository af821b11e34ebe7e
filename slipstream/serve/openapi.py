"""The OpenAPI document, made from the same structs that decode the bodies."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import msgspec

import slipstream
from slipstream.serve.anthropic.messages_body import CountTokensBody, MessagesBody
from slipstream.serve.openai.bodies import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from slipstream.serve.openai.responses_body import ResponsesBody

POSTS: dict[str, tuple[type, str]] = {
    "/v1/chat/completions": (ChatBody, "Answer a conversation"),
    "/v1/completions": (CompletionBody, "Continue texts or token ids"),
    "/v1/responses": (ResponsesBody, "Answer, in the form of OpenAI's responses"),
    "/v1/messages": (MessagesBody, "Answer a conversation, in Anthropic's form"),
    "/v1/messages/count_tokens": (CountTokensBody, "Tokens of a conversation, in Anthropic's form"),
    "/tokenize": (TokenizeBody, "Text or conversation to token ids"),
    "/detokenize": (DetokenizeBody, "Token ids to text"),
}
GETS = {
    "/v1/models": "The model served",
    "/v1/models/{id}": "The model, by its name",
    "/v1/responses/{id}": "A stored response",
    "/health": "200 when requests are served, else 503 with the reason",
    "/ready": "200 when a new request would be served now, else 503",
    "/version": "The server's version",
    "/metrics": "Prometheus metrics",
}
DEBUG_GETS = {"/debug/ranks": "Where each rank stands", "/debug/timeline": "The ranks' last seconds as a Chrome trace"}

_ERROR = {
    "type": "object",
    "properties": {
        "error": {
            "type": "object",
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "integer", "null"]},
            },
        }
    },
}


def document(debug: bool, more: Mapping[str, tuple[type, str]] = MappingProxyType({})) -> dict[str, Any]:
    """`more`: POST routes that this server has besides."""
    posts = POSTS | dict(more)
    schemas, components = msgspec.json.schema_components(
        [schema for schema, _ in posts.values()], ref_template="#/components/schemas/{name}"
    )
    error = {"description": "An error", "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}}
    paths: dict[str, Any] = {}
    for (path, (_, summary)), schema in zip(posts.items(), schemas, strict=True):
        body = {"required": True, "content": {"application/json": {"schema": schema}}}
        responses = {"200": {"description": "OK"}, "4XX": error, "5XX": error}
        paths[path] = {"post": {"summary": summary, "requestBody": body, "responses": responses}}
    for path, summary in {**GETS, **(DEBUG_GETS if debug else {})}.items():
        paths[path] = {"get": {"summary": summary, "responses": {"200": {"description": "OK"}}}}
    return {
        "openapi": "3.1.0",
        "info": {"title": "Slipstream", "version": slipstream.__version__},
        "paths": paths,
        "components": {"schemas": {**components, "Error": _ERROR}},
    }
