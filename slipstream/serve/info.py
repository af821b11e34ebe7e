"""Routes that do not generate: models, tokens, health, version, metrics, and the page."""

import datetime
import importlib.resources

import msgspec
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

import slipstream
from slipstream.serve.errors import Failed, Failure
from slipstream.serve.front import Front
from slipstream.serve.preparing import prepared

_CSP = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_STATIC = {"page.js": "text/javascript", "voice.js": "text/javascript", "page.css": "text/css"}


def as_json(value, status: int = 200, **headers: str) -> Response:
    return Response(msgspec.json.encode(value), status, headers or None, media_type="application/json")


async def models(http: HttpRequest) -> Response:
    """GET /v1/models. Clients that send `anthropic-version` get Anthropic's form."""
    front: Front = http.app.state.front
    if "anthropic-version" in http.headers:
        cards = [_anthropic_card(front, name) for name in front.models]
        return as_json({"data": cards, "has_more": False, "first_id": front.models[0], "last_id": front.models[-1]})
    return as_json({"object": "list", "data": [_card(front, name) for name in front.models]})


async def model(http: HttpRequest) -> Response:
    """GET /v1/models/{id}."""
    front: Front = http.app.state.front
    front.check_model(http.path_params["id"])
    name = http.path_params["id"]
    return as_json(_anthropic_card(front, name) if "anthropic-version" in http.headers else _card(front, name))


def _anthropic_card(front: Front, name: str) -> dict:
    created = datetime.datetime.fromtimestamp(front.created, datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    most = front.engine.limits.max_len if front.engine.limits else None
    card = {"type": "model", "id": name, "display_name": name, "created_at": created, "lifecycle": "active"}
    return {**card, "max_input_tokens": most, "max_tokens": most}


def _card(front: Front, name: str) -> dict:
    limits = front.engine.limits
    card = {"id": name, "object": "model", "created": front.created, "owned_by": "slipstream"}
    card |= {"root": front.engine_config.model, "max_model_len": limits.max_len if limits else None}
    return {**card, "vocab_size": front.tokenizer.vocab_size if front.tokenizer else None}


async def tokenize(http: HttpRequest) -> Response:
    """POST /tokenize."""
    return Response((await prepared(http, "tokenize")).more, media_type="application/json")


async def detokenize(http: HttpRequest) -> Response:
    """POST /detokenize."""
    return Response((await prepared(http, "detokenize")).more, media_type="application/json")


async def tokenizer_info(http: HttpRequest) -> Response:
    """GET /tokenizer_info: what a client needs to render and tokenize as the server does."""
    front: Front = http.app.state.front
    tokenizer = front.ready_tokenizer()
    limits, eos = front.engine.limits, tokenizer.eos_ids[0] if tokenizer.eos_ids else None
    special = {str(id): {"content": tokenizer.token_text(id), "special": True} for id in sorted(tokenizer.special_ids)}
    answer = {
        "tokenizer_class": type(tokenizer).__name__,
        "vocab_size": tokenizer.vocab_size,
        "model_max_length": limits.max_len if limits else None,
        "bos_token": None if tokenizer.bos_id is None else tokenizer.token_text(tokenizer.bos_id),
        "eos_token": None if eos is None else tokenizer.token_text(eos),
        "eos_token_ids": list(tokenizer.eos_ids),
        "added_tokens_decoder": special,
    }
    template = tokenizer.template
    return as_json({**answer, "chat_template": template.source if template else None})


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
    """GET /: the page. Without the key it comes with status 401 and asks for the key. It holds no data of the server."""
    status = 200 if http.scope["slipstream.authorized"] else 401
    return _file("index.html", "text/html", status)


async def static(http: HttpRequest) -> Response:
    """GET /static/{name}."""
    name = http.path_params["name"]
    if name not in _STATIC:
        raise Failed(Failure(404, "no such file in /static"))
    return _file(name, _STATIC[name], 200)


def _file(name: str, kind: str, status: int) -> Response:
    data = importlib.resources.files("slipstream.serve").joinpath("static", name).read_bytes()
    headers = {"content-security-policy": _CSP, "x-frame-options": "DENY", "cache-control": "no-cache"}
    return Response(data, status, headers, media_type=f"{kind}; charset=utf-8")
