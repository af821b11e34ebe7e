"""A tokenizer for a model that has none: random weights, or the `sim` device."""

import pathlib

from slipstream.errors import ModelError
from slipstream.tokenize.template import ChatTemplate
from slipstream.tokenize.tokenizer import Tokenizer
from slipstream.weights.parts import read_config

_TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: "
    "{{ m.content if m.content is string else m.content | map(attribute='text') | join }}\n"
    "{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)


class PlaceholderTokenizer(Tokenizer):
    """Text is its UTF-8 bytes: byte b is the b-th id that is not special. Every other id is a word of its own, " t<id>".

    With fewer than 256 plain ids, bytes share ids and text does not survive the way to ids and back. Every id still has a text.
    """

    def __init__(self, vocab_size: int, eos_ids: tuple[int, ...] = (), bos_id: int | None = None):
        self.vocab_size = vocab_size
        self.eos_ids = tuple(i for i in eos_ids if 0 <= i < vocab_size)
        self.bos_id = bos_id
        self.special_ids = frozenset(self.eos_ids if bos_id is None else (*self.eos_ids, bos_id))
        plain = [i for i in range(min(vocab_size, 256 + len(self.special_ids))) if i not in self.special_ids][:256]
        if not plain:
            raise ModelError(f"a vocabulary of {vocab_size} has no id for text")
        self._ids = [plain[b % len(plain)] for b in range(256)]
        self._bytes = {id: b for b, id in enumerate(plain)}
        self.template = ChatTemplate(_TEMPLATE)

    @classmethod
    def of_model(cls, path: pathlib.Path) -> "PlaceholderTokenizer":
        """Sized by config.json (of a folder, or that file), or by its `text_config`. Raises ModelError without a vocab_size."""
        config = read_config(path)
        config = config if "vocab_size" in config else config.get("text_config", {})
        size = config.get("vocab_size")
        if not isinstance(size, int):
            raise ModelError(f"{path}: the config has no vocab_size")
        eos = config.get("eos_token_id")
        return cls(size, () if eos is None else (eos,) if isinstance(eos, int) else tuple(eos), config.get("bos_token_id"))

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return [self._ids[b] for b in text.encode()]

    def take_content_as_text(self) -> None:
        """Nothing to do: no text becomes a special token here."""

    def token_bytes(self, id: int) -> bytes:
        if id in self._bytes:
            return bytes([self._bytes[id]])
        if id in self.special_ids:
            return f"<|{id}|>".encode()
        return f" t{id}".encode() if 0 <= id < self.vocab_size else b""
