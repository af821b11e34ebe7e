"""Decoders that need several tokens: what a stream gives equals the library's decoding of the whole."""

import json

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, decoders, models

from slipstream.errors import BadRequest, ModelError
from slipstream.grammar.matcher import NO_TEXTS, Vocabulary
from slipstream.serve.text.grammar_check import GrammarCheck
from slipstream.serve.text.logprobs import TokenNames
from slipstream.serve.text.structured import Structure
from slipstream.tokenize.decoder import decoding_of
from slipstream.tokenize.library import of_library
from slipstream.tokenize.tokenizer import load_tokenizer

WORDS = ["[PAD]", "[UNK]", "a", "##b", ".", "'", "n't", "do", "c</w>", "d</w>", "|", "▁e", "é", " ", "ab", "b", "-", "--", "x-"]
BYTES = [f"<0x{b:02X}>" for b in (0x41, 0xE2, 0x98, 0x83, 0xF0, 0x9F, 0x80, 0x0A)]
KINDS = {
    "none": None,
    "wordpiece": decoders.WordPiece(),
    "wordpiece as written": decoders.WordPiece(cleanup=False),
    "bpe": decoders.BPEDecoder(),
    "ctc": decoders.CTC(pad_token="[PAD]", word_delimiter_token="|"),
    "fuse": decoders.Fuse(),
    "replace": decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)]),
    "replace across tokens": decoders.Sequence([decoders.Fuse(), decoders.Replace("ab", "yyy"), decoders.Replace("--", "")]),
    "replace by a pattern": decoders.Sequence([decoders.Fuse(), decoders.Replace(Regex("a+b"), "y")]),
    "bytes and more": decoders.Sequence([decoders.ByteFallback(), decoders.Fuse(), decoders.Replace("ab", "y")]),
    "bytes and a letter": decoders.Sequence([decoders.ByteFallback(), decoders.Fuse(), decoders.Replace("b", "B")]),
    "spaces by another character": decoders.Metaspace(replacement="|"),
    "byte level and more": decoders.Sequence([decoders.ByteLevel(), decoders.Replace("b", "B")]),
}


def made(kind: str):
    library = tokenizers.Tokenizer(models.WordLevel({w: i for i, w in enumerate(WORDS + BYTES)}, unk_token="[UNK]"))
    library.decoder = KINDS[kind]  # type: ignore[assignment]
    library.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in WORDS[:2]])
    return of_library(library, (0,), None, None)


@pytest.mark.parametrize("kind", KINDS)
def test_a_stream_joined_equals_the_librarys_decoding_of_the_whole(kind):
    tokenizer = made(kind)
    size = tokenizer.vocab_size

    @settings(max_examples=60, deadline=None)
    @given(st.lists(st.integers(0, size + 2), max_size=200), st.booleans(), st.booleans())
    def check(ids, skip, continues):
        stream = tokenizer.stream(skip, continues=continues)
        got = [stream.push(id) for id in ids] + [stream.flush()]
        assert "".join(got) == tokenizer.decode(ids, skip, continues=continues)
        kept = [id for id in ids if not (skip and id in tokenizer.special_ids)]
        assert tokenizer.decode(ids, skip) == tokenizer._library.decode(kept, skip_special_tokens=False)

    check()


def test_long_answers_are_decoded_by_a_window_of_few_tokens():
    tokenizer, sizes = made("wordpiece"), []
    whole, tokenizer._text = tokenizer._text, lambda ids: (sizes.append(len(ids)), whole(ids))[1]
    stream, ids = tokenizer.stream(), [2 + i % 7 for i in range(2000)]
    text = "".join(map(stream.push, ids)) + stream.flush()
    assert text == whole(ids) and max(sizes) < 100


@pytest.mark.parametrize("kind", ["none", "wordpiece", "bpe", "replace", "byte level and more"])
def test_text_goes_out_with_the_token_that_completes_it(kind):
    tokenizer = made(kind)
    stream = tokenizer.stream()
    assert all(stream.push(WORDS.index(w)) for w in ("a", "do", "b"))


