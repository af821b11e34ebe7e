"""Vectors and scores against transformers' own, on small random models and on the real all-MiniLM-L6-v2."""

import json
import pathlib

import numpy as np
import pytest
import torch
import transformers

from slipstream.config import EngineConfig
from slipstream.embed.encoder import Encoder
from slipstream.embed.kinds import EncoderSpec, encoder_spec
from slipstream.embed.queue import Text
from slipstream.errors import ModelError
from slipstream.tokenize.tokenizer import load_tokenizer
from slipstream.weights.pull import resolve_model
from tests.helpers.checkpoints import randomize, tiny_llama

SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 300}
ROWS = [np.arange(5, 5 + n, dtype=np.int32) for n in (1, 7, 30, 12)]
SENTENCES = (
    "The cat sits outside.",
    "A man is playing the guitar while a woman watches him from the other side of the street, and nobody says a word.",
    "é ☃ 你好",
    "Paris",
    "The new movie is awesome! " * 30,
)


def texts(rows=ROWS, first=-1) -> list[Text]:
    return [Text(0, i, row, first) for i, row in enumerate(rows)]


def saved(folder: pathlib.Path, kind: str, family: str, **fields) -> pathlib.Path:
    config = transformers.AutoConfig.for_model(family, **{**SMALL, **fields})
    model = getattr(transformers, kind).from_config(config, dtype=torch.float32)
    randomize(model)
    model.save_pretrained(folder)
    return folder


def encoder_of(folder, **flags) -> Encoder:
    config = EngineConfig(device="cpu", **flags)
    spec = encoder_spec(config, folder)
    assert spec is not None
    return Encoder(pathlib.Path(folder), spec, config)


def hidden_states(folder, row) -> torch.Tensor:
    model = transformers.AutoModel.from_pretrained(folder).eval()
    with torch.no_grad():
        return model(input_ids=torch.tensor(row[None].astype(np.int64)))[0][0]


@pytest.mark.parametrize("pooling", ["mean", "cls", "last"])
@pytest.mark.parametrize("family", ["bert", "xlm-roberta", "distilbert"])
def test_pooled_vectors_equal_the_hidden_states_of_each_text_alone(tmp_path, family, pooling):
    more = {"dim": 32, "hidden_dim": 48, "n_layers": 2, "n_heads": 4} if family == "distilbert" else {}
    folder = saved(tmp_path, "AutoModel", family, **more)
    found = encoder_of(folder, pooling=pooling).encode(texts())
    for row, vector in zip(ROWS, found, strict=True):
        hidden = hidden_states(folder, row)
        pooled = {"mean": hidden.mean(0), "cls": hidden[0], "last": hidden[-1]}[pooling]
        assert np.abs(vector - torch.nn.functional.normalize(pooled, dim=0).numpy()).max() < 1e-5


def test_a_decoder_embeds_by_its_last_token():
    folder = tiny_llama()
    found = encoder_of(folder, task="embed").encode(texts())
    for row, vector in zip(ROWS, found, strict=True):
        last = hidden_states(folder, row)[-1]
        assert np.abs(vector - torch.nn.functional.normalize(last, dim=0).numpy()).max() < 1e-5


def test_dense_layers_follow_the_pooling(tmp_path):
    from safetensors.torch import save_file

    folder, weight = saved(tmp_path, "AutoModel", "bert"), torch.randn(6, 32)
    for name in ("1_Pooling", "2_Dense"):
        (folder / name).mkdir()
    (folder / "1_Pooling/config.json").write_text(json.dumps({"pooling_mode_cls_token": True}))
    dense = {"in_features": 32, "out_features": 6, "bias": False, "activation_function": "torch.nn.modules.activation.Tanh"}
    (folder / "2_Dense/config.json").write_text(json.dumps(dense))
    save_file({"linear.weight": weight}, folder / "2_Dense/model.safetensors")
    kinds = ("Transformer", ""), ("Pooling", "1_Pooling"), ("Dense", "2_Dense")
    rows = [{"idx": i, "path": path, "type": f"sentence_transformers.models.{kind}"} for i, (kind, path) in enumerate(kinds)]
    (folder / "modules.json").write_text(json.dumps(rows))
    found = encoder_of(folder).encode(texts())
    for row, vector in zip(ROWS, found, strict=True):
        assert np.abs(vector - torch.tanh(weight @ hidden_states(folder, row)[0]).numpy()).max() < 1e-5


