"""The bodies of the embedding and scoring routes, as structs (see `openai.bodies`)."""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from slipstream.serve.ignored import Ignored
from slipstream.serve.openai.bodies import Positive, TokenId

MAX_TEXTS = 2048  # OpenAI's bound

Texts = Annotated[list[str], Meta(min_length=1, max_length=MAX_TEXTS)]


class EmbeddingBody(Ignored, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/embeddings, OpenAI's: a text, texts, token ids, or lists of token ids."""

    input: str | Annotated[list[str | TokenId | list[TokenId]], Meta(min_length=1)]
    model: str | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Positive | None = None
    add_special_tokens: bool | None = None  # vLLM's; of texts


class Document(msgspec.Struct, forbid_unknown_fields=True):
    text: str


class RerankBody(Ignored, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/rerank, as Cohere, Jina and vLLM have it."""

    query: str
    documents: Annotated[list[str | Document], Meta(min_length=1, max_length=MAX_TEXTS)]
    model: str | None = None
    top_n: Positive | None = None
    return_documents: bool | None = None


class ScoreBody(Ignored, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/score, vLLM's: one text with each of several, or two lists of equal length."""

    text_1: str | Texts
    text_2: str | Texts
    model: str | None = None
