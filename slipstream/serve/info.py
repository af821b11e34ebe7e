"""The routes that generate nothing: models, tokens, health, version, metrics, and the page."""

import importlib.resources

import msgspec
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

import slipstream
from slipstream.errors import BadRequest
from slipstream.serve.errors import Failed, Failure
from slipstream.serve.front import Front
from slipstream.serve.openai.bodies import DetokenizeBody, TokenizeBody
from slipstream.serve.request_body import read
from slipstream.serve.text.prompts import encode, prepare, size_of, templated
from slipstream.serve.text.tools import for_template

_CSP = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_STATIC = {"page.js": "text/javascript", "voice.js": "text/javascript", "page.css": "text/css"}


def as_json(value, status: int = 200, **headers: str) -> Response:
    return Response(msgspec.json.encode(value), status, headers or None, media_type="application/json")


async def models(http: HttpRequest) -> Response:
    """GET /v1/models."""
    front: Front = http.app.state.front
    return as_json({"object": "list", "data": [_card(front, name) for name in front.models]})


async def model(http: HttpRequest) -> Response:
    """GET /v1/models/{id}."""
    front: Front = http.app.state.front
    front.check_model(http.path_params["id"])
    return as_json(_card(front, http.path_params["id"]))


def _card(front: Front, name: str) -> dict:
    limits = front.engine.limits
    card = {"id": name, "object": "model", "created": front.created, "owned_by": "slipstream"}
    card |= {"root": front.engine_config.model, "max_model_len": limits.max_len if limits else None}
    return {**card, "vocab_size": front.tokenizer.vocab_size if front.tokenizer else None}


async def tokenize(http: HttpRequest) -> Response:
    """POST /tokenize."""
    front: Front = http.app.state.front
    body = await read(http, TokenizeBody)
    front.check_model(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise BadRequest("prompt: give either prompt or messages", "prompt")
    tokenizer = front.ready_tokenizer()

    def work() -> list[int]:
        if body.messages is not None:
            return templated(body, tokenizer, front.engine.limits, for_template(body.tools), front.dialect)
        return encode(body.prompt or "", tokenizer, front.engine.limits, body.add_special_tokens is not False, "prompt")

    ids = await prepare(None if body.messages is not None else size_of(body), work)
    assert front.names is not None
    texts = [front.names(id)[0] for id in ids] if body.return_token_strs else None
    limits = front.engine.limits
    answer = {"count": len(ids), "max_model_len": limits.max_len if limits else None, "tokens": ids, "token_strs": texts}
    return as_json(answer)


async def detokenize(http: HttpRequest) -> Response:
    """POST /detokenize."""
    front: Front = http.app.state.front
    body = await read(http, DetokenizeBody)
    front.check_model(body.model)
    tokenizer = front.ready_tokenizer()
    if body.tokens and max(body.tokens) >= tokenizer.vocab_size:
        raise BadRequest(f"tokens: must be below {tokenizer.vocab_size}, the vocabulary's size", "tokens")
    skip = bool(body.skip_special_tokens)
    text = await prepare(len(body.tokens), lambda: tokenizer.decode(body.tokens, skip_special_tokens=skip))
    return as_json({"prompt": text})


async def health(http: HttpRequest) -> Response:
    """GET /health: 200 when requests are served and the ranks move, else 503 with the reason."""
    reason = http.app.state.front.unhealthy()
    if reason is None:
        return as_json({"status": "ok"})
    return as_json({"status": "unavailable", "reason": reason}, 503, **{"retry-after": "2"})


async def ready(http: HttpRequest) -> Response:
    """GET /ready: 200 when a new request would be served now; 503 while starting, failed or draining."""
    reason = http.app.state.front.unhealthy()
    return as_json({"ready": True}) if reason is None else as_json({"ready": False, "reason": reason}, 503)


async def version(http: HttpRequest) -> Response:
    """GET /version."""
    return as_json({"version": slipstream.__version__})


async def metrics(http: HttpRequest) -> Response:
    """GET /metrics."""
    text = http.app.state.front.metrics.render()
    return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")


async def page(http: HttpRequest) -> Response:
    """GET /: the page. Without the key it comes with 401 and asks for it; it holds nothing of the server's."""
    status = 200 if http.scope["slipstream.authorized"] else 401
    return _file("index.html", "text/html", status)


async def static(http: HttpRequest) -> Response:
    """GET /static/{name}."""
    name = http.path_params["name"]
    if name not in _STATIC:
        raise Failed(Failure(404, "no such file"))
    return _file(name, _STATIC[name], 200)


def _file(name: str, kind: str, status: int) -> Response:
    data = importlib.resources.files("slipstream.serve").joinpath("static", name).read_bytes()
    headers = {"content-security-policy": _CSP, "x-frame-options": "DENY", "cache-control": "no-cache"}
    return Response(data, status, headers, media_type=f"{kind}; charset=utf-8")
