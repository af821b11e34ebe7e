"""Tokenizers: the real model's against transformers, streams against the whole, and what a model without one gets."""

import json
import pathlib
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.errors import BadRequest, ModelError
from slipstream.tokenize.library import of_library
from slipstream.tokenize.placeholder import PlaceholderTokenizer
from slipstream.tokenize.tokenizer import load_tokenizer
from tests.helpers.checkpoints import smollm2, tiny_llama, write_tokenizer

DATA = pathlib.Path(__file__).parents[1] / "data"
REFERENCE = json.loads((DATA / "smollm2_tokenizer.json").read_text())


@pytest.fixture(scope="module")
def real():
    return load_tokenizer(smollm2())


def pieces_tokenizer(strip: bool = True):
    """A SentencePiece-like vocabulary: words with "▁", and every byte as <0xXX> for the rest."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers

    words = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), "▁", "a", "b", "é", "▁a", "▁é", "😀", "ab"]
    merges = [("▁", "a"), ("▁", "é"), ("a", "b")]
    model = models.BPE({w: i for i, w in enumerate(words)}, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    library = Tokenizer(model)
    library.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    library.decoder = decoders.Sequence([*parts, decoders.Strip(" ", 1, 0)] if strip else parts)
    library.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in words[:3]])
    return of_library(library, (2,), 1, None)


PIECES = pieces_tokenizer()


def test_the_real_models_encodings_equal_the_reference(real):
    for case in REFERENCE["encodings"]:
        assert real.encode(case["text"]) == case["ids"], case["text"]


def test_text_comes_back_from_its_ids(real):
    for case in REFERENCE["encodings"]:
        assert real.decode(case["ids"], skip_special_tokens=False) == case["text"]


def test_the_real_models_chats_equal_the_reference(real):
    for case in REFERENCE["chats"]:
        case = dict(case)
        messages, text, ids = case.pop("messages"), case.pop("text"), case.pop("ids")
        assert real.render_chat(messages, **case) == text
        assert real.apply_chat(messages, **case) == ids


def test_the_real_models_golden_prompts_and_answers(real):
    for case in json.loads((DATA / "smollm2_greedy.json").read_text())["cases"]:
        assert real.encode(real.decode(case["prompt_token_ids"], skip_special_tokens=False)) == case["prompt_token_ids"]
        assert real.decode(case["token_ids"]) == case["text"]


def test_the_real_models_ids(real):
    assert (real.vocab_size, real.eos_ids, real.bos_id) == (49152, (2,), 1)
    assert real.special_ids == frozenset(range(17))
    assert real.token_text(2) == "<|im_end|>" and real.decode([2]) == "" and real.decode([2], False) == "<|im_end|>"


def test_decoding_equals_the_librarys(real):
    @settings(max_examples=200, deadline=None)
    @given(st.lists(st.integers(0, 49151), max_size=40), st.booleans())
    def check(ids, skip):
        assert real.decode(ids, skip) == real._library.decode(ids, skip_special_tokens=skip)

    check()


@pytest.mark.parametrize("which", ["real", "pieces", "pieces_unstripped", "placeholder"])
def test_a_stream_joined_equals_the_whole_and_never_splits_a_character(which, real):
    tokenizer = {
        "real": real,
        "pieces": PIECES,
        "pieces_unstripped": pieces_tokenizer(strip=False),
        "placeholder": PlaceholderTokenizer(300, (2,), 1),
    }[which]
    size = tokenizer.vocab_size

    @settings(max_examples=150, deadline=None)
    @given(st.lists(st.integers(0, size + 3), max_size=40), st.booleans(), st.booleans())
    def check(ids, skip, continues):
        stream = tokenizer.stream(skip, continues=continues)
        got = [stream.push(i) for i in ids] + [stream.flush()]
        assert "".join(got) == tokenizer.decode(ids, skip, continues=continues)
        kept = [i for i in ids if not (skip and i in tokenizer.special_ids)]
        whole = b"".join(tokenizer.token_bytes(i) for i in kept).decode("utf-8", "replace")
        assert tokenizer.decode(ids, skip, continues=True) == whole

    check()


def test_a_character_of_several_tokens_is_held_until_it_is_whole(real):
    ids = real.encode("\U0001fae8")
    assert len(ids) > 1
    stream = real.stream()
    got = [stream.push(i) for i in ids]
    assert got[-1] == "\U0001fae8" and not any(got[:-1])
    assert [stream.push(i) for i in ids[:-1]] == [""] * (len(ids) - 1) and stream.flush() == "\ufffd"
    assert stream.push(real.encode("x")[0]) == "x"
    assert b"".join(real.token_bytes(i) for i in ids) == "\U0001fae8".encode()


def test_byte_fallback_text_and_the_space_before_a_first_word():
    ids = PIECES.encode("a é ☃", add_special_tokens=False)
    assert PIECES.decode(ids) == "a é ☃" == PIECES._library.decode(ids)
    answer = PIECES._library.token_to_id("▁a")
    assert PIECES.decode([answer]) == "a" and PIECES.decode([answer], continues=True) == " a"
    assert PIECES.stream(continues=True).push(answer) == " a" and PIECES.stream().push(answer) == "a"
    stream = PIECES.stream()
    assert [stream.push(i) for i in (1, answer, answer)] == ["", "a", " a"]
    assert PIECES.token_bytes(3 + 0xE2) == b"\xe2" and PIECES.token_text(3 + 0xE2) == "\ufffd"


def test_a_folder_brings_its_template_and_ids():
    tokenizer = load_tokenizer(tiny_llama())
    assert (tokenizer.eos_ids, tokenizer.bos_id, tokenizer.special_ids) == ((2,), 1, frozenset({0, 1, 2}))
    text = tokenizer.render_chat([{"role": "user", "content": "hi"}])
    assert text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    ids = tokenizer.apply_chat([{"role": "user", "content": "the ½ 你"}])
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<|im_start|>user\nthe ½ 你<|im_end|>\n<|im_start|>assistant\n"


def test_every_end_token_of_a_folder_is_known(tmp_path):
    write_tokenizer(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 7}))
    assert load_tokenizer(tmp_path).eos_ids == (7, 2)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 0]}))
    assert load_tokenizer(tmp_path).eos_ids == (2, 0)


def test_a_template_can_be_given_as_text_or_file(tmp_path):
    assert load_tokenizer(tiny_llama(), chat_template="{{ bos_token }}!").render_chat([]) == "<|im_start|>!"
    (tmp_path / "t.jinja").write_text("{{ messages[0].content }}")
    tokenizer = load_tokenizer(tiny_llama(), chat_template=str(tmp_path / "t.jinja"))
    assert tokenizer.render_chat([{"role": "user", "content": "x"}]) == "x"
    with pytest.raises(ModelError, match="line 1"):
        load_tokenizer(tiny_llama(), chat_template="{% if %}")
    with pytest.raises(ModelError, match="No such file"):
        load_tokenizer(tiny_llama(), chat_template=str(tmp_path / "absent"))


def test_another_tokenizer_can_be_named(tmp_path):
    write_tokenizer(tmp_path)
    assert load_tokenizer(smollm2(), str(tmp_path)).vocab_size < 320
    with pytest.raises(ModelError, match="--tokenizer"):
        load_tokenizer(smollm2(), str(tmp_path / "absent"))


def test_a_model_without_a_chat_template_refuses_chats_by_name(tmp_path):
    write_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").unlink()
    with pytest.raises(BadRequest, match="chat-template") as caught:
        load_tokenizer(tmp_path).apply_chat([{"role": "user", "content": "x"}])
    assert caught.value.param == "messages"


def test_half_a_surrogate_pair_is_refused(real):
    with pytest.raises(BadRequest) as caught:
        real.encode("a\ud800b")
    assert caught.value.param == "prompt"
    with pytest.raises(BadRequest) as caught:
        real.apply_chat([{"role": "user", "content": "\udfff"}])
    assert caught.value.param == "messages"


def test_a_model_without_a_tokenizer_is_refused_unless_it_computes_nothing(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 1000, "eos_token_id": [5, 6]}))
    with pytest.raises(ModelError, match="--tokenizer"):
        load_tokenizer(tmp_path)
    tokenizer = load_tokenizer(tmp_path, placeholder=True)
    assert (tokenizer.vocab_size, tokenizer.eos_ids) == (1000, (5, 6))
    text = "Hello, wörld 😀\n"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    ids = tokenizer.apply_chat([{"role": "user", "content": "hi"}])
    assert tokenizer.decode(ids) == "user: hi\nassistant:"


@pytest.mark.parametrize("size", [1, 16, 255, 256, 300, 5000])
def test_every_id_of_a_placeholder_has_a_text(size):
    tokenizer = PlaceholderTokenizer(size)
    assert all(tokenizer.token_bytes(i) and tokenizer.decode([i]) for i in range(size))
    assert all(0 <= i < size for i in tokenizer.encode("añ"))


def test_unknown_kinds_of_gguf_tokenizers_are_refused():
    from slipstream.tokenize.gguf import gguf_tokenizer

    tokens = {"tokenizer.ggml.tokens": ["a"], "tokenizer.ggml.merges": []}
    with pytest.raises(ModelError, match="of kind 't5'"):
        gguf_tokenizer({**tokens, "tokenizer.ggml.model": "t5"})
    with pytest.raises(ModelError, match="splits text as 'novel'"):
        gguf_tokenizer({**tokens, "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "novel"})


def test_a_gguf_that_wants_a_beginning_token_gets_it():
    from slipstream.tokenize.gguf import gguf_tokenizer

    metadata = {"tokenizer.ggml.tokens": ["<s>", "a", "1", "aa"], "tokenizer.ggml.merges": ["a a"]}
    metadata |= {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.bos_token_id": 0, "tokenizer.ggml.token_type": [3, 1, 1, 1]}
    library = gguf_tokenizer({**metadata, "tokenizer.ggml.pre": "llama-bpe"})
    assert library.encode("aa1").ids == [0, 3, 2] and library.encode("aa", add_special_tokens=False).ids == [3]
    library = gguf_tokenizer({**metadata, "tokenizer.ggml.pre": "qwen2"})
    assert library.encode("<s>aa").ids == [0, 3]


def test_the_fast_path_imports_neither_torch_nor_transformers():
    code = "import sys; from slipstream.tokenize.tokenizer import load_tokenizer; load_tokenizer(sys.argv[1]).encode('x'); "
    code += "sys.exit(bool({'torch', 'transformers', 'jinja2'} & set(sys.modules)))"
    root = pathlib.Path(__file__).parents[2]
    assert subprocess.run([sys.executable, "-c", code, str(smollm2())], cwd=root, timeout=60).returncode == 0


def test_a_sentencepiece_gguf_is_read_from_its_scores():
    from slipstream.tokenize.gguf import gguf_tokenizer

    vocab = sorted(PIECES._library.get_vocab().items(), key=lambda item: item[1])
    tokens = [token for token, _ in vocab]
    best = {"▁a": -1.0, "▁é": -2.0, "ab": -3.0}
    metadata = {"tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": tokens, "tokenizer.ggml.bos_token_id": 1}
    metadata |= {"tokenizer.ggml.scores": [best.get(t, -9.0) for t in tokens], "tokenizer.ggml.unknown_token_id": 0}
    metadata |= {"tokenizer.ggml.token_type": [2, 3, 3, *[6] * 256, *[1] * (len(tokens) - 259)]}
    tokenizer = of_library(gguf_tokenizer(metadata), (2,), 1, None)
    for text in ("a", "ab aab  é☃ 😀b", "x</s>a", " lead"):
        ids = tokenizer.encode(text)
        assert ids == [1, *PIECES.encode(text)]
        assert tokenizer.decode(ids) == PIECES.decode(ids)
    plain = of_library(gguf_tokenizer({**metadata, "tokenizer.ggml.add_space_prefix": False}), (2,), 1, None)
    assert plain.decode(plain.encode(" a b")) == " a b" and tokenizer.decode(tokenizer.encode(" a b")) == " a b"
