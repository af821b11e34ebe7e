"""Vocabularies that the `tokenizers` library runs: a folder's tokenizer.json, or one built from other files of it or a GGUF."""

import pathlib
import re
from typing import Any

import tokenizers

from slipstream.errors import ModelError
from slipstream.tokenize.decoder import Decoding, decoding_of
from slipstream.tokenize.differences import DecodedTokenizer
from slipstream.tokenize.gguf import gguf_tokenizer
from slipstream.tokenize.plain_content import PlainContent
from slipstream.tokenize.slow import TEKKEN, SlowTokenizer, first_part, read_slow
from slipstream.tokenize.template import ChatTemplate
from slipstream.tokenize.tokenizer import Tokenizer, read_json
from slipstream.weights.gguf_config import eos_ids
from slipstream.weights.gguf_file import GGUFFile

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def _byte_of_char() -> dict[str, int]:
    """GPT-2's spelling of bytes: printable ones as themselves, the others as characters from U+0100 on."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in plain]
    return {**{chr(b): b for b in plain}, **{chr(0x100 + i): b for i, b in enumerate(others)}}


_BYTES = _byte_of_char()


class SpelledTokenizer(Tokenizer):
    """A tokenizer of the `tokenizers` library whose tokens have a text each.

    Text is assembled here from each token's bytes, so that a stream and the whole agree. It equals the library's decoding,
    except for bytes that are not UTF-8 in vocabularies with byte fallback, where the library writes U+FFFD for each byte.
    """

    def __init__(self, library: tokenizers.Tokenizer, decoding: Decoding):
        self._library = library
        self._spelling, self.strips_first_space = decoding.spelling, decoding.strips_first_space
        self._added = {id: token.content for id, token in library.get_added_tokens_decoder().items()}
        self._cache: dict[int, bytes] = {}
        self.vocab_size, self.special_ids = _ids_of(library)

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return _encode(self._library, text, add_special_tokens)

    def _encode_pair(self, first: str, second: str) -> tuple[list[int], int]:
        return _encode_pair(self._library, first, second)

    def take_content_as_text(self) -> None:
        self.plain_content = PlainContent(self._library)

    def token_bytes(self, id: int) -> bytes:
        data = self._cache.get(id)
        if data is None:
            data = self._cache[id] = self._spell(id)
        return data

    def _spell(self, id: int) -> bytes:
        if id in self._added:
            return self._added[id].encode()
        token = self._library.id_to_token(id) if 0 <= id < self.vocab_size else None
        if token is None:
            return b""
        if self._spelling == "bytes":
            try:
                return bytes([_BYTES[c] for c in token])
            except KeyError:  # not spelled in bytes
                return token.encode()
        match = _BYTE_TOKEN.fullmatch(token)
        return bytes([int(match[1], 16)]) if match else token.replace("\u2581", " ").encode()


class LibraryTokenizer(DecodedTokenizer):
    """A tokenizer of the `tokenizers` library whose decoder has to see several tokens."""

    def __init__(self, library: tokenizers.Tokenizer, decoding: Decoding):
        self._library = library
        self._decoding = decoding
        self.vocab_size, self.special_ids = _ids_of(library)
        self._settle()

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return _encode(self._library, text, add_special_tokens)

    def _encode_pair(self, first: str, second: str) -> tuple[list[int], int]:
        return _encode_pair(self._library, first, second)

    def take_content_as_text(self) -> None:
        self.plain_content = PlainContent(self._library)

    def _text(self, ids: list[int]) -> str:
        return self._library.decode([id for id in ids if id >= 0], skip_special_tokens=False)

    def _token(self, id: int) -> str:
        return (self._library.id_to_token(id) if id >= 0 else None) or ""


def _ids_of(library: tokenizers.Tokenizer) -> tuple[int, frozenset[int]]:
    """The number of ids, and those of special tokens."""
    added = library.get_added_tokens_decoder()
    size = max(library.get_vocab_size(with_added_tokens=True), max(added, default=-1) + 1)
    return size, frozenset(id for id, token in added.items() if token.special)


def _encode(library: tokenizers.Tokenizer, text: str, add_special_tokens: bool) -> list[int]:
    # not `encode`: that holds the interpreter, for a second with a text of a megabyte
    return library.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids


def _encode_pair(library: tokenizers.Tokenizer, first: str, second: str) -> tuple[list[int], int]:
    encoding = library.encode_batch_fast([(first, second)], add_special_tokens=True)[0]
    return encoding.ids, first_part(encoding.type_ids)


def of_library(
    library: tokenizers.Tokenizer, eos: tuple[int, ...], bos: int | None, template: ChatTemplate | None
) -> SpelledTokenizer | LibraryTokenizer:
    """The tokenizer for a library's, by what its decoder does."""
    library.no_padding()
    library.no_truncation()
    decoding = decoding_of(library)
    made = SpelledTokenizer(library, decoding) if decoding.spelling else LibraryTokenizer(library, decoding)
    made.eos_ids, made.bos_id, made.template = eos, bos, template
    return made


