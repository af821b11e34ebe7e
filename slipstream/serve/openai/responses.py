"""/v1/responses: create, count, retrieve, list, cancel, delete. Stored responses stand in the front ends' `ResponseStore`."""

import asyncio
import secrets
import time
from dataclasses import replace
from typing import Any

import msgspec
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from slipstream.errors import BadRequest
from slipstream.serve.front import Front
from slipstream.serve.info import as_json
from slipstream.serve.openai.background import CANCEL_SECONDS, begin
from slipstream.serve.openai.chat import plan_chat
from slipstream.serve.openai.generate import answer
from slipstream.serve.openai.response_store import RECORD_BYTES
from slipstream.serve.openai.responses_body import (
    NAMES,
    InputTokensBody,
    ResponsesBody,
    chat_body,
    conversation,
    input_items,
    renamed,
)
from slipstream.serve.openai.responses_writer import ResponsesWriter
from slipstream.serve.openai.writers import encode
from slipstream.serve.request_body import read
from slipstream.serve.text.params import GenerationParams
from slipstream.serve.text.prompts import Prompt, prepare
from slipstream.serve.text.reader import Reading


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
    body = await read(http, ResponsesBody)
    if body.background and body.store is False:
        raise BadRequest("background: only with store, since the response is fetched later", "background")
    try:
        return await _create(http, body)
    except BadRequest as e:
        raise renamed(e, NAMES) from None


async def _create(http: HttpRequest, body: ResponsesBody) -> Response:
    front: Front = http.app.state.front
    born = time.monotonic()
    messages, plan, prompts = await _plan(front, body)
    plan = replace(plan, reading=plan.reading or Reading())
    key = secrets.token_hex(12)

    def keep(value: dict[str, Any]) -> None:
        if body.store is False or (body.background and front.response_store.state(key) == "removed"):
            return
        whole = [*messages, *conversation(value["output"])]
        record = encode({"response": value, "messages": whole, "input": input_items(body.input, key)})
        if not front.response_store.put(key, record):
            _not_kept(front, key, value)

    form = ResponsesWriter(body, front.model, "resp_" + key, int(time.time()), keep)
    if body.background:
        return await begin(front, plan, prompts, form, key, born, http.scope.get("slipstream.cut"))
    return await answer(http, front, plan, prompts, form.bind, "resp_" + key, born)


async def _plan(front: Front, body: ResponsesBody) -> tuple[list[dict[str, Any]], GenerationParams, list[Prompt]]:
    """The conversation so far, and what is made of it."""
    front.check_model(body.model)
    tokenizer, limits = front.ready_tokenizer(), front.engine.check_ready()
    earlier = _earlier(front, body.previous_response_id)

    def work() -> tuple[list[dict[str, Any]], tuple[GenerationParams, list[Prompt]]]:
        messages = [*earlier, *conversation(body.input)]
        if not messages:
            raise BadRequest("input: holds nothing to answer", "input")
        return messages, plan_chat(chat_body(body, messages), front.dialect, tokenizer, limits)

    messages, (plan, prompts) = await prepare(None, work)
    return messages, plan, prompts


async def input_tokens(http: HttpRequest) -> Response:
    """POST /v1/responses/input_tokens."""
    body = await read(http, InputTokensBody)
    try:
        _, _, prompts = await _plan(http.app.state.front, body)
    except BadRequest as e:
        raise renamed(e, NAMES) from None
    return as_json({"object": "response.input_tokens", "input_tokens": len(prompts[0].ids)})


def _not_kept(front: Front, key: str, value: dict[str, Any]) -> None:
    """Says that the response is too large to be stored: to its own client, or in the store where it ran in the background."""
    value["store"] = False
    if value["background"]:
        error = {"code": "server_error", "message": f"the response is larger than the {RECORD_BYTES} bytes that can be stored"}
        failed = {**value, "status": "failed", "output": [], "error": error}
        front.response_store.put(key, encode({"response": failed}))


def _find(front: Front, id: str, param: str) -> dict[str, Any]:
    """The record of a stored response. Raises BadRequest (404)."""
    data = front.response_store.get(id.removeprefix("resp_")) if id.startswith("resp_") else None
    if data is None:
        raise BadRequest(f"{param}: no response of this id is stored here; they are kept for an hour at most", param, 404)
    return msgspec.json.decode(data)


def _earlier(front: Front, id: str | None) -> list[dict[str, Any]]:
    """The conversation that ends with a stored response."""
    if id is None:
        return []
    record = _find(front, id, "previous_response_id")
    if record["response"]["status"] not in ("completed", "incomplete"):
        raise BadRequest("previous_response_id: that response has no whole answer", "previous_response_id")
    return record["messages"]


async def stored(http: HttpRequest) -> Response:
    """One route, so that a 405 names both methods."""
    return await (delete if http.method == "DELETE" else retrieve)(http)


async def retrieve(http: HttpRequest) -> Response:
    """GET /v1/responses/{id}."""
    if http.query_params.get("stream", "false").lower() not in ("false", "0"):
        raise BadRequest("stream: a stored response is given whole", "stream")
    return as_json(_find(http.app.state.front, http.path_params["id"], "response_id")["response"])


async def list_input_items(http: HttpRequest) -> Response:
    """GET /v1/responses/{id}/input_items: a page of the request's own items, the latest first unless `order=asc`."""
    given = http.query_params
    items = _find(http.app.state.front, http.path_params["id"], "response_id").get("input", [])
    if (order := given.get("order", "desc")) not in ("asc", "desc"):
        raise BadRequest(f"order: {order[:20]!r} is neither asc nor desc", "order")
    limit = given.get("limit", "20")
    if not (limit.isascii() and limit.isdigit() and 1 <= int(limit[:9]) <= 100):
        raise BadRequest(f"limit: {limit[:20]!r} is not a number from 1 to 100", "limit")
    items = items if order == "asc" else items[::-1]
    if (after := given.get("after")) is not None:
        places = [i for i, item in enumerate(items) if item["id"] == after]
        if not places:
            raise BadRequest("after: no item of this id belongs to the response", "after")
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
    """POST /v1/responses/{id}/cancel: ends a background response, in whichever front end it runs."""
    front: Front = http.app.state.front
    id = http.path_params["id"]
    value = _find(front, id, "response_id")["response"]
    if not value["background"]:
        raise BadRequest("response_id: only a background response can be cancelled", "response_id")
    front.response_store.mark(id.removeprefix("resp_"))
    for _ in range(50):
        value = _find(front, id, "response_id")["response"]
        if value["status"] != "in_progress":
            break
        await asyncio.sleep(CANCEL_SECONDS / 2)
    return as_json(value)
