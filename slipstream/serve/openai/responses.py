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
from slipstream.serve.openai.event_log import key_of_events, split
from slipstream.serve.openai.generate import EVENT_HEADERS, answer
from slipstream.serve.openai.response_store import RECORD_BYTES
from slipstream.serve.openai.responses_body import NAMES, conversation, renamed
from slipstream.serve.openai.responses_writer import ResponsesWriter
from slipstream.serve.openai.writers import encode
from slipstream.serve.preparing import prepared

_STREAMED = {name.decode(): value.decode() for name, value in EVENT_HEADERS}


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
    plan = found.plan
    assert plan is not None
    start = msgspec.msgpack.decode(found.more, type=ResponseStart)
    key = secrets.token_hex(12)

    def keep(value: dict[str, Any]) -> None:
        if not value["store"] or (value["background"] and front.response_store.state(key) == "removed"):
            return
        said = msgspec.Raw(extended(start.conversation, conversation(value["output"])))
        streamed = plan.stream and value["background"]
        record = encode({"response": value, "messages": said, "input": msgspec.Raw(start.items), "streamed": streamed})
        if not front.response_store.put(key, record):
            _not_kept(front, key, value)

    form = ResponsesWriter({**start.value, "id": "resp_" + key, "created_at": int(time.time())}, keep)
    try:
        if form.value["background"]:
            return await begin(front, plan, found.prompts, form, key, born, http.scope.get("slipstream.cut"))
        return await answer(http, front, plan, found.prompts, form.bind, "resp_" + key, born)
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
    streamed: bool = False  # whether its events are kept


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
    """GET /v1/responses/{id}, whole or, with `stream=true`, its events after number `starting_after`."""
    front, id, given = http.app.state.front, http.path_params["id"], http.query_params
    record = _find(front, id, "response_id")
    if given.get("stream", "false").lower() in ("false", "0"):
        if "starting_after" in given:
            raise BadRequest("starting_after: needs stream=true", "starting_after")
        return as_json(record.response)
    after = given.get("starting_after", "")
    if after and not (after.isascii() and after.isdigit() and len(after) < 10):
        raise BadRequest(f"starting_after: must be the sequence number of an event, not {after[:20]!r}", "starting_after")
    if not record.streamed:
        raise BadRequest("stream: needs a response that was made with background=true and stream=true", "stream")
    return await _resumed(http, front, id, int(after) if after else -1)


async def _resumed(http: HttpRequest, front: Front, id: str, after: int) -> Response:
    """The events of a response. Those of one that another front end runs come once it has ended."""
    key = id.removeprefix("resp_")
    late = 0
    while (log := front.event_logs.get(key)) is None:
        if (kept := front.response_store.get(key_of_events(key))) is not None:
            return Response(b"".join(split(kept)[after + 1 :]), headers=_STREAMED)
        late += _find(front, id, "response_id").response["status"] != "in_progress"  # the events follow the record at once
        if late > 10:
            break
        await asyncio.sleep(CANCEL_SECONDS)
        if await http.is_disconnected():
            return Response(status_code=499)
    if log is None or not log.kept:
        raise BadRequest("stream: the events of this response are no longer kept; retrieve it without stream", "stream")
    return log.watch(after, http.scope.get("slipstream.cut"))


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
    front.response_store.remove(key_of_events(id.removeprefix("resp_")))
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
