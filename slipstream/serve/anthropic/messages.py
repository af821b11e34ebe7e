"""/v1/messages and /v1/messages/count_tokens: Anthropic's API."""

import time
from dataclasses import replace

from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from slipstream.errors import BadRequest
from slipstream.serve.anthropic.messages_body import NAMES, CountTokensBody, MessagesBody, chat_body, check_thread
from slipstream.serve.anthropic.messages_writer import MessagesWriter
from slipstream.serve.front import Front
from slipstream.serve.info import as_json
from slipstream.serve.openai.bodies import ChatBody
from slipstream.serve.openai.chat import plan_chat
from slipstream.serve.openai.generate import answer
from slipstream.serve.openai.responses_body import renamed
from slipstream.serve.request_body import read
from slipstream.serve.text.params import GenerationParams
from slipstream.serve.text.prompts import Prompt, prepare
from slipstream.serve.text.reader import Reading


def routes() -> list[Route]:
    return [
        Route("/v1/messages", create, methods=["POST"]),
        Route("/v1/messages/count_tokens", count_tokens, methods=["POST"]),
    ]


async def _plan(front: Front, body: CountTokensBody) -> tuple[GenerationParams, list[Prompt]]:
    front.check_model(body.model)
    check_thread(body)
    tokenizer, limits = front.ready_tokenizer(), front.engine.check_ready()

    def work() -> tuple[GenerationParams, list[Prompt]]:
        chat: ChatBody = chat_body(body, front.dialect.grades_effort)
        return plan_chat(chat, front.dialect, tokenizer, limits)

    try:
        return await prepare(None, work)
    except BadRequest as e:
        raise renamed(e, NAMES) from None


async def create(http: HttpRequest) -> Response:
    """POST /v1/messages."""
    front: Front = http.app.state.front
    born = time.monotonic()
    plan, prompts = await _plan(front, await read(http, MessagesBody))
    plan = replace(plan, reading=plan.reading or Reading())
    try:
        return await answer(http, front, plan, prompts, MessagesWriter, "msg_" + http.scope["slipstream.id"], born)
    except BadRequest as e:  # of a grammar
        raise renamed(e, NAMES) from None


async def count_tokens(http: HttpRequest) -> Response:
    """POST /v1/messages/count_tokens."""
    _, prompts = await _plan(http.app.state.front, await read(http, CountTokensBody))
    return as_json({"input_tokens": len(prompts[0].ids)})
