"""Log probabilities in the forms that clients know: OpenAI's for completions and for chat, vLLM's for prompts. Pure."""

from collections.abc import Iterable, Iterator, Sequence

import msgspec

from slipstream.log.request import TokenLogprobs
from slipstream.tokenize.tokenizer import Tokenizer

encode = msgspec.json.encode
FLOOR = -9999.0  # JSON has no infinity


class TokenNames:
    """Texts of single tokens. A token that is not a whole character is named by its bytes, so that names stay distinct."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._known: dict[int, tuple[str, bytes]] = {}

    def __call__(self, id: int) -> tuple[str, bytes]:
        known = self._known.get(id)
        if known is None:
            raw = self._tokenizer.token_bytes(id)
            try:
                text = raw.decode()
            except UnicodeDecodeError:
                text = "bytes:" + "".join(f"\\x{b:02x}" for b in raw)
            known = self._known[id] = (text, raw)
        return known


def clip(value: float) -> float:
    return value if value > FLOOR else FLOOR  # also for NaN


SLICE = 32  # tokens whose log probabilities are written at a time
Packed = Sequence[bytes | None]
# Log probabilities are kept as bytes until they are written: that takes a fifth of the memory and leaves the garbage
# collector no objects to walk, which took 0.1 s for an answer of 16,000 tokens.
pack = msgspec.msgpack.Encoder().encode
_unpack = msgspec.msgpack.Decoder(TokenLogprobs).decode


def unpacked(packed: Packed) -> list[TokenLogprobs | None]:
    return [None if row is None else _unpack(row) for row in packed]


def _slices(count: int) -> Iterator[slice]:
    return (slice(at, at + SLICE) for at in range(0, count, SLICE))


def json_list(parts: Iterable[list]) -> Iterator[bytes]:
    """The lists of `parts` joined, as pieces of JSON."""
    yield b"["
    first = True
    for part in parts:
        if part:
            yield encode(part)[1:-1] if first else b"," + encode(part)[1:-1]
            first = False
    yield b"]"


def chat_pieces(names: TokenNames, ids: Sequence[int], rows: Packed, top: int) -> Iterator[bytes]:
    """`for_chat` as pieces of JSON; each takes a short time."""
    yield b'{"content":'
    yield from json_list(for_chat(names, ids[s], unpacked(rows[s]), top)["content"] for s in _slices(len(ids)))
    yield b"}"


def completion_pieces(names: TokenNames, ids: Sequence[int], rows: Packed, offsets: Sequence[int], top: int) -> Iterator[bytes]:
    """`for_completion` as pieces of JSON."""
    parts = []
    for s in _slices(len(ids)):
        parts.append({k: encode(v)[1:-1] for k, v in for_completion(names, ids[s], unpacked(rows[s]), offsets[s], top).items()})
        yield b""
    before = b"{"
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        yield before + encode(name) + b":["
        for i, part in enumerate(parts):
            yield b"," + part[name] if i else part[name]
        yield b"]"
        before = b","
    yield b"}"


def prompt_pieces(names: TokenNames, ids: Sequence[int], rows: Packed, top: int) -> Iterator[bytes]:
    """`for_prompt` as pieces of JSON."""
    return json_list(for_prompt(names, ids[s], unpacked(rows[s]), top) for s in _slices(len(ids)))


def for_chat(names: TokenNames, ids: Sequence[int], rows: Sequence[TokenLogprobs | None], top: int) -> dict:
    """{"content": [...]}, one element per token, each with exactly `top` alternatives."""
    content = []
    for id, row in zip(ids, rows, strict=True):
        best = list(zip(row.top_ids[:top], row.top_logprobs[:top], strict=False)) if row and top else []
        text, raw = names(id)
        content.append(
            {
                "token": text,
                "logprob": clip(row.logprob) if row else FLOOR,
                "bytes": list(raw),
                "top_logprobs": [_chat_top(names, i, value) for i, value in best],
            }
        )
    return {"content": content}


def _chat_top(names: TokenNames, id: int, value: float) -> dict:
    text, raw = names(id)
    return {"token": text, "logprob": clip(value), "bytes": list(raw)}


def for_completion(
    names: TokenNames, ids: Sequence[int], rows: Sequence[TokenLogprobs | None], offsets: Sequence[int], top: int
) -> dict:
    """Four lists of equal length; a row of None (a prompt's first token) is null in two of them."""
    tokens, values, tops = [], [], []
    for id, row in zip(ids, rows, strict=True):
        text = names(id)[0]
        tokens.append(text)
        if row is None:
            values.append(None)
            tops.append(None)
            continue
        values.append(clip(row.logprob))
        best = {text: clip(row.logprob)}
        for i, value in zip(row.top_ids[:top], row.top_logprobs[:top], strict=False):
            best.setdefault(names(i)[0], clip(value))
        tops.append(best)
    return {"tokens": tokens, "token_logprobs": values, "top_logprobs": tops, "text_offset": list(offsets)}


def for_prompt(names: TokenNames, ids: Sequence[int], rows: Sequence[TokenLogprobs | None], top: int) -> list[dict | None]:
    """vLLM's `prompt_logprobs`: per token null or {id: {logprob, rank, decoded_token}}, the token itself first."""
    out: list[dict | None] = []
    for id, row in zip(ids, rows, strict=True):
        if row is None:
            out.append(None)
            continue
        entry = {str(id): {"logprob": clip(row.logprob), "rank": row.rank, "decoded_token": names(id)[0]}}
        for k, (i, value) in enumerate(zip(row.top_ids[:top], row.top_logprobs[:top], strict=False)):
            entry.setdefault(str(i), {"logprob": clip(value), "rank": k + 1, "decoded_token": names(i)[0]})
        out.append(entry)
    return out
