"""Vectors and scores for a program on the same machine, checked as the routes check them."""

from collections.abc import Sequence

import numpy as np

from slipstream.errors import BadRequest
from slipstream.serve.embed.bodies import MAX_TEXTS, EmbeddingBody, ScoreBody
from slipstream.serve.embed.engine import EncoderEngine, Receive
from slipstream.serve.embed.rows import rows_of_input, rows_of_pairs, rows_of_texts, texts_of
from slipstream.serve.embed.scores import scores_of, shortened
from slipstream.serve.front import Front
from slipstream.serve.request_body import converted
from slipstream.serve.text.prompts import prepare

Embedded = tuple[bytes, np.ndarray]  # the ids, int32, and their vector, float32


async def embed(
    front: Front, texts: str | Sequence[str | list[int]], dimensions: int | None, receive: Receive
) -> list[Embedded]:
    """One for each text; requests of at most MAX_TEXTS follow each other."""
    engine = _engine(front)
    engine.check_embeds(dimensions)
    given: list = [texts] if isinstance(texts, str) else list(texts)
    out: list[Embedded] = []
    for at in range(0, len(given), MAX_TEXTS):
        body = converted({"input": given[at : at + MAX_TEXTS], "dimensions": dimensions}, EmbeddingBody)
        rows = await prepare(None, lambda body=body: rows_of_input(body, front.ready_tokenizer(), engine.check_ready()))
        out += zip(rows.rows, shortened(await engine.encode(rows, receive), dimensions), strict=True)
    return out


async def score(front: Front, first: str | Sequence[str], second: str | Sequence[str], receive: Receive) -> np.ndarray:
    """float32 [seconds]."""
    engine = _engine(front)
    body = converted({"text_1": first, "text_2": second}, ScoreBody)
    make = rows_of_pairs if engine.spec.task == "score" else rows_of_texts
    rows = await prepare(None, lambda: make(body, front.ready_tokenizer(), engine.check_ready()))
    return scores_of(await engine.encode(rows, receive), engine.spec.task, len(texts_of(body)[0]))


def _engine(front: Front) -> EncoderEngine:
    if not isinstance(front.engine, EncoderEngine):
        raise BadRequest("this model generates text; load one that embeds or scores (all-minilm-l6-v2)")
    return front.engine
