"""Grammars over a model's tokens, by llguidance: the compiler, and the matcher of a slot.

A grammar travels as bytes (`Bound`) and is compiled on every rank, which gives equal matchers: the library's limits are counts
of work and not times, so each rank reaches them at the same token. No torch. The front end uses this module too, in a process
of its own, to try a grammar before any rank sees it.

A matcher allows tokens after which the text can still become one that the grammar describes, and the model's end tokens
exactly where it may end. Special tokens are not text and are allowed only where the grammar names them. Where the grammar
leaves one continuation of the text, the token is the one that the model's own tokenizer would write.
"""

from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple

import llguidance
import msgspec
import numpy as np

from slipstream.config import EngineConfig
from slipstream.log.grammar import MakeMatcher
from slipstream.tokenize.tokenizer import Tokenizer, load_tokenizer
from slipstream.weights.config import load_config

NO_TEXTS = "the texts of this model's tokens depend on the tokens around them, so an answer cannot be bound by a grammar"
NO_END = "the model has no end token, so an answer could not end where its grammar does"
FORCED_BYTES = 256  # characters of a forced text that are tokenized at a time; only the next token is needed
_KEPT = 32  # compiled grammars kept for the next request with the same one

# Work that one grammar may cause, measured on one core: 0.1 to 1 s to compile, then at most about 50 ms a token; a typical
# JSON schema takes 0.05 ms. With the library's own limits, one token of an ambiguous grammar may take seconds.
LIMITS = llguidance.LLParserLimits(
    max_items_in_row=1000,  # an object with 200 optional properties needs 807
    step_max_items=8000,
    step_lexer_fuel=100_000,
    initial_lexer_fuel=1_000_000,
    max_lexer_states=50_000,  # 1 to 2 kB each
    max_grammar_size=500_000,
    verbose_errors=False,  # they would quote the answer
)


class Bound(msgspec.Struct, frozen=True, array_like=True):
    """An answer's grammar: `Request.grammar` is this in msgpack.

    Ends are held back (end tokens while `ignore_end`, those and `stop_ids` for the first `min_tokens` tokens) as long as
    anything else may follow. Where nothing else may follow, the grammar wins and the answer ends.
    """

    text: str  # llguidance's JSON form, or its Lark dialect
    min_tokens: int = 0
    stop_ids: tuple[int, ...] = ()
    ignore_end: bool = False

    def encode(self) -> bytes:
        return msgspec.msgpack.encode(self)

    @staticmethod
    def decode(data: bytes) -> "Bound":
        """Raises ValueError for other bytes."""
        return _decode(data)


_decode = msgspec.msgpack.Decoder(Bound).decode


class Vocabulary(NamedTuple):
    """A model's tokens, as a grammar needs them."""

    tokens: list[bytes]  # by id; a special token's are its name
    special_ids: list[int]
    end_ids: list[int]
    width: int  # logits per row; ids of len(tokens) and above are never allowed
    encode: Callable[[str], list[int]] | None = None  # the model's own tokenizer, without special tokens at the ends

    @staticmethod
    def of(tokenizer: Tokenizer, width: int | None = None, tokenize: bool = True) -> "Vocabulary":
        """width: the size of a row of the model's logits; None means the tokenizer's size.

        Raises ValueError where tokens have no texts of their own.
        """
        if not tokenizer.spells:
            raise ValueError(NO_TEXTS)
        width = width or tokenizer.vocab_size
        tokens = [tokenizer.token_bytes(id) for id in range(min(tokenizer.vocab_size, width))]
        ends = [id for id in tokenizer.eos_ids if 0 <= id < len(tokens)]
        special = sorted({id for id in tokenizer.special_ids if id < len(tokens)} | set(ends))
        encode = (lambda text: tokenizer.encode(text, add_special_tokens=False)) if tokenize else None
        return Vocabulary(tokens, special, ends, width, encode)


class _Source:
    """A vocabulary in the form that the library reads. Calling it tokenizes text that a grammar forces."""

    def __init__(self, vocabulary: Vocabulary):
        self.tokens = vocabulary.tokens
        self.special_token_ids = vocabulary.special_ids
        self.eos_token_id = vocabulary.end_ids[0]
        self.bos_token_id = None
        self._encode = vocabulary.encode
        self._special = frozenset(vocabulary.special_ids)
        self._ids = {t: i for i, t in reversed(list(enumerate(vocabulary.tokens))) if t and i not in self._special}
        self._longest = max(map(len, self._ids), default=0)

    def __call__(self, text: bytes) -> list[int]:
        """Ids whose bytes begin the text: the tokenizer's own if they fit, else the longest token each time."""
        end = FORCED_BYTES
        while end < len(text) and text[end] & 0xC0 == 0x80:  # not within a character
            end -= 1
        text = text[:end]
        if self._encode is not None:
            ids = self._encode(text.decode("utf-8", "replace"))
            plain = not self._special.intersection(ids)
            if plain and b"".join(self.tokens[i] if i < len(self.tokens) else b"" for i in ids) == text:
                return ids
        return self._greedy(text)

    def _greedy(self, text: bytes) -> list[int]:
        ids, at = [], 0
        while at < len(text):
            ends = range(min(len(text), at + self._longest), at, -1)
            id, at = next(((self._ids[text[at:e]], e) for e in ends if text[at:e] in self._ids), (None, at))
            if id is None:
                break  # a byte that no token has: the grammar's dead end
            ids.append(id)
        return ids


