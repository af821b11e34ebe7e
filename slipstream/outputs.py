"""What `LLM` and `AsyncLLM` return: plain values, with vLLM's names."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from slipstream.serve.text.choice import Choice
from slipstream.serve.text.logprobs import Packed, TokenNames, unpacked


class Logprob(NamedTuple):
    logprob: float  # natural, of the raw logits
    rank: int  # 1 = the most likely
    decoded_token: str


Logprobs = list[dict[int, Logprob] | None]  # by token id, for each token; None for a prompt's first


@dataclass(frozen=True)
class CompletionOutput:
    """One finished answer."""

    index: int  # among the n answers to its prompt
    text: str
    token_ids: list[int]
    finish_reason: str  # "stop" or "length"
    stop_reason: str | int | None  # the stop string or token id that ended it
    logprobs: Logprobs | None


@dataclass(frozen=True)
class RequestOutput:
    """The answers to one prompt or conversation."""

    prompt: str | None  # None where it was given as token ids or as a conversation
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    num_cached_tokens: int  # of the prompt, found in the prefix cache
    prompt_logprobs: Logprobs | None


@dataclass(frozen=True)
class EmbeddingOutput:
    embedding: list[float]


@dataclass(frozen=True)
class EmbeddingRequestOutput:
    """The vector of one text."""

    prompt_token_ids: list[int]
    outputs: EmbeddingOutput


@dataclass(frozen=True)
class ScoringOutput:
    score: float


@dataclass(frozen=True)
class ScoringRequestOutput:
    """The score of one pair of texts."""

    outputs: ScoringOutput


def embedding_output(ids: bytes, vector: np.ndarray) -> EmbeddingRequestOutput:
    """ids: int32."""
    return EmbeddingRequestOutput(np.frombuffer(ids, np.int32).tolist(), EmbeddingOutput(vector.tolist()))


def scoring_output(value: float) -> ScoringRequestOutput:
    return ScoringRequestOutput(ScoringOutput(float(value)))


def request_output(prompt: str | None, answers: list[Choice], names: TokenNames) -> RequestOutput:
    """answers: those to one prompt, all of which have ended."""
    first = answers[0]
    shown = first.plan.prompt_logprobs
    ids = first.prompt.ids.tolist()
    rows = None if shown < 0 else _named(ids, first.prompt_rows or [None] * len(ids), shown, names)
    return RequestOutput(prompt, ids, [_completion(k, a, names) for k, a in enumerate(answers)], first.cached_tokens, rows)


def _completion(index: int, answer: Choice, names: TokenNames) -> CompletionOutput:
    assert answer.finish_reason is not None
    piece, shown = answer.take(), answer.plan.logprobs
    logprobs = None if shown < 0 else _named(piece.ids, piece.logprobs, shown, names)
    return CompletionOutput(index, piece.text, answer.ids, answer.finish_reason, answer.stop_reason, logprobs)


def _named(ids: list[int], rows: Packed, shown: int, names: TokenNames) -> Logprobs:
    out: Logprobs = []
    for id, row in zip(ids, unpacked(rows), strict=True):
        if row is None:
            out.append(None)
            continue
        entry = {id: Logprob(row.logprob, row.rank, names(id)[0])}
        for k, (other, value) in enumerate(zip(row.top_ids[:shown], row.top_logprobs[:shown], strict=False)):
            entry.setdefault(other, Logprob(value, k + 1, names(other)[0]))
        out.append(entry)
    return out
