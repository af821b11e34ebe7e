"""/v1/responses: create, retrieve, cancel, delete. What is stored stands on the front ends' shelf: bounded, and for an hour."""

import asyncio
import secrets
import time
from typing import Any

import msgspec
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from slipstream.errors import BadRequest, Overloaded
from slipstream.serve.engine.exclusive import run_sliced
from slipstream.serve.engine.generation import Generation
from slipstream.serve.errors import Failed
from slipstream.serve.front import Front
from slipstream.serve.info import as_json
from slipstream.serve.jobs import ResponseStart
from slipstream.serve.openai.generate import answer, requests_of
from slipstream.serve.openai.responses_body import NAMES, conversation, renamed
from slipstream.serve.openai.responses_writer import ResponsesWriter
from slipstream.serve.openai.writers import encode
from slipstream.serve.preparing import prepared
from slipstream.serve.text.choice import Choice
from slipstream.serve.text.params import GenerationParams
from slipstream.serve.text.prompts import Prompt

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
    front: Front = http.app.state.front
    born = time.monotonic()
    found = await prepared(http, "responses", lambda id: _earlier(front, id))
    assert found.plan is not None
    start = msgspec.msgpack.decode(found.more, type=ResponseStart)
    key = secrets.token_hex(12)

    def keep(value: dict[str, Any]) -> None:
        if value["store"] and not (value["background"] and front.response_store.get(key) is None):
            said = extended(start.conversation, conversation(value["output"]))
            front.response_store.put(key, encode({"response": value, "messages": msgspec.Raw(said)}))

    form = ResponsesWriter({**start.value, "id": "resp_" + key, "created_at": int(time.time())}, keep)
    try:
        if form.value["background"]:
            return await _begin_in_background(front, found.plan, found.prompts, form, key, born)
        return await answer(http, front, found.plan, found.prompts, form.bind, "resp_" + key, born)
    except BadRequest as e:  # of a grammar
        raise renamed(e, NAMES) from None


def extended(messages: bytes, more: list[dict[str, Any]]) -> bytes:
    """A JSON list that is not empty, with more at its end."""
    return messages[:-1] + b"," + encode(more)[1:] if more else messages


async def _begin_in_background(
    front: Front, plan: GenerationParams, prompts: list[Prompt], form: ResponsesWriter, key: str, born: float
) -> Response:
    if len(_background) >= MAX_BACKGROUND:
        raise Overloaded(f"{MAX_BACKGROUND} responses run in the background; try again later")
    assert front.tokenizer is not None and front.names is not None and front.grammars is not None
    if plan.structure is not None:
        await front.grammars.check(plan.structure)
    generation = Generation(front.engine)
    ((prompt, request),) = requests_of(front, plan, prompts)
    one = Choice(0, prompt, request, plan, front.tokenizer, front.engine, front.metrics, generation.notify, born)
    form.bind("", 0, front.model, plan, front.names, [one])
    generation.start([one], _never)
    front.open[generation] = None
    front.response_store.put(key, encode({"response": form.value, "messages": []}))
    task = asyncio.get_running_loop().create_task(_run(front, generation, form, key))
    _background.add(task)
    task.add_done_callback(_background.discard)
    return as_json(form.value)


async def _run(front: Front, generation: Generation, form: ResponsesWriter, key: str) -> None:
    """A response without a client, until it has ended, or was cancelled or deleted."""
    done = asyncio.ensure_future(generation.done())
    try:
        while not (await asyncio.wait([done], timeout=CANCEL_SECONDS))[0]:
            if front.response_store.marked(key):
                done.cancel()
                form.cancel()
                return
        done.result()
        await run_sliced(form.whole())
    except Failed as e:
        form.failed(e.failure)
    finally:
        generation.close()
        front.open.pop(generation, None)


async def _never() -> dict:
    await asyncio.get_running_loop().create_future()
    raise AssertionError


class Record(msgspec.Struct):
    """What is stored of a response."""

    response: dict[str, Any]
    messages: msgspec.Raw


def _find(front: Front, id: str, param: str) -> Record:
    """The record of a stored response. Raises BadRequest (404)."""
    key = id.removeprefix("resp_")
    data = front.response_store.get(key) if id.startswith("resp_") and len(key) == 24 and key.isascii() else None
    if data is None:
        raise BadRequest(f"{param}: no response of this id is stored here; they are kept for an hour at most", param, 404)
    return msgspec.json.decode(data, type=Record)


def _earlier(front: Front, id: str) -> bytes:
    """The conversation that ends with a stored response, as JSON."""
    record = _find(front, id, "previous_response_id")
    if record.response["status"] not in ("completed", "incomplete"):
        raise BadRequest("previous_response_id: that response has no whole answer", "previous_response_id")
    return bytes(record.messages)


async def retrieve(http: HttpRequest) -> Response:
    """GET /v1/responses/{id}."""
    if http.query_params.get("stream", "false").lower() not in ("false", "0"):
        raise BadRequest("stream: a stored response is given whole", "stream")
    return as_json(_find(http.app.state.front, http.path_params["id"], "response_id").response)


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
