"""A fast tokenizer from a GGUF file's own metadata. Reads the header only; no torch, no transformers.

The splitting patterns are those of the models' published tokenizer.json files, by llama.cpp's name for them
(`tokenizer.ggml.pre`). An unknown name is refused, since a wrong pattern would silently give other tokens.
"""

from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from slipstream.errors import ModelError

_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4  # tokenizer.ggml.token_type

_GPT2 = ("gpt-2", "gpt2", "default", "olmo", "jais", "phi-2", "mpt")
_DIGITS = ("smollm", "starcoder", "refact", "command-r", "codeshell")  # each digit alone, then GPT-2's pattern

_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_PATTERNS = {
    "llama-bpe": _WORDS + r"|\p{N}{1,3}" + _REST,
    "llama3": _WORDS + r"|\p{N}{1,3}" + _REST,
    "smaug-bpe": _WORDS + r"|\p{N}{1,3}" + _REST,
    "qwen2": _WORDS + r"|\p{N}" + _REST,
    "deepseek-r1-qwen": _WORDS + r"|\p{N}" + _REST,
    "qwen35": (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
        r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
    "tekken": (
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
        r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
}
_NFC = ("qwen2", "deepseek-r1-qwen", "qwen35")
_WHOLE_WORDS = ("llama-bpe", "llama3", "tekken")  # a word that is a token is not merged: tokenizer.json's `ignore_merges`
_BOS_UNLESS_TOLD = ("llama-bpe", "llama3", "tekken")


def gguf_tokenizer(metadata: dict) -> Tokenizer:
    """The tokenizer of a GGUF file's metadata. Raises ModelError if there is none, or one of another kind."""
    kind = metadata.get("tokenizer.ggml.model")
    builders = {"gpt2": _byte_level, "llama": _sentencepiece}
    if kind not in builders or not metadata.get("tokenizer.ggml.tokens"):
        raise ModelError(f"the GGUF's tokenizer is of kind {kind!r}, not 'gpt2' or 'llama'; give --tokenizer")
    try:
        tokenizer = builders[kind](metadata)
    except ModelError:
        raise
    except Exception as e:  # the library raises nothing narrower
        raise ModelError(f"the GGUF's tokenizer cannot be read: {e!r}") from None
    _add_tokens(tokenizer, metadata)
    _add_ends(tokenizer, metadata)
    return tokenizer


def _byte_level(metadata: dict) -> Tokenizer:
    """BPE over bytes, as in GPT-2 and most later models."""
    pre, tokens = metadata.get("tokenizer.ggml.pre", "default"), metadata["tokenizer.ggml.tokens"]
    pairs: Any = [tuple(merge.split(" ", 1)) for merge in metadata["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE({t: i for i, t in enumerate(tokens)}, pairs, ignore_merges=pre in _WHOLE_WORDS))
    tokenizer.pre_tokenizer = _pre_tokenizer(pre)
    tokenizer.decoder = decoders.ByteLevel()
    if pre in _NFC:
        tokenizer.normalizer = normalizers.NFC()
    return tokenizer


def _sentencepiece(metadata: dict) -> Tokenizer:
    """BPE over characters with "\u2581" for spaces and <0xXX> for bytes that no piece covers, as Llama 2's tokenizer.json."""
    tokens, unknown = metadata["tokenizer.ggml.tokens"], metadata.get("tokenizer.ggml.unknown_token_id", 0)
    ids = {t: i for i, t in enumerate(tokens)}
    merges: Any = _merges_of_scores(ids, metadata["tokenizer.ggml.scores"])
    tokenizer = Tokenizer(models.BPE(ids, merges, unk_token=tokens[unknown], fuse_unk=True, byte_fallback=True))
    spaces = [normalizers.Replace(" ", "\u2581")]
    parts = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    if metadata.get("tokenizer.ggml.add_space_prefix", True):
        spaces.insert(0, normalizers.Prepend("\u2581"))  # type: ignore[arg-type]
        parts.append(decoders.Strip(" ", 1, 0))
    tokenizer.normalizer = normalizers.Sequence(spaces)
    tokenizer.decoder = decoders.Sequence(parts)
    return tokenizer


def _merges_of_scores(ids: dict[str, int], scores: list[float]) -> list[tuple[str, str]]:
    """Every way to join two pieces to a third, the best-scored results first; ties by the ids of the two."""
    found = []
    for piece, id in ids.items():
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in ids and right in ids:
                found.append((-scores[id], id, ids[left], ids[right], left, right))
    return [(left, right) for *_, left, right in sorted(found)]


def _pre_tokenizer(pre: str) -> pre_tokenizers.PreTokenizer:
    gpt2 = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if pre in _GPT2:
        return gpt2
    if pre in _DIGITS:
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), gpt2])
    if pre in _PATTERNS:
        split = pre_tokenizers.Split(Regex(_PATTERNS[pre]), behavior="isolated", invert=False)
        return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    known = ", ".join(sorted((*_GPT2, *_DIGITS, *_PATTERNS)))
    raise ModelError(f"the GGUF's tokenizer splits text as {pre!r}, which is not known (known: {known}); give --tokenizer")


def _add_tokens(tokenizer: Tokenizer, metadata: dict) -> None:
    """Registers the tokens that are matched whole in text: control and unknown as special, user-defined as plain."""
    kinds = list(zip(metadata["tokenizer.ggml.tokens"], metadata.get("tokenizer.ggml.token_type", ()), strict=False))
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t, k in kinds if k in (_UNKNOWN, _CONTROL)])
    tokenizer.add_tokens([AddedToken(t, special=False, normalized=False) for t, k in kinds if k == _USER_DEFINED])


def _add_ends(tokenizer: Tokenizer, metadata: dict) -> None:
    """Puts the beginning (and end) token around encoded text if the metadata ask for it."""
    tokens = metadata["tokenizer.ggml.tokens"]
    bos, eos = metadata.get("tokenizer.ggml.bos_token_id"), metadata.get("tokenizer.ggml.eos_token_id")
    usual = metadata.get("tokenizer.ggml.pre") in _BOS_UNLESS_TOLD or metadata["tokenizer.ggml.model"] == "llama"
    first = bos if metadata.get("tokenizer.ggml.add_bos_token", usual) else None
    last = eos if metadata.get("tokenizer.ggml.add_eos_token", False) else None
    ends = [(tokens[i], i) for i in (first, last) if i is not None]
    if not ends:
        return
    before, after = (f"{tokens[first]} " if first is not None else ""), (f" {tokens[last]}" if last is not None else "")
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{before}$A{after}", pair=f"{before}$A{after} $B:1", special_tokens=list(dict.fromkeys(ends))
    )
