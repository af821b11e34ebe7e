"""/v1/responses: create, count, retrieve, list, cancel, delete. Stored ones are in the front ends' `ResponseStore`."""

import asyncio
import secrets
import time
from typing import Any

import msgspec
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from slipstream.errors import BadRequest
from slipstream.serve.front import Front
from slipstream.serve.info import as_json
from slipstream.serve.jobs import ResponseStart
from slipstream.serve.openai.background import CANCEL_SECONDS, begin
from slipstream.serve.openai.generate import answer
from slipstream.serve.openai.response_store import RECORD_BYTES
from slipstream.serve.openai.responses_body import NAMES, conversation, renamed
from slipstream.serve.openai.responses_writer import ResponsesWriter
from slipstream.serve.openai.writers import encode
from slipstream.serve.preparing import prepared


def routes() -> list[Route]:
    return [
        Route("/v1/responses", create, methods=["POST"]),
        Route("/v1/responses/input_tokens", input_tokens, methods=["POST"]),
        Route("/v1/responses/{id}", stored, methods=["GET", "DELETE"]),
        Route("/v1/responses/{id}/cancel", cancel, methods=["POST"]),
        Route("/v1/responses/{id}/input_items", list_input_items, methods=["GET"]),
    ]


async def create(http: HttpRequest) -> Response:
    """POST /v1/responses."""
    front: Front = http.app.state.front
    born = time.monotonic()
    found = await prepared(http, "responses", lambda id: _earlier(front, id))
    assert found.plan is not None
    start = msgspec.msgpack.decode(found.more, type=ResponseStart)
    key = secrets.token_hex(12)

    def keep(value: dict[str, Any]) -> None:
        if not value["store"] or (value["background"] and front.response_store.state(key) == "removed"):
            return
        said = msgspec.Raw(extended(start.conversation, conversation(value["output"])))
        record = encode({"response": value, "messages": said, "input": msgspec.Raw(start.items)})
        if not front.response_store.put(key, record):
            _not_kept(front, key, value)

    form = ResponsesWriter({**start.value, "id": "resp_" + key, "created_at": int(time.time())}, keep)
    try:
        if form.value["background"]:
            return await begin(front, found.plan, found.prompts, form, key, born, http.scope.get("slipstream.cut"))
        return await answer(http, front, found.plan, found.prompts, form.bind, "resp_" + key, born)
    except BadRequest as e:  # of a grammar
        raise renamed(e, NAMES) from None


def extended(messages: bytes, more: list[dict[str, Any]]) -> bytes:
    """A JSON list that is not empty, with more at its end."""
    return messages[:-1] + b"," + encode(more)[1:] if more else messages


async def input_tokens(http: HttpRequest) -> Response:
    """POST /v1/responses/input_tokens."""
    front: Front = http.app.state.front
    return Response((await prepared(http, "input_tokens", lambda id: _earlier(front, id))).more, media_type="application/json")


def _not_kept(front: Front, key: str, value: dict[str, Any]) -> None:
    """Reports that the response is too large to be stored: to its client, or in the store if it ran in the background."""
    value["store"] = False
    if value["background"]:
        error = {"code": "server_error", "message": f"the response is larger than the {RECORD_BYTES} bytes that can be stored"}
        failed = {**value, "status": "failed", "output": [], "error": error}
        front.response_store.put(key, encode({"response": failed}))


class Record(msgspec.Struct):
    """The stored form of a response."""

    response: dict[str, Any]
    messages: msgspec.Raw = msgspec.Raw(b"[]")  # the conversation, the answer included
    input: msgspec.Raw = msgspec.Raw(b"[]")  # the request's own items


def _find(front: Front, id: str, param: str) -> Record:
    """The record of a stored response. Raises BadRequest (404)."""
    data = front.response_store.get(id.removeprefix("resp_")) if id.startswith("resp_") else None
    if data is None:
        raise BadRequest(f"{param}: no response with this id is stored; responses are kept for an hour at most", param, 404)
    return msgspec.json.decode(data, type=Record)


def _earlier(front: Front, id: str) -> bytes:
    """The conversation that ends with a stored response, as JSON."""
    record = _find(front, id, "previous_response_id")
    if record.response["status"] not in ("completed", "incomplete"):
        raise BadRequest("previous_response_id: the response is not complete; wait for its end", "previous_response_id")
    return bytes(record.messages)


async def stored(http: HttpRequest) -> Response:
    """One route, so that a 405 names both methods."""
    return await (delete if http.method == "DELETE" else retrieve)(http)


async def retrieve(http: HttpRequest) -> Response:
    """GET /v1/responses/{id}."""
    if http.query_params.get("stream", "false").lower() not in ("false", "0"):
        raise BadRequest("stream: must be false; a stored response is returned whole", "stream")
    return as_json(_find(http.app.state.front, http.path_params["id"], "response_id").response)


async def list_input_items(http: HttpRequest) -> Response:
    """GET /v1/responses/{id}/input_items: a page of the request's own items, the latest first unless `order=asc`."""
    given = http.query_params
    items = msgspec.json.decode(_find(http.app.state.front, http.path_params["id"], "response_id").input)
    if (order := given.get("order", "desc")) not in ("asc", "desc"):
        raise BadRequest(f"order: must be asc or desc, not {order[:20]!r}", "order")
    limit = given.get("limit", "20")
    if not (limit.isascii() and limit.isdigit() and 1 <= int(limit[:9]) <= 100):
        raise BadRequest(f"limit: must be a number from 1 to 100, not {limit[:20]!r}", "limit")
    items = items if order == "asc" else items[::-1]
    if (after := given.get("after")) is not None:
        places = [i for i, item in enumerate(items) if item["id"] == after]
        if not places:
            raise BadRequest("after: the response has no item with this id", "after")
        items = items[places[0] + 1 :]
    page = items[: int(limit)]
    ends = {"first_id": page[0]["id"], "last_id": page[-1]["id"]} if page else {"first_id": None, "last_id": None}
    return as_json({"object": "list", "data": page, **ends, "has_more": len(items) > len(page)})


async def delete(http: HttpRequest) -> Response:
    """DELETE /v1/responses/{id}."""
    front: Front = http.app.state.front
    id = http.path_params["id"]
    _find(front, id, "response_id")
    front.response_store.remove(id.removeprefix("resp_"))
    return as_json({"id": id, "object": "response", "deleted": True})


async def cancel(http: HttpRequest) -> Response:
    """POST /v1/responses/{id}/cancel: ends a background response, whichever front end runs it."""
    front: Front = http.app.state.front
    id = http.path_params["id"]
    value = _find(front, id, "response_id").response
    if not value["background"]:
        raise BadRequest("response_id: only a background response can be cancelled", "response_id")
    front.response_store.mark(id.removeprefix("resp_"))
    for _ in range(50):
        value = _find(front, id, "response_id").response
        if value["status"] != "in_progress":
            break
        await asyncio.sleep(CANCEL_SECONDS / 2)
    return as_json(value)