class GrammarMatcher:
    """Implements `log.grammar.Matcher`: the state of one answer."""

    def __init__(self, state: llguidance.LLMatcher, bound: Bound, end_ids: list[int], width: int):
        self._state = state
        self._bound = bound
        self._end_ids = end_ids
        self._width = width
        self._count = 0

    def accept(self, token: int) -> None:
        """After a token that was not allowed, every later mask is a dead end."""
        self._state.consume_token(token)
        self._count += 1

    def rollback(self, count: int) -> None:
        """Takes back the last `count` accepted tokens, all of which were allowed."""
        self._state.rollback(count)
        self._count -= count

    def mask(self) -> np.ndarray:
        allowed = self._allowed()
        held = self._held()
        if held:
            rest = allowed.copy()
            for id in held:
                rest[id // 32] &= ~np.uint32(1 << id % 32)
            if rest.any():
                return rest
        return allowed

    def _allowed(self) -> np.ndarray:
        words = np.zeros(-(-self._width // 32), np.uint32)
        found = np.frombuffer(self._state.compute_bitmask(), "<u4")[: len(words)]
        if not self._state.is_error():  # its mask then holds the end token
            words[: len(found)] = found
        return words

    def _held(self) -> list[int]:
        early = self._count < self._bound.min_tokens
        held = self._end_ids if early or self._bound.ignore_end else []
        return [*held, *(id for id in self._bound.stop_ids if id < self._width)] if early else held

    def copy(self) -> "GrammarMatcher":
        other = GrammarMatcher(self._state.deep_copy(), self._bound, self._end_ids, self._width)
        other._count = self._count
        return other


class Maker:
    """A `MakeMatcher` of one vocabulary. Building it takes about 8 s for a million tokens, holding the interpreter's lock."""

    def __init__(self, vocabulary: Vocabulary):
        """Raises ValueError for a model without an end token."""
        if not vocabulary.end_ids:
            raise ValueError(NO_END)
        self._vocabulary = vocabulary
        source: Any = llguidance.TokenizerWrapper(_Source(vocabulary))
        self._tokenizer = llguidance.LLTokenizer(source, eos_token=vocabulary.end_ids)
        self._kept: OrderedDict[str, llguidance.LLMatcher] = OrderedDict()

    def __call__(self, grammar: bytes) -> GrammarMatcher:
        """Raises ValueError, saying why, for a grammar that cannot be compiled, is too complex, or describes no text."""
        bound = Bound.decode(grammar)
        state = self._kept.get(bound.text)
        if state is None:
            state = self._kept[bound.text] = self._compile(bound.text)
            if len(self._kept) > _KEPT:
                self._kept.popitem(last=False)
        self._kept.move_to_end(bound.text)
        return GrammarMatcher(state.deep_copy(), bound, self._vocabulary.end_ids, self._vocabulary.width)

    def _compile(self, text: str) -> llguidance.LLMatcher:
        state = llguidance.LLMatcher(self._tokenizer, text, log_level=0, limits=LIMITS)
        if not state.is_error():
            first = state.compute_bitmask()  # the most expensive mask; every copy starts with its cached work
            if not state.is_error() and not any(first):
                raise ValueError("it matches no text")
        if state.is_error():
            raise ValueError(readable(state.get_error()))
        return state


def readable(error: str) -> str:
    """The library's message without the parts meant for its authors."""
    error = error.replace("<non-verbose/>", "").strip()
    if error.startswith("NoExtension"):
        return "it matches no text"
    return error[:1000]


def open_maker(config: EngineConfig, model_path: str) -> MakeMatcher:
    """A rank's compiler of grammars. Raises ModelError for a model without a tokenizer, ValueError without an end token."""
    invented = config.device == "sim" or config.load_format == "dummy"
    tokenizer = load_tokenizer(model_path, config.tokenizer, placeholder=invented)
    return Maker(Vocabulary.of(tokenizer, logits_width(model_path)))


def logits_width(model_path: str) -> int | None:
    """The model's number of tokens, which may exceed its tokenizer's; None if the config does not hold it."""
    config = load_config(model_path)
    return config.get("vocab_size") or config.get("text_config", {}).get("vocab_size")
