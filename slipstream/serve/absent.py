"""Routes that other servers have and this one does not. Each answers that it is not supported, or what the model is for."""

from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from slipstream.serve.errors import Failure

_LORA = "LoRA adapters are not supported: serve the merged weights as a model of their own"
COMPACT = "/v1/responses/compact"
OF_ENCODERS = ("/v1/embeddings", "/score", "/v1/score", "/rerank", "/v1/rerank", "/v2/rerank")

ABSENT = {
    "/v2/embed": "Cohere's form of embeddings is not supported: use /v1/embeddings of a server whose model embeds",
    "/pooling": "vectors of single tokens are not supported",
    "/classify": "classification is not supported",
    "/v1/moderations": "moderation is not supported",
    "/v1/images/generations": "images are not supported",
    "/v1/images/edits": "images are not supported",
    "/v1/images/variations": "images are not supported",
    "/v1/audio/transcriptions": "this model does not take audio: serve one that does (slipstream serve voice)",
    "/v1/audio/translations": "this model does not take audio: serve one that does (slipstream serve voice)",
    "/v1/audio/speech": "this model does not make speech: serve one that does (slipstream serve voice)",
    COMPACT: "conversations are not compacted: send only the items to keep to /v1/responses",
    "/v1/files": "files are not supported",
    "/v1/batches": "batches are not supported: send the requests at once, the server batches them",
    "/v1/fine_tuning/jobs": "fine-tuning is not supported",
    "/v1/load_lora_adapter": _LORA,
    "/v1/unload_lora_adapter": _LORA,
}


def routes() -> list[Route]:
    absent = [Route(path, _refuse, methods=["GET", "POST"]) for path in ABSENT]
    return [*absent, *(Route(path, _generates, methods=["GET", "POST"]) for path in OF_ENCODERS)]


async def _generates(http: HttpRequest) -> Response:
    text = "this server's model generates text; serve one that embeds or scores (slipstream serve all-minilm-l6-v2)"
    return Failure(400, text, code="not_supported").response()


async def _refuse(http: HttpRequest) -> Response:
    status = 400 if http.url.path == COMPACT else 501  # the server has the responses API: this call is the client's error
    return Failure(status, ABSENT[http.url.path], code="not_supported").response()
