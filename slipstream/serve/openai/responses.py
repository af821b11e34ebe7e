"""/v1/responses: create, retrieve, cancel, delete. Stored responses stand in the front ends' `ResponseStore`."""

import asyncio
import secrets
import time
from dataclasses import replace
from typing import Any

import msgspec
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from slipstream.errors import BadRequest, Overloaded
from slipstream.serve.engine.generation import Generation
from slipstream.serve.errors import Failed
from slipstream.serve.front import Front
from slipstream.serve.info import as_json
from slipstream.serve.openai.chat import plan_chat
from slipstream.serve.openai.generate import answer, requests_of
from slipstream.serve.openai.response_store import RECORD_BYTES
from slipstream.serve.openai.responses_body import NAMES, ResponsesBody, chat_body, conversation, renamed
from slipstream.serve.openai.responses_writer import ResponsesWriter
from slipstream.serve.openai.writers import encode
from slipstream.serve.request_body import read
from slipstream.serve.text.choice import Choice
from slipstream.serve.text.params import GenerationParams
from slipstream.serve.text.prompts import Prompt, prepare
from slipstream.serve.text.reader import Reading

MAX_BACKGROUND = 256  # responses that run without a client
CANCEL_SECONDS = 0.1  # between looks at whether a background response was cancelled

_background: set[asyncio.Task] = set()


def routes() -> list[Route]:
    return [
        Route("/v1/responses", create, methods=["POST"]),
        Route("/v1/responses/{id}", retrieve, methods=["GET"]),
        Route("/v1/responses/{id}", delete, methods=["DELETE"]),
        Route("/v1/responses/{id}/cancel", cancel, methods=["POST"]),
    ]


async def create(http: HttpRequest) -> Response:
    """POST /v1/responses."""
    body = await read(http, ResponsesBody)
    if body.background and (body.stream or body.store is False):
        raise BadRequest("background: not together with stream, and only with store", "background")
    try:
        return await _create(http, body)
    except BadRequest as e:
        raise renamed(e, NAMES) from None


async def _create(http: HttpRequest, body: ResponsesBody) -> Response:
    front: Front = http.app.state.front
    born = time.monotonic()
    front.check_model(body.model)
    tokenizer, limits = front.ready_tokenizer(), front.engine.check_ready()
    earlier = _earlier(front, body.previous_response_id)

    def work() -> tuple[list[dict[str, Any]], tuple[GenerationParams, list[Prompt]]]:
        messages = [*earlier, *conversation(body.input)]
        if not messages:
            raise BadRequest("input: holds nothing to answer", "input")
        return messages, plan_chat(chat_body(body, messages), front.dialect, tokenizer, limits)

    messages, (plan, prompts) = await prepare(None, work)
    plan = replace(plan, reading=plan.reading or Reading())
    key = secrets.token_hex(12)

    def keep(value: dict[str, Any]) -> None:
        if body.store is False or (body.background and front.response_store.removed(key)):
            return
        record = encode({"response": value, "messages": [*messages, *conversation(value["output"])]})
        if not front.response_store.put(key, record):
            _not_kept(front, key, value)

    form = ResponsesWriter(body, front.model, "resp_" + key, int(time.time()), keep)
    if body.background:
        return await _begin_in_background(front, plan, prompts, form, key, born)
    return await answer(http, front, plan, prompts, form.bind, "resp_" + key, born)


def _not_kept(front: Front, key: str, value: dict[str, Any]) -> None:
    """The response is too large to be stored: it says so, to its own client or, in the background, to those who ask for it."""
    value["store"] = False
    if value["background"]:
        error = {"code": "server_error", "message": f"the response is larger than the {RECORD_BYTES} bytes that can be stored"}
        front.response_store.put(key, encode({"response": {**value, "status": "failed", "output": [], "error": error}}))


async def _begin_in_background(
    front: Front, plan: GenerationParams, prompts: list[Prompt], form: ResponsesWriter, key: str, born: float
) -> Response:
    if len(_background) >= MAX_BACKGROUND:
        raise Overloaded(f"{MAX_BACKGROUND} responses run in the background; try again later")
    record = encode({"response": form.value})
    if len(record) > RECORD_BYTES:
        raise BadRequest(
            f"background: the request has {len(record)} bytes, of which {RECORD_BYTES} can be stored", "background"
        )
    assert front.tokenizer is not None and front.names is not None and front.grammars is not None
    if plan.structure is not None:
        await front.grammars.check(plan.structure)
    generation = Generation(front.engine)
    ((prompt, request),) = requests_of(front, plan, prompts)
    one = Choice(0, prompt, request, plan, front.tokenizer, front.engine, front.metrics, generation.notify, born)
    form.bind("", 0, front.model, plan, front.names, [one])
    generation.start([one], _never)
    front.open[generation] = None
    front.response_store.put(key, record)
    task = asyncio.get_running_loop().create_task(_run(front, generation, form, key, record))
    _background.add(task)
    task.add_done_callback(_background.discard)
    return as_json(form.value)


async def _run(front: Front, generation: Generation, form: ResponsesWriter, key: str, record: bytes) -> None:
    """A response without a client, until it has ended, or was cancelled or deleted."""
    done, store = asyncio.ensure_future(generation.done()), front.response_store
    try:
        while not (await asyncio.wait([done], timeout=CANCEL_SECONDS))[0]:
            if store.marked(key) or store.removed(key):
                done.cancel()
                form.cancel()
                return
            if not store.has(key):  # others' records have pushed it out
                store.put(key, record)
        done.result()
        form.whole()
    except Failed as e:
        form.failed(e.failure)
    finally:
        generation.close()
        front.open.pop(generation, None)


async def _never() -> dict:
    await asyncio.get_running_loop().create_future()
    raise AssertionError


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


async def retrieve(http: HttpRequest) -> Response:
    """GET /v1/responses/{id}."""
    if http.query_params.get("stream", "false").lower() not in ("false", "0"):
        raise BadRequest("stream: a stored response is given whole", "stream")
    return as_json(_find(http.app.state.front, http.path_params["id"], "response_id")["response"])


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
