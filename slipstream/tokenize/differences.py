"""Texts of tokenizers whose tokens cannot be spelled one by one: the differences between decodings of a growing list of ids.

As other engines do it: a window of the latest ids is decoded again with each token, and what is new at its end goes out.
"""

import threading
from abc import abstractmethod
from collections.abc import Callable

from slipstream.tokenize.decoder import Decoding
from slipstream.tokenize.text_stream import Stream
from slipstream.tokenize.tokenizer import NOTHING, Tokenizer

_WINDOW_TOKENS = 64  # from this size on, the window is cut back ...
_CONTEXT_TOKENS = 16  # ... to its last tokens, if their text shows that nothing depends on earlier ones
_UNKNOWN = "\ufffd"  # what an incomplete character is decoded to


class DifferenceStream:
    """Text of ids as they come, a `Stream`.

    Held back are: an incomplete character, characters that a replacement may still reach, and bytes in a row, which are
    decoded together. `anchor`: ids that the text continues and whose own text is not part of it.
    """

    __slots__ = ("_decode", "_decoding", "_is_byte", "_skipped", "_window", "_done", "_cut_at")

    def __init__(
        self,
        decode: Callable[[list[int]], str],
        decoding: Decoding,
        is_byte: Callable[[int], bool],
        skipped: frozenset[int],
        anchor: list[int],
    ):
        self._decode = decode
        self._decoding = decoding
        self._is_byte = is_byte
        self._skipped = skipped
        self._window = list(anchor)
        self._done = len(decode(anchor)) if anchor else 0  # characters of the window's text that are out
        self._cut_at = _WINDOW_TOKENS

    def push(self, id: int) -> str:
        if id in self._skipped:
            return ""
        self._window.append(id)
        unsettled = self._decoding.unsettled_chars
        if unsettled is None or (self._decoding.byte_runs and self._is_byte(id)):
            return ""
        text = self._decode(self._window)
        end = max(self._done, len(text.rstrip(_UNKNOWN)) - unsettled)
        new, self._done = text[self._done : end], end
        if len(self._window) >= self._cut_at:
            self._cut(text)
        return new

    def _cut(self, text: str) -> None:
        """Forgets the window's beginning where its end alone has the same text, the first token aside."""
        context = self._window[-_CONTEXT_TOKENS:]
        alone = self._decode(context)
        tail = alone[len(self._decode(context[:1])) :]
        held = len(text) - self._done
        if tail.strip(f" {_UNKNOWN}") and text.endswith(tail) and held + (self._decoding.unsettled_chars or 0) < len(tail):
            self._window, self._done = context, len(alone) - held
        self._cut_at = len(self._window) + _WINDOW_TOKENS

    def flush(self) -> str:
        """All that is held back; the stream can go on afterwards."""
        text = self._decode(self._window)
        new = text[self._done :]
        self._done = max(self._done, len(text))
        return new


class DecodedTokenizer(Tokenizer):
    """A tokenizer that decodes lists of ids. A subclass sets `vocab_size`, `special_ids`, `_decoding`, and calls `_settle`."""

    _decoding: Decoding

    @abstractmethod
    def _text(self, ids: list[int]) -> str:
        """The text of ids, special tokens by their names; ids without a token have none."""

    @abstractmethod
    def _token(self, id: int) -> str:
        """The token's entry in the vocabulary; "" for an id without one."""

    def _settle(self) -> None:
        self.spells = self._decoding.spells
        self._lock = threading.Lock()
        self._cache: dict[int, bytes] = {}
        self._anchor = self._find_anchor() if self._decoding.repeats else []

    def _find_anchor(self) -> list[int]:
        """A word of the vocabulary that a text can continue: a first word is spelled otherwise than a later one."""
        for id in range(self.vocab_size):
            text = "" if id in self.special_ids else self._text([id])
            if text.isascii() and text.isalpha() and self._token(id).endswith(self._decoding.suffix):
                return [id]
        return []

    def _is_byte(self, id: int) -> bool:
        """Whether a row of bytes may go on after this id; one without a token does not end it."""
        token = self._token(id)
        return not token or (len(token) == 6 and token.startswith("<0x") and token.endswith(">"))

    def _after(self, ids: list[int], anchor: list[int]) -> str:
        """The text that ids add after the anchor."""
        return self._text([*anchor, *ids])[len(self._text(anchor)) if anchor else 0 :]

    def token_bytes(self, id: int) -> bytes:
        with self._lock:
            data = self._cache.get(id)
        if data is None:
            data = self._spell(id).encode("utf-8", "replace")
            with self._lock:
                self._cache[id] = data
        return data

    def _spell(self, id: int) -> str:
        if id in self.special_ids:
            return self._token(id)
        suffix, token = self._decoding.suffix, self._token(id)
        if suffix:  # a text's last word has no space after it, so only the token itself shows whether it ends a word
            return token.removesuffix(suffix) + " " if token.endswith(suffix) else token
        return self._after([id], self._anchor)

    def decode(self, ids: list[int], skip_special_tokens: bool = True, *, continues: bool = False) -> str:
        skipped = self.special_ids if skip_special_tokens else NOTHING
        return self._after([id for id in ids if id not in skipped], self._anchor if continues else [])

    def stream(self, skip_special_tokens: bool = True, *, continues: bool = False, keep: frozenset[int] = NOTHING) -> Stream:
        skipped = self.special_ids - keep if skip_special_tokens else NOTHING
        return DifferenceStream(self._text, self._decoding, self._is_byte, skipped, self._anchor if continues else [])
