"""Vocabularies without a tokenizer.json: what transformers converts to the `tokenizers` library, or runs in Python.

No code of a checkpoint is run. transformers takes seconds to import and is imported here only when it is needed.
"""

import pathlib
import re
import threading
from typing import Any

import tokenizers

from slipstream.errors import ModelError
from slipstream.tokenize.decoder import Decoding
from slipstream.tokenize.differences import DecodedTokenizer
from slipstream.tokenize.template import ChatTemplate

TEKKEN = "tekken.json"
EXTRA = "pip install 'slipstream[tokenizers]'"
_FILES = ("*.model", "*.tiktoken", "vocab.json", "vocab.txt", TEKKEN)
_CONFIG = "tokenizer_config.json"
_MISSING = re.compile(r"sentencepiece|tiktoken|protobuf", re.IGNORECASE)


def read_slow(folder: pathlib.Path) -> Any | None:
    """transformers' tokenizer of a folder, or one of the library for tekken.json; None if the folder has none.

    Raises ModelError, which names the extra to install where a package is missing.
    """
    if (folder / TEKKEN).is_file():
        return _tekken(folder / TEKKEN)
    if not (folder / _CONFIG).is_file() and not any(any(folder.glob(name)) for name in _FILES):
        return None
    from transformers import AutoTokenizer

    try:
        found = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as e:  # the library raises nothing narrower
        hint = f"; {EXTRA} brings packages that some tokenizers need" if _MISSING.search(str(e)) else ""
        raise ModelError(f"{folder}: transformers cannot read its tokenizer: {str(e).strip()[:1000]}{hint}") from None
    if not set(found.get_vocab().values()) - set(found.added_tokens_decoder):
        raise ModelError(f"{folder}: its tokenizer has special tokens only; a file with the vocabulary is missing")
    return found


def first_part(types: list[int]) -> int:
    """How many ids of a pair are of its first text. Raises ModelError for other token types than zeros, then ones."""
    count = types.count(0)
    if types != [0] * count + [1] * (len(types) - count):
        raise ModelError("the tokenizer gives a pair of texts other token types than 0 and then 1, which is not supported")
    return count


def _tekken(file: pathlib.Path) -> tokenizers.Tokenizer:
    """Mistral's tokenizers; a text begins with `<s>`, as mistral-common encodes it."""
    from transformers.integrations.mistral.tokenizer import MistralConverter

    try:
        library = MistralConverter(str(file)).converted()
    except Exception as e:
        raise ModelError(f"{file}: transformers cannot read it: {e!r}") from None
    bos = library.token_to_id("<s>")
    if bos is not None:
        library.post_processor = tokenizers.processors.TemplateProcessing(
            single="<s> $A", pair="<s> $A $B:1", special_tokens=[("<s>", bos)]
        )
    return library


class SlowTokenizer(DecodedTokenizer):
    """A tokenizer that transformers runs in Python, one call at a time. Spaces before punctuation are kept."""

    def __init__(self, slow: Any, eos: tuple[int, ...], bos: int | None, template: ChatTemplate | None):
        self._slow = slow
        self._one_at_a_time = threading.Lock()
        self._decoding = Decoding("", byte_runs=True, spells=False)
        self.vocab_size = max(len(slow), max(slow.added_tokens_decoder, default=-1) + 1)
        self.special_ids = frozenset(slow.all_special_ids)
        self.eos_ids, self.bos_id, self.template = eos, bos, template
        self._settle()

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        with self._one_at_a_time:
            return self._slow.encode(text, add_special_tokens=add_special_tokens)

    def _encode_pair(self, first: str, second: str) -> tuple[list[int], int]:
        with self._one_at_a_time:
            both = self._slow(first, second, return_token_type_ids=True)
        return both["input_ids"], first_part(both["token_type_ids"])

    def _text(self, ids: list[int]) -> str:
        known = [id for id in ids if 0 <= id < self.vocab_size]
        with self._one_at_a_time:
            return self._slow.decode(known, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def _token(self, id: int) -> str:
        if not 0 <= id < self.vocab_size:
            return ""
        with self._one_at_a_time:
            return self._slow.convert_ids_to_tokens(id) or ""