def test_characters_that_a_replacement_may_reach_are_held_back():
    stream = made("replace across tokens").stream()
    assert [stream.push(WORDS.index(w)) for w in ("b", "a")][0] == ""
    assert "".join([stream.push(WORDS.index("b")) for _ in range(12)]).startswith("byyybb")


@pytest.mark.parametrize("kind", ["bytes and more", "bytes and a letter"])
def test_bytes_in_a_row_wait_for_the_end_of_their_character(kind):
    tokenizer = made(kind)
    stream, first = tokenizer.stream(), len(WORDS)
    assert [stream.push(first + i) for i in (1, 2, 3)] == ["", "", ""]
    assert stream.push(WORDS.index("é")) + stream.flush() == "☃é"
    stream, run = tokenizer.stream(), [first + i for i in (1, 2, 3, 4)]  # a character, and a byte that spoils the whole run
    assert "".join(map(stream.push, run)) + stream.flush() == tokenizer.decode(run) == "\ufffd" * 4


@pytest.mark.parametrize("kind", ["none", "wordpiece", "wordpiece as written"])
def test_an_answers_text_is_the_bytes_of_its_tokens_where_the_tokenizer_says_so(kind):
    tokenizer = made(kind)
    assert tokenizer.spells

    @settings(max_examples=60, deadline=None)
    @given(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=20))
    def check(ids):
        ids = [id for id in ids if id not in tokenizer.special_ids]
        assert b"".join(map(tokenizer.token_bytes, ids)).decode() == tokenizer.decode(ids, continues=True)

    check()
    assert Vocabulary.of(tokenizer).tokens[WORDS.index("##b")] == (b"b" if kind != "none" else b" ##b")


@pytest.mark.anyio
@pytest.mark.parametrize("kind", ["bpe", "ctc", "replace across tokens"])
async def test_a_grammar_is_refused_where_tokens_have_no_texts_of_their_own(kind):
    tokenizer = made(kind)
    with pytest.raises(ValueError, match="depend on the tokens around them"):
        Vocabulary.of(tokenizer)
    with pytest.raises(BadRequest, match="response_format: " + NO_TEXTS[:20]):
        await GrammarCheck(tokenizer).check(Structure("{}", "response_format"))


@pytest.fixture
def anyio_backend():
    return "asyncio"


def test_names_of_tokens_say_whether_they_end_a_word():
    names = TokenNames(made("bpe"))
    assert [names(WORDS.index(w))[0] for w in ("c</w>", "b", "[PAD]")] == ["c ", "b", "[PAD]"]


def test_known_forms_are_spelled_token_by_token():
    library = tokenizers.Tokenizer(models.BPE())
    llama = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    forms = {"bytes": decoders.ByteLevel(), "pieces": decoders.Metaspace(), "pieces by parts": decoders.Sequence(llama)}
    for form, decoder in forms.items():
        library.decoder = decoder
        assert decoding_of(library).spelling == form.split()[0]


def folder_of(tmp_path, **config):
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "config.json").write_text("{}")
    return tmp_path


def test_a_tokenizer_that_runs_in_python_streams_what_it_decodes(tmp_path):
    tokenizer = load_tokenizer(folder_of(tmp_path, tokenizer_class="ByT5Tokenizer", eos_token="</s>"))
    ids = tokenizer.encode("a ☃ é.", add_special_tokens=False)
    assert tokenizer.decode(ids) == "a ☃ é." and tokenizer.eos_ids == (1,)
    stream = tokenizer.stream()
    pieces = [stream.push(id) for id in ids]
    assert "".join(pieces) == "a ☃ é." and "" in pieces and not any("\ufffd" in piece for piece in pieces)
    assert not tokenizer.spells


def test_a_vocabulary_of_word_pieces_needs_no_tokenizer_json(tmp_path):
    (tmp_path / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "house", "##s"]))
    tokenizer = load_tokenizer(folder_of(tmp_path, tokenizer_class="BertTokenizer"))
    ids = tokenizer.encode("The houses", add_special_tokens=False)
    assert ids == [5, 6, 7] and tokenizer.decode(ids) == "the houses"
    assert tokenizer.encode("the")[0] == 2 and tokenizer.special_ids == {0, 1, 2, 3, 4}