@pytest.mark.parametrize("sigmoid", [True, False])
def test_a_cross_encoder_scores_pairs_by_their_token_types(tmp_path, sigmoid):
    own = {} if sigmoid else {"sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}}
    folder = saved(tmp_path, "AutoModelForSequenceClassification", "bert", num_labels=1, **own)
    found = encoder_of(folder).encode(texts(ROWS[1:], first=3))[:, 0]
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder).eval()
    for row, value in zip(ROWS[1:], found, strict=True):
        types = torch.tensor([[0] * 3 + [1] * (len(row) - 3)])
        with torch.no_grad():
            logit = model(input_ids=torch.tensor(row[None].astype(np.int64)), token_type_ids=types).logits[0, 0]
        assert abs(value - float(logit.sigmoid() if sigmoid else logit)) < 1e-5


def test_a_decoder_with_a_head_scores_by_the_last_token_also_where_that_is_the_padding(tmp_path):
    more = {"num_labels": 1, "num_key_value_heads": 2, "pad_token_id": 0}
    folder = saved(tmp_path, "AutoModelForSequenceClassification", "llama", **more)
    rows = [np.array([5, 6, 0], np.int32), np.array([7, 8, 9, 10, 11], np.int32)]
    found = encoder_of(folder).encode(texts(rows))[:, 0]
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder).eval()
    for row, value in zip(rows, found, strict=True):
        with torch.no_grad():
            logit = model.score(model.model(input_ids=torch.tensor(row[None].astype(np.int64)))[0][0, -1])[0]
        assert abs(value - float(logit.sigmoid())) < 1e-5


def test_files_that_lack_a_tensor_are_refused_by_its_name(tmp_path):
    from safetensors.torch import load_file, save_file

    folder = saved(tmp_path, "AutoModel", "bert")
    weights = load_file(folder / "model.safetensors")
    name = "encoder.layer.1.output.dense.weight"
    save_file({k: v for k, v in weights.items() if k != name}, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=name.replace(".", r"\.")):
        encoder_of(folder)


def test_vectors_of_another_width_than_the_files_promise_are_refused(tmp_path):
    folder = saved(tmp_path, "AutoModel", "bert")
    with pytest.raises(ModelError, match="vectors of 31 values, and it gives 32"):
        Encoder(folder, EncoderSpec("embed", 64, 31, "mean"), EngineConfig(device="cpu"))


def test_the_real_models_vectors_equal_the_reference_alone_and_in_batches():
    folder = resolve_model("all-minilm-l6-v2")
    encoder, tokenizer = encoder_of(folder), load_tokenizer(folder)
    reference, words = transformers.AutoModel.from_pretrained(folder).eval(), transformers.AutoTokenizer.from_pretrained(folder)
    rows = [np.array(tokenizer.encode(text), np.int32) for text in SENTENCES]
    together = encoder.encode(texts(rows))
    assert (encoder.spec.max_len, together.shape) == (256, (len(SENTENCES), 384))
    for text, row, vector in zip(SENTENCES, rows, together, strict=True):
        inputs = words(text, return_tensors="pt")
        assert inputs["input_ids"][0].tolist() == row.tolist()
        with torch.no_grad():
            expected = torch.nn.functional.normalize(reference(**inputs)[0].mean(1), dim=1)[0].numpy()
        assert np.abs(vector - expected).max() < 1e-5
        assert np.abs(encoder.encode(texts([row]))[0] - expected).max() < 1e-5
