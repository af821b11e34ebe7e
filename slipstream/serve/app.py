"""The application: its routes, and the mapping of the exceptions that they raise to HTTP answers."""

import logging

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from slipstream.errors import SlipstreamError
from slipstream.serve import absent, debug, info, openapi
from slipstream.serve.anthropic import messages
from slipstream.serve.budget import Budget
from slipstream.serve.delivery import Deliveries
from slipstream.serve.errors import Failed, Failure, to_failure
from slipstream.serve.front import Front
from slipstream.serve.guard import Guard
from slipstream.serve.observe.http_counts import HttpCounts
from slipstream.serve.openai import responses
from slipstream.serve.openai.generate import chat_completions, completions

log = logging.getLogger("slipstream.http")


def build(front: Front) -> ASGIApp:
    """The ASGI application of one front end."""
    enable_debug = front.server_config.enable_debug
    needs_key = front.server_config.api_key is not None
    spec = openapi.document(enable_debug, needs_key)

    async def describe(http: Request) -> Response:
        return info.as_json(spec)

    routes = [
        Route("/v1/chat/completions", chat_completions, methods=["POST"]),
        Route("/v1/completions", completions, methods=["POST"]),
        Route("/v1/models", info.models, methods=["GET"]),
        Route("/v1/models/{id:path}", info.model, methods=["GET"]),
        Route("/tokenize", info.tokenize, methods=["POST"]),
        Route("/detokenize", info.detokenize, methods=["POST"]),
        Route("/tokenizer_info", info.tokenizer_info, methods=["GET"]),
        *responses.routes(),
        *messages.routes(),
        *absent.routes(),
        Route("/health", info.health, methods=["GET"]),
        Route("/ready", info.ready, methods=["GET"]),
        Route("/version", info.version, methods=["GET"]),
        Route("/metrics", info.metrics, methods=["GET"]),
        Route("/openapi.json", describe, methods=["GET"]),
        Route("/static/{name}", info.static, methods=["GET"]),
        Route("/", info.page, methods=["GET"]),
    ]
    if enable_debug:
        routes.append(Route("/debug/ranks", debug.ranks, methods=["GET"]))
        routes.append(Route("/debug/timeline", debug.timeline, methods=["GET"]))
    if front.composite:
        from slipstream.serve.audio import routes as audio_routes

        own = audio_routes.routes()
        paths = {route.path for route in own}
        routes = [*own, *(route for route in routes if route.path not in paths)]
        spec = openapi.document(enable_debug, needs_key, audio_routes.documented())
    if front.encoder:
        from slipstream.serve.embed import routes as embed_routes

        routes = [*embed_routes.routes(), *routes]
        spec = openapi.document(enable_debug, needs_key, embed_routes.documented(), without=embed_routes.GENERATING)
    handlers = {
        HTTPException: _on_http,
        SlipstreamError: _on_error,
        Failed: _on_error,
        ClientDisconnect: _on_gone,
        Exception: _on_fault,
    }
    app = Starlette(routes=routes, exception_handlers=handlers)  # type: ignore[arg-type]
    app.router.redirect_slashes = False
    app.state.front = front
    front.deliveries = Deliveries(app, Budget(front.server_config.answer_memory_bytes))
    front.metrics.http = HttpCounts(routes, front.shared_counters)
    return Guard(front.deliveries, front.server_config, front.metrics.http)


async def _on_error(http: Request, error: Exception) -> Response:
    return to_failure(error).response(http.url.path)


async def _on_gone(http: Request, error: Exception) -> Response:
    return Response(status_code=499)


async def _on_fault(http: Request, error: Exception) -> Response:
    log.error("request %s: fault in the front end", http.scope.get("slipstream.id"), exc_info=error)
    return to_failure(error).response(http.url.path)


async def _on_http(http: Request, error: Exception) -> Response:
    """Starlette's own errors: 404 for unknown paths, 405 for wrong methods."""
    assert isinstance(error, HTTPException)
    if error.status_code == 404:
        return Failure(404, f"no such path: {http.url.path[:100]}").response(http.url.path)
    response = Failure(
        error.status_code, f"{http.method} is not allowed here" if error.status_code == 405 else error.detail
    ).response(http.url.path)
    response.headers.update(error.headers or {})
    return response