def test_a_tekken_file_needs_no_other_package(tmp_path):
    import base64

    tokens = [bytes([b]) for b in range(256)] + [b"he", b"the", b" the"]
    vocab = [{"rank": i, "token_bytes": base64.b64encode(t).decode(), "token_str": None} for i, t in enumerate(tokens)]
    special = [{"rank": i, "token_str": t, "is_control": True} for i, t in enumerate(["<unk>", "<s>", "</s>", "[INST]"])]
    config = {"pattern": r"\s?\p{L}+|[^\p{L}]", "num_vocab_tokens": len(vocab), "default_vocab_size": len(vocab) + 4}
    config |= {"default_num_special_tokens": 4, "version": "v7"}
    (tmp_path / "tekken.json").write_text(json.dumps({"config": config, "vocab": vocab, "special_tokens": special}))
    (tmp_path / "config.json").write_text("{}")
    tokenizer = load_tokenizer(tmp_path)
    ids = tokenizer.encode("the the ☃")
    assert ids[:3] == [1, 261, 262] and tokenizer.decode(ids) == "the the ☃"
    assert (tokenizer.bos_id, tokenizer.eos_ids, tokenizer.special_ids) == (1, (2,), {0, 1, 2, 3})


def test_a_missing_package_is_named_with_the_extra_that_brings_it(tmp_path, monkeypatch):
    (tmp_path / "tokenizer.model").write_bytes(b"\x0a\x01")
    monkeypatch.setitem(__import__("sys").modules, "tiktoken", None)
    with pytest.raises(ModelError, match=r"slipstream\[tokenizers\]"):
        load_tokenizer(folder_of(tmp_path, tokenizer_class="LlamaTokenizer"))


def test_a_tokenizer_without_its_vocabulary_is_refused(tmp_path):
    with pytest.raises(ModelError, match="vocabulary is missing"):
        load_tokenizer(folder_of(tmp_path, tokenizer_class="LlamaTokenizer", eos_token="</s>"))


def test_a_sentencepiece_model_gives_the_ids_of_its_own_library(tmp_path):
    spm = pytest.importorskip("sentencepiece", reason="the extra `tokenizers` is not installed")
    (tmp_path / "text").write_text("the house and the houses of the town\n" * 50)
    files = {"input": str(tmp_path / "text"), "model_prefix": str(tmp_path / "tokenizer")}
    like_llama = {"model_type": "bpe", "byte_fallback": True, "remove_extra_whitespaces": False}
    spm.SentencePieceTrainer.train(**files, **like_llama, vocab_size=300, minloglevel=2)
    own = spm.SentencePieceProcessor(model_file=str(tmp_path / "tokenizer.model"))
    tokenizer = load_tokenizer(folder_of(tmp_path, tokenizer_class="LlamaTokenizer"))
    for text in ("the houses", "a ☃ of the town", "two  spaces"):
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert ids == own.encode(text) and tokenizer.decode(ids) == own.decode(ids)


def test_a_tiktoken_file_gives_the_ids_of_its_own_library(tmp_path):
    tiktoken = pytest.importorskip("tiktoken", reason="the extra `tokenizers` is not installed")
    import base64

    ranks = {t: i for i, t in enumerate([bytes([b]) for b in range(256)] + [b"he", b"the", b" the"])}
    lines = "\n".join(f"{base64.b64encode(t).decode()} {i}" for t, i in ranks.items())
    (tmp_path / "tokenizer.model").write_text(lines)
    from transformers.convert_slow_tokenizer import TikTokenConverter

    own = tiktoken.Encoding("x", pat_str=TikTokenConverter().pattern, mergeable_ranks=ranks, special_tokens={})
    tokenizer = load_tokenizer(folder_of(tmp_path, tokenizer_class="PreTrainedTokenizerFast"))
    for text in ("the the house", "a ☃"):
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert ids == own.encode(text) and tokenizer.decode(ids) == text
