"""The routes of a server whose model embeds or scores, and what its other routes answer."""

import base64
import secrets
import time
from collections.abc import Iterator

import msgspec
import numpy as np
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from slipstream.serve.delivery import LongResponse
from slipstream.serve.embed.bodies import EmbeddingBody, RerankBody, ScoreBody
from slipstream.serve.embed.engine import EncoderEngine
from slipstream.serve.embed.rows import EmbeddingRequest, RerankRequest, Rows, ScoreRequest, texts_of
from slipstream.serve.embed.scores import scores_of, shortened
from slipstream.serve.engine.exclusive import run_exclusive, run_sliced
from slipstream.serve.errors import Failed
from slipstream.serve.front import Front
from slipstream.serve.openapi import Operation, Operations
from slipstream.serve.preparing import prepared

_encode = msgspec.json.Encoder().encode
RERANK = ("/v1/rerank", "/rerank", "/v2/rerank")
SCORE = ("/v1/score", "/score")
GENERATING = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/responses/input_tokens",
    "/v1/responses/{id}",
    "/v1/responses/{id}/cancel",
    "/v1/responses/{id}/input_items",
    "/v1/messages",
    "/v1/messages/count_tokens",
)


def routes() -> list[Route]:
    """They come before all others of the same paths."""
    return [
        Route("/v1/embeddings", embeddings, methods=["POST"]),
        *(Route(path, rerank, methods=["POST"]) for path in RERANK),
        *(Route(path, score, methods=["POST"]) for path in SCORE),
        *(Route(path, refuse, methods=["GET", "POST", "DELETE"]) for path in GENERATING),
    ]


def documented() -> Operations:
    return {
        ("post", "/v1/embeddings"): Operation("Vectors of texts or token ids", EmbeddingBody),
        **{("post", path): Operation("Documents by their relevance to a query", RerankBody) for path in RERANK},
        **{("post", path): Operation("Scores of pairs of texts", ScoreBody) for path in SCORE},
    }


async def refuse(http: HttpRequest) -> Response:
    front: Front = http.app.state.front
    front.check_generates()
    raise AssertionError("only servers of an encoder have this route")


async def embeddings(http: HttpRequest) -> Response:
    """POST /v1/embeddings."""
    engine = _engine(http)
    engine.check_embeds()
    found = await prepared(http, "embeddings")
    body = msgspec.msgpack.decode(found.more, type=EmbeddingRequest)
    engine.check_embeds(body.dimensions)
    vectors = shortened(await _run(http, body.rows), body.dimensions)
    front: Front = http.app.state.front
    head = _encode({"object": "list", "model": front.model, "usage": _usage(body.rows)})
    pieces = await run_sliced(_vectors(vectors, body.in_base64))
    return LongResponse([head[:-1] + b',"data":[', *pieces, b"]}"])


async def rerank(http: HttpRequest) -> Response:
    """POST /v1/rerank: the documents, the most relevant first."""
    body, values, rows = await _scored(http, "rerank")
    assert isinstance(body, RerankBody)
    _, documents, _ = texts_of(body)
    order = sorted(range(len(documents)), key=lambda i: (-values[i], i))[: body.top_n]
    results = []
    for i in order:
        shown = {} if body.return_documents is False else {"document": {"text": documents[i]}}
        results.append({"index": i, "relevance_score": float(values[i]), **shown})
    front: Front = http.app.state.front
    answer = {"id": f"rerank-{secrets.token_hex(16)}", "model": front.model, "usage": _usage(rows), "results": results}
    return LongResponse([await run_exclusive(lambda: _encode(answer))])


async def score(http: HttpRequest) -> Response:
    """POST /v1/score: a score for each pair, in order."""
    _, values, rows = await _scored(http, "score")
    data = [{"index": i, "object": "score", "score": float(value)} for i, value in enumerate(values)]
    front: Front = http.app.state.front
    head = {"id": f"score-{secrets.token_hex(16)}", "object": "list", "created": int(time.time()), "model": front.model}
    return LongResponse([_encode({**head, "data": data, "usage": _usage(rows)})])


async def _scored(http: HttpRequest, name: str) -> tuple[RerankBody | ScoreBody, np.ndarray, Rows]:
    """The body, a score for each second text, and the ids."""
    engine = _engine(http)
    found = await prepared(http, f"{name}_pairs" if engine.spec.task == "score" else name)
    asked = msgspec.msgpack.decode(found.more, type=RerankRequest if name == "rerank" else ScoreRequest)
    results = await _run(http, asked.rows)
    first, _, _ = texts_of(asked.body)
    return asked.body, scores_of(results, engine.spec.task, len(first)), asked.rows


async def _run(http: HttpRequest, rows: Rows) -> np.ndarray:
    front: Front = http.app.state.front
    engine, metrics, born = _engine(http), front.metrics, time.monotonic()
    try:
        results = await engine.encode(rows, http.receive)
    except Failed as e:
        metrics.ended("abort" if e.failure.status == 499 else "error", None)
        raise
    metrics.prompt(rows.tokens)
    metrics.ended("stop", time.monotonic() - born)
    return results


def _engine(http: HttpRequest) -> EncoderEngine:
    engine = http.app.state.front.engine
    assert isinstance(engine, EncoderEngine)
    return engine


def _usage(rows: Rows) -> dict[str, int]:
    return {"prompt_tokens": rows.tokens, "total_tokens": rows.tokens}


def _vectors(vectors: np.ndarray, in_base64: bool) -> Iterator[bytes]:
    """The rows as JSON, a comma before each but the first."""
    for i, vector in enumerate(vectors):
        shown = base64.b64encode(vector.astype("<f4").tobytes()).decode() if in_base64 else vector.tolist()
        yield (b"," if i else b"") + _encode({"object": "embedding", "index": i, "embedding": shown})