def load(path: pathlib.Path) -> Tokenizer | None:
    """The tokenizer of a GGUF file, a folder, or a file in one; None if there is none. Raises ModelError."""
    if path.suffix == ".gguf":
        return _from_gguf(GGUFFile(path).metadata)
    folder = path if path.is_dir() else path.parent
    found = _read(folder)
    return None if found is None else _from_folder(folder, found)


def _from_gguf(metadata: dict) -> Tokenizer:
    library = gguf_tokenizer(metadata)
    names = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    ids = {name: metadata.get(f"tokenizer.ggml.{key}_token_id") for name, key in names.items()}
    variables = {name: metadata["tokenizer.ggml.tokens"][id] for name, id in ids.items() if id is not None}
    source = metadata.get("tokenizer.chat_template")
    template = ChatTemplate(source, variables) if source else None
    return of_library(library, tuple(eos_ids(metadata)), ids["bos_token"], template)


def _read(folder: pathlib.Path) -> Any | None:
    """A tokenizer of the library, or one that transformers runs in Python; None if the folder has none."""
    file = folder / "tokenizer.json"
    if not file.is_file():
        found = read_slow(folder)
        return getattr(found, "backend_tokenizer", found)
    try:
        return tokenizers.Tokenizer.from_file(str(file))
    except Exception as e:  # the library raises nothing narrower
        raise ModelError(f"{file}: {e}") from None


def _from_folder(folder: pathlib.Path, found: Any) -> Tokenizer:
    config = {**read_json(folder / "special_tokens_map.json"), **read_json(folder / "tokenizer_config.json")}
    named = {name: text for name in _NAMED if (text := _token_text(config.get(name))) is not None}
    extra = {n: t for n in config if n.endswith("_token") and (t := _token_text(config[n])) is not None}
    if (folder / TEKKEN).is_file():
        named = {"bos_token": "<s>", "eos_token": "</s>", **named}
    fast = isinstance(found, tokenizers.Tokenizer)
    if not fast:
        named = {**{name: text for name in _NAMED if (text := _token_text(getattr(found, name, None))) is not None}, **named}
    ids = {name: found.token_to_id(text) if fast else found.convert_tokens_to_ids(text) for name, text in named.items()}
    eos = [*_configured_eos(folder), ids.get("eos_token")]
    source = _chat_source(folder, config)
    template = ChatTemplate(source, {**extra, **named}) if source else None
    make = of_library if fast else SlowTokenizer
    return make(found, tuple(dict.fromkeys(i for i in eos if i is not None)), ids.get("bos_token"), template)


def _token_text(value: Any) -> str | None:
    value = value.get("content") if isinstance(value, dict) else value
    return value if isinstance(value, str) else None


def _configured_eos(folder: pathlib.Path) -> list[int]:
    """`eos_token_id` of generation_config.json, else of config.json: a number or a list of numbers."""
    for name in ("generation_config.json", "config.json"):
        value = read_json(folder / name).get("eos_token_id")
        if value is not None:
            return [value] if isinstance(value, int) else list(value)
    return []


def _chat_source(folder: pathlib.Path, config: dict) -> str | None:
    """The template's text from one of the places where checkpoints keep it, the newest kind first."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text()
    for value in (config.get("chat_template"), read_json(folder / "chat_template.json").get("chat_template")):
        if isinstance(value, str):
            return value
        if isinstance(value, list):
            named = {t.get("name"): t.get("template") for t in value if isinstance(t, dict)}
            return named.get("default")
    return None
