"""Routes that other servers have and this one does not. Each answers that its feature is not supported."""

from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from slipstream.serve.errors import Failure

_LORA = "LoRA adapters are not supported: serve the merged weights as a model of their own"
_EMBED = "embeddings and scores are not supported: this server generates"

ABSENT = {
    "/v1/embeddings": _EMBED,
    "/v2/embed": _EMBED,
    "/pooling": _EMBED,
    "/classify": _EMBED,
    "/score": _EMBED,
    "/v1/score": _EMBED,
    "/rerank": _EMBED,
    "/v1/rerank": _EMBED,
    "/v2/rerank": _EMBED,
    "/v1/moderations": "moderation is not supported",
    "/v1/images/generations": "images are not supported",
    "/v1/images/edits": "images are not supported",
    "/v1/images/variations": "images are not supported",
    "/v1/audio/transcriptions": "this model does not take audio: serve one that does (slipstream serve voice)",
    "/v1/audio/translations": "this model does not take audio: serve one that does (slipstream serve voice)",
    "/v1/audio/speech": "this model does not make speech: serve one that does (slipstream serve voice)",
    "/v1/responses/compact": "conversations are not compacted: send only the items to keep",
    "/v1/files": "files are not supported",
    "/v1/batches": "batches are not supported: send the requests at once, the server batches them",
    "/v1/fine_tuning/jobs": "fine-tuning is not supported",
    "/v1/load_lora_adapter": _LORA,
    "/v1/unload_lora_adapter": _LORA,
}


def routes() -> list[Route]:
    return [Route(path, _refuse, methods=["GET", "POST"]) for path in ABSENT]


async def _refuse(http: HttpRequest) -> Response:
    return Failure(501, ABSENT[http.url.path], code="not_supported").response()
