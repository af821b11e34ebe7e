"""Text to token ids and back, and messages to a prompt, for one model. No torch; transformers only where no tokenizer.json is.

`load_tokenizer` finds a model's tokenizer; the classes behind `Tokenizer` differ in where the vocabulary comes from.
"""

import json
import pathlib
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

from slipstream.errors import BadRequest, ModelError
from slipstream.tokenize.template import ChatTemplate
from slipstream.tokenize.text_stream import Stream, TextStream, decode

if TYPE_CHECKING:
    from slipstream.tokenize.plain_content import PlainContent

NOTHING: frozenset[int] = frozenset()


class Tokenizer(ABC):
    """A model's vocabulary as the front end uses it. Safe to use from several threads.

    `vocab_size` counts the ids that have a text; a model may have more rows. `eos_ids` end an answer. `special_ids` are left
    out of text by default. `spells`: whether an answer's text is the `token_bytes` of its ids, joined.
    """

    vocab_size: int
    eos_ids: tuple[int, ...] = ()
    bos_id: int | None = None
    special_ids: frozenset[int] = NOTHING
    template: ChatTemplate | None = None
    strips_first_space: bool = False
    spells: bool = True

    # how a conversation is encoded in which a client's text is only text; None: names of special tokens become those tokens
    plain_content: "PlainContent | None" = None

    @abstractmethod
    def _encode(self, text: str, add_special_tokens: bool) -> list[int]: ...

    @abstractmethod
    def token_bytes(self, id: int) -> bytes:
        """The bytes that this token adds to a text; b"" for an id without one. A special token's are its name."""

    def encode(self, text: str, add_special_tokens: bool = True, *, param: str = "prompt") -> list[int]:
        """Token ids, with the beginning and end tokens that the model expects. Raises BadRequest for invalid Unicode."""
        check_unicode(text, param)
        return self._encode(text, add_special_tokens)

    def encode_pair(self, first: str, second: str, *, param: str = "prompt") -> tuple[list[int], int]:
        """Ids of two texts as one, as a model that scores pairs expects them, and how many belong to the first text.

        Raises BadRequest for invalid Unicode.
        """
        for text in (first, second):
            check_unicode(text, param)
        return self._encode_pair(first, second)

    def _encode_pair(self, first: str, second: str) -> tuple[list[int], int]:
        raise ModelError(f"a {type(self).__name__} cannot encode pairs of texts")

    def decode(self, ids: list[int], skip_special_tokens: bool = True, *, continues: bool = False) -> str:
        """The text of ids. continues: they go on from other text, so a leading space belongs to it (see `stream`)."""
        skipped = self.special_ids if skip_special_tokens else NOTHING
        return decode(ids, self.token_bytes, skipped, self.strips_first_space and not continues)

    def stream(self, skip_special_tokens: bool = True, *, continues: bool = False, keep: frozenset[int] = NOTHING) -> Stream:
        """The text of ids as they come; equals `decode` with the same arguments.

        An answer continues its prompt: `continues=True` keeps the space of a first token such as "▁Paris", which a text of
        its own would not have. No prompt ids are needed either way.
        keep: special tokens whose names are part of the text.
        """
        skipped = self.special_ids - keep if skip_special_tokens else NOTHING
        return TextStream(self.token_bytes, skipped, self.strips_first_space and not continues)

    def token_text(self, id: int) -> str:
        """The token alone as text; bytes that are not a whole character become U+FFFD (its `token_bytes` are exact)."""
        return self.token_bytes(id).decode("utf-8", "replace")

    def render_chat(self, messages: list[dict], /, **options: Any) -> str:
        """The prompt's text by the model's chat template; `options` are those of `ChatTemplate.render`.

        Blocks while the template runs. Raises BadRequest.
        """
        if self.template is None:
            raise BadRequest("this model has no chat template; start the server with --chat-template", param="messages")
        return self.template.render(messages, **options)

    def apply_chat(self, messages: list[dict], /, max_chars: int | None = None, **options: Any) -> list[int]:
        """The ids of `render_chat`'s text. The template writes the beginning token itself, so none is added.

        Raises BadRequest for a text of more than `max_chars`, which includes tools and all other text from the template.
        """
        plain = self.plain_content
        if plain is not None:
            messages, options = plain.marked(messages), plain.marked(options)
        text = self.render_chat(messages, **options)
        if max_chars is not None and len(text) > max_chars:
            raise BadRequest(
                f"messages: the chat template makes {len(text)} characters of them; at most {max_chars} can fit", "messages"
            )
        if plain is not None:
            check_unicode(text, "messages")
            return plain.encode(plain.unmarked(text))
        return self.encode(text, add_special_tokens=False, param="messages")

    def take_content_as_text(self) -> None:
        """From now on, names of special tokens in conversations are text. Raises ModelError where that cannot be done."""
        raise ModelError(
            f"--no-special-tokens-in-content: a {type(self).__name__} cannot do it; it needs a model with a tokenizer.json"
        )


def check_unicode(text: str, param: str) -> None:
    """Raises BadRequest for half a surrogate pair, which JSON can hold."""
    try:
        text.encode()
    except UnicodeEncodeError as e:
        raise BadRequest(f"character {e.start} is half a surrogate pair; a text must be valid Unicode", param=param) from None


def load_tokenizer(
    model_path: str | pathlib.Path,
    tokenizer: str | None = None,
    chat_template: str | None = None,
    *,
    placeholder: bool = False,
    special_tokens_in_content: bool = True,
) -> Tokenizer:
    """The tokenizer of a model (a folder, config.json, or .gguf file as `resolve_model` returns it).

    tokenizer: a folder, tokenizer.json, .gguf file, or Hugging Face id to use instead. chat_template: a file's path or the
    text of a template to use instead. placeholder: a model without a tokenizer gets an invented one of its vocabulary's size
    (random weights, `--device sim`); otherwise it is refused. special_tokens_in_content: see `plain_content.py`.
    Raises ModelError.
    """
    from slipstream.tokenize import library as library_tokenizer
    from slipstream.tokenize.placeholder import PlaceholderTokenizer

    path = _locate(tokenizer) if tokenizer else pathlib.Path(model_path)
    found = library_tokenizer.load(path)
    if found is None and placeholder and not tokenizer:
        found = PlaceholderTokenizer.of_model(path)
    if found is None:
        raise ModelError(f"{path} holds no tokenizer; give one with --tokenizer")
    if chat_template:
        variables = found.template.variables if found.template else {}
        found.template = ChatTemplate(_template_text(chat_template), variables)
        found.template.start()
    if not special_tokens_in_content:
        found.take_content_as_text()
    return found


def _locate(name: str) -> pathlib.Path:
    from slipstream.weights.fetch import HUB_ID, hub_snapshot

    path = pathlib.Path(name).expanduser()
    if path.exists():
        return path
    if HUB_ID.fullmatch(name):
        return hub_snapshot(name, weights=False)
    raise ModelError(f"--tokenizer {name}: there is no such folder, and it is not a Hugging Face id (owner/name)")


def _template_text(given: str) -> str:
    """The template's text. A text holds braces; a path does not."""
    if "{" in given:
        return given
    try:
        return pathlib.Path(given).expanduser().read_text()
    except OSError as e:
        raise ModelError(f"--chat-template {given}: {e.strerror or e}") from None


def read_json(path: pathlib.Path) -> dict:
    """An object from a file, or {} if there is no such file. Raises ModelError if it is not JSON."""
    try:
        data = json.loads(path.read_text())
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (OSError, ValueError) as e:
        raise ModelError(f"{path}: {e}") from None
    return data if isinstance(data, dict) else {}
