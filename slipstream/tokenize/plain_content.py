"""Conversations in which a client's text is only text: the name of a special token in it does not become that token.

The template's own special tokens still do. A name in the client's text gets a mark before the template runs, so the template
does not take it for structure either. The rendered text is encoded by a copy of the tokenizer whose special tokens have other
names, which no client can write. So a name without a mark is given its other name, and one with a mark is text.
"""

import json
import re
from typing import Any

import tokenizers

_MARK, _PREFIX = "\ufdd0", "\ufdd1"  # noncharacters of Unicode, reserved for uses inside a program
_RESERVED = str.maketrans({_MARK: "\ufffd", _PREFIX: "\ufffd"})


class PlainContent:
    """Marks a client's text, and encodes what the template makes of it."""

    def __init__(self, library: tokenizers.Tokenizer):
        special = {t.content for t in library.get_added_tokens_decoder().values() if t.special and len(t.content) > 1}
        longest_first = sorted(special, key=len, reverse=True)
        self._names = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        self._library = _renamed(library, special)

    def marked(self, value: Any) -> Any:
        """A JSON value with a mark inside each name of a special token, also in keys."""
        if isinstance(value, str):
            value = value.translate(_RESERVED)
            while self._names.search(value):  # a name may lie inside another
                value = self._names.sub(lambda m: m[0][0] + _MARK + m[0][1:], value)
            return value
        if isinstance(value, dict):
            return {self.marked(key): self.marked(item) for key, item in value.items()}
        return [self.marked(item) for item in value] if isinstance(value, list) else value

    def unmarked(self, text: str) -> str:
        """A rendered text for `encode`."""
        return self._names.sub(lambda m: _PREFIX + m[0], text).replace(_MARK, "")

    def encode(self, text: str) -> list[int]:
        return self._library.encode_batch_fast([text], add_special_tokens=False)[0].ids


def _renamed(library: tokenizers.Tokenizer, special: set[str]) -> tokenizers.Tokenizer:
    """A copy with a prefix before the names of special tokens; ids stay. Merges that would spell such a name are left out."""

    def name(text: str) -> str:
        return _PREFIX + text if text in special else text

    data = json.loads(library.to_str())
    for token in data["added_tokens"]:
        token["content"] = name(token["content"])
    model = data["model"]
    if isinstance(model["vocab"], dict):
        model["vocab"] = {name(text): id for text, id in model["vocab"].items()}
    else:  # of type Unigram: pairs of text and score
        model["vocab"] = [[name(text), score] for text, score in model["vocab"]]
    if model.get("unk_token") is not None:
        model["unk_token"] = name(model["unk_token"])
    if "merges" in model:
        pairs = [pair.split(" ", 1) if isinstance(pair, str) else pair for pair in model["merges"]]
        model["merges"] = [pair for pair in pairs if special.isdisjoint((*pair, "".join(pair)))]
    return tokenizers.Tokenizer.from_str(json.dumps(data))
