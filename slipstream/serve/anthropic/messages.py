"""/v1/messages and /v1/messages/count_tokens: Anthropic's API."""

import time

from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from slipstream.errors import BadRequest
from slipstream.serve.anthropic.messages_body import NAMES
from slipstream.serve.anthropic.messages_writer import MessagesWriter
from slipstream.serve.front import Front
from slipstream.serve.openai.generate import answer
from slipstream.serve.openai.responses_body import renamed
from slipstream.serve.preparing import prepared


def routes() -> list[Route]:
    return [
        Route("/v1/messages", create, methods=["POST"]),
        Route("/v1/messages/count_tokens", count_tokens, methods=["POST"]),
    ]


async def create(http: HttpRequest) -> Response:
    """POST /v1/messages."""
    front: Front = http.app.state.front
    born = time.monotonic()
    found = await prepared(http, "messages")
    assert found.plan is not None
    try:
        return await answer(http, front, found.plan, found.prompts, MessagesWriter, "msg_" + http.scope["slipstream.id"], born)
    except BadRequest as e:  # of a grammar
        raise renamed(e, NAMES) from None


async def count_tokens(http: HttpRequest) -> Response:
    """POST /v1/messages/count_tokens."""
    return Response((await prepared(http, "count_tokens")).more, media_type="application/json")
