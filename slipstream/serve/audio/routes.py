"""The routes that a composite model adds to the front end's, or puts in their place."""

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route, WebSocketRoute

from slipstream.graph.conductor import RequestFailed
from slipstream.serve.audio.audio import failure_of, transcriptions, translations
from slipstream.serve.audio.chat import VoiceChatBody, chat
from slipstream.serve.audio.client_secret import ClientSecretBody, client_secrets
from slipstream.serve.audio.realtime import realtime
from slipstream.serve.audio.speech import SpeechBody, speech, voices
from slipstream.serve.errors import Failed


def documented() -> dict[str, tuple[type, str]]:
    """The JSON bodies among them, for the OpenAPI document."""
    return {
        "/v1/chat/completions": (VoiceChatBody, "Answer a conversation"),
        "/v1/audio/speech": (SpeechBody, "Speak a text"),
        "/v1/realtime/client_secrets": (ClientSecretBody, "A key for /v1/realtime that ends soon"),
    }


def routes() -> list[Route | WebSocketRoute]:
    """Route list for `app.build`; a plain route of the same path gives way."""
    gets = {"/v1/audio/voices": voices}
    posts = {
        "/v1/chat/completions": chat,
        "/v1/audio/transcriptions": transcriptions,
        "/v1/audio/translations": translations,
        "/v1/audio/speech": speech,
        "/v1/realtime/client_secrets": client_secrets,
    }
    return [
        *(Route(path, handler, methods=["GET"]) for path, handler in gets.items()),
        *(Route(path, _named(handler), methods=["POST"]) for path, handler in posts.items()),
        WebSocketRoute("/v1/realtime", realtime),
    ]


def _named(handler):
    """A component's failure becomes an answer that names it."""

    async def route(http: Request) -> Response:
        try:
            return await handler(http)
        except RequestFailed as e:
            raise Failed(failure_of(e)) from None

    return route
