"""The routes of a composite model: each adds to the front end's routes or replaces one."""

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route, WebSocketRoute

from slipstream.graph.conductor import RequestFailed
from slipstream.serve.audio.audio import failure_of, transcriptions, translations
from slipstream.serve.audio.audio_text import FORMATS
from slipstream.serve.audio.chat import VoiceChatBody, chat
from slipstream.serve.audio.client_secret import ClientSecretBody, client_secrets
from slipstream.serve.audio.realtime import realtime
from slipstream.serve.audio.speech import SpeechBody, speech, voices
from slipstream.serve.errors import Failed
from slipstream.serve.openapi import EVENTS, JSON, TEXT, Operation

_SOUND = ("audio/mpeg", "audio/ogg", "audio/flac", "audio/wav", "audio/pcm", EVENTS)
_UPLOAD = {
    "type": "object",
    "required": ["file"],
    "properties": {
        "file": {"type": "string", "format": "binary"},
        "model": {"type": "string"},
        "language": {"type": "string"},
        "prompt": {"type": "string"},
        "response_format": {"enum": list(FORMATS)},
        "temperature": {"type": "number", "minimum": 0, "maximum": 1},
        "timestamp_granularities[]": {"type": "array", "items": {"type": "string"}},
        "stream": {"type": "boolean"},
    },
}


def documented() -> dict[tuple[str, str], Operation]:
    """These routes, for the OpenAPI document; it has no place for the WebSocket."""
    heard = (JSON, TEXT, "application/x-subrip", "text/vtt", EVENTS)
    return {
        ("post", "/v1/chat/completions"): Operation("Answer a conversation", VoiceChatBody, answers=(JSON, EVENTS)),
        ("post", "/v1/audio/transcriptions"): Operation("Transcribe speech", form=_UPLOAD, answers=heard),
        ("post", "/v1/audio/translations"): Operation("Refused: the model does not translate", form=_UPLOAD, answers=heard),
        ("post", "/v1/audio/speech"): Operation("Make speech from a text", SpeechBody, answers=_SOUND),
        ("get", "/v1/audio/voices"): Operation("The voices of the model"),
        ("post", "/v1/realtime/client_secrets"): Operation("A key for /v1/realtime that expires soon", ClientSecretBody),
    }


def routes() -> list[Route | WebSocketRoute]:
    """The routes for `app.build`; each replaces a plain route with the same path."""
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
    """Turns a component's failure into an answer that names the component."""

    async def route(http: Request) -> Response:
        try:
            return await handler(http)
        except RequestFailed as e:
            raise Failed(failure_of(e)) from None

    return route
