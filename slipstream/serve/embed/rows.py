"""From texts to an encoder's ids. Pure and blocking: large bodies are worked on in a process of their own."""

from array import array
from collections.abc import Iterable

import msgspec

from slipstream.errors import BadRequest
from slipstream.serve.embed.bodies import MAX_TEXTS, EmbeddingBody, RerankBody, ScoreBody
from slipstream.serve.engine.engine import RequestLimits
from slipstream.serve.text.prompts import check_text, encode, items_of
from slipstream.tokenize.tokenizer import Tokenizer


class Rows(msgspec.Struct):
    """The fields of an `embed.messages.Encode`, and how many ids they are."""

    rows: list[bytes]
    firsts: list[int] = []
    tokens: int = 0


class EmbeddingRequest(msgspec.Struct):
    rows: Rows
    dimensions: int | None
    in_base64: bool


class RerankRequest(msgspec.Struct):
    rows: Rows
    body: RerankBody


class ScoreRequest(msgspec.Struct):
    rows: Rows
    body: ScoreBody


def rows_of_input(body: EmbeddingBody, tokenizer: Tokenizer, limits: RequestLimits) -> Rows:
    """Ids are taken as they are. Raises BadRequest naming the text that is empty or too long."""
    items = items_of(body.input, "input")
    _check_count(len(items), "input")
    special, rows = body.add_special_tokens is not False, []
    for i, item in enumerate(items):
        name = _name("input", i, len(items))
        ids = encode(item, tokenizer, limits, special, name) if isinstance(item, str) else item
        rows.append(_checked(ids, tokenizer, limits, name))
    return _packed(rows)


def texts_of(body: RerankBody | ScoreBody) -> tuple[list[str], list[str], tuple[str, str]]:
    """The first and second texts of a body, and the names of their fields. One first may go with several seconds."""
    if isinstance(body, RerankBody):
        documents = [each if isinstance(each, str) else each.text for each in body.documents]
        return [body.query], documents, ("query", "documents")
    first = [body.text_1] if isinstance(body.text_1, str) else body.text_1
    second = [body.text_2] if isinstance(body.text_2, str) else body.text_2
    if len(first) not in (1, len(second)):
        raise BadRequest(f"text_1: must be one text or as many as text_2 has ({len(second)}), not {len(first)}", "text_1")
    return first, second, ("text_1", "text_2")


def rows_of_texts(body: RerankBody | ScoreBody, tokenizer: Tokenizer, limits: RequestLimits) -> Rows:
    """For a model that embeds: the first texts, then the second ones."""
    first, second, names = texts_of(body)
    named = [(_name(n, i, len(texts)), t) for n, texts in zip(names, (first, second), strict=True) for i, t in enumerate(texts)]
    return _packed([_checked(encode(text, tokenizer, limits, True, name), tokenizer, limits, name) for name, text in named])


def rows_of_pairs(body: RerankBody | ScoreBody, tokenizer: Tokenizer, limits: RequestLimits) -> Rows:
    """For a model that scores pairs: each pair as one row."""
    first, second, names = texts_of(body)
    rows, firsts = [], []
    for i, text in enumerate(second):
        one, name = first[0] if len(first) == 1 else first[i], _name(names[1], i, len(second))
        check_text(one, limits, names[0])
        check_text(text, limits, name)
        ids, count = tokenizer.encode_pair(one, text, param=names[1])
        rows.append(_checked(ids, tokenizer, limits, name, f"with its {names[0]} "))
        firsts.append(count)
    return _packed(rows, firsts)


def size_of(*fields: str | Iterable) -> int:
    """The approximate number of characters or ids to work through."""
    return sum(len(f) if isinstance(f, str) else sum(len(t) if isinstance(t, str | list) else 1 for t in f) for f in fields)


def _name(field: str, at: int, count: int) -> str:
    return field if count == 1 else f"{field}[{at}]"


def _check_count(count: int, param: str) -> None:
    if count > MAX_TEXTS:
        raise BadRequest(f"{param}: at most {MAX_TEXTS} texts in one request, not {count}", param)


def _checked(ids: list[int], tokenizer: Tokenizer, limits: RequestLimits, name: str, more: str = "") -> list[int]:
    param = name.partition("[")[0]
    if not ids:
        raise BadRequest(f"{name}: must hold at least one token", param)
    if len(ids) > limits.max_len:
        raise BadRequest(f"{name}: {more}has {len(ids)} tokens; the model takes at most {limits.max_len}", param)
    if max(ids) >= tokenizer.vocab_size:
        raise BadRequest(f"{name}: token ids must be below {tokenizer.vocab_size} (the vocabulary), not {max(ids)}", param)
    return ids


def _packed(rows: list[list[int]], firsts: list[int] | None = None) -> Rows:
    return Rows([array("i", row).tobytes() for row in rows], firsts or [], sum(map(len, rows)))
