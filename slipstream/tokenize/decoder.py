"""What a decoder of the `tokenizers` library does to a text that grows token by token. Pure.

Most decoders spell each token by itself, as bytes or as pieces with "\u2581" for spaces. All others are called with ids and
give text (`differences`); for them it matters which end of a text may still change when another token comes.
"""

import json
from typing import Any, NamedTuple

import tokenizers

_JOINS = ("Fuse", "ByteLevel")  # after these the following parts see the whole text and no longer each token


class Decoding(NamedTuple):
    """How a text is made of tokens.

    spelling: "bytes", "pieces", or "" where only the decoder itself can say it. strips_first_space: of spelled texts. The
    rest is for the others. unsettled_chars: characters at a text's end that may still change, None where all may. byte_runs:
    bytes in a row become text together. spells: whether an answer's text is that of its tokens one by one. suffix: the end
    of a token that ends a word, "" where there is none. repeats: whether a token counts again that stands twice in a row.
    """

    spelling: str
    strips_first_space: bool = False
    unsettled_chars: int | None = 0
    byte_runs: bool = False
    spells: bool = True
    suffix: str = ""
    repeats: bool = True


def decoding_of(library: tokenizers.Tokenizer) -> Decoding:
    """Reads the decoder's own description of itself."""
    state: dict[str, Any] = json.loads(library.decoder.__getstate__()) if library.decoder is not None else {"type": "none"}
    parts = _flat(state)
    kinds = [part["type"] for part in parts]
    if set(kinds) <= set(_JOINS) and "ByteLevel" in kinds:
        return Decoding("bytes")
    if {"ByteFallback", "Metaspace"} & set(kinds) and all(map(_of_pieces, parts)):
        strip = any(part["type"] == "Strip" for part in parts)
        meta = any(p["type"] == "Metaspace" and p.get("prepend_scheme", "always") != "never" for p in parts)
        return Decoding("pieces", strip or meta)
    suffix = next((part["suffix"] for part in parts if part["type"] == "BPEDecoder"), "")
    return Decoding(
        "",
        unsettled_chars=_unsettled(parts),
        byte_runs="ByteFallback" in kinds,
        spells=kinds in (["WordPiece"], ["none"]),
        suffix=suffix,
        repeats="CTC" not in kinds,
    )


def _flat(state: dict[str, Any]) -> list[dict[str, Any]]:
    if state["type"] != "Sequence":
        return [state]
    return [part for each in state["decoders"] for part in _flat(each)]


def _of_pieces(part: dict[str, Any]) -> bool:
    """Whether a part is one of those that SentencePiece's form is made of."""
    match part["type"]:
        case "ByteFallback" | "Fuse":
            return True
        case "Metaspace":
            return part["replacement"] == "\u2581"
        case "Replace":
            return part["pattern"] == {"String": "\u2581"} and part["content"] == " "
        case "Strip":
            return (part["content"], part["start"], part["stop"]) == (" ", 1, 0)
    return False


def _unsettled(parts: list[dict[str, Any]]) -> int | None:
    """The most characters at the end of a text that one more token may change.

    A part that sees single tokens changes none. In the joined text, a replacement of n characters may begin in the last
    n - 1 and end in the next token; a regular expression may reach any distance back.
    """
    joined = next((i for i, part in enumerate(parts) if part["type"] in _JOINS), len(parts))
    chars = 0
    for part in parts[joined:]:
        if part["type"] == "Replace" and "String" in part["pattern"]:
            chars = (chars + len(part["pattern"]["String"]) - 1) * max(1, len(part["content"]))
        elif part["type"] not in (*_JOINS, "Strip", "Metaspace"):
            return None
    return chars
