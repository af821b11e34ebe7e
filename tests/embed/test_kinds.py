"""What a model is for, by its files and flags; what cannot be run right is refused by name."""

import json

import pytest

from slipstream.config import EngineConfig
from slipstream.embed.kinds import EncoderSpec, encoder_spec
from slipstream.errors import ConfigError, ModelError

BERT = {"architectures": ["BertModel"], "hidden_size": 8, "max_position_embeddings": 64, "model_type": "bert"}
CROSS = {**BERT, "architectures": ["BertForSequenceClassification"], "id2label": {"0": "LABEL_0"}}
LLAMA = {**BERT, "architectures": ["LlamaForCausalLM"], "model_type": "llama"}
POOLING = {"word_embedding_dimension": 8, "pooling_mode_cls_token": False, "pooling_mode_mean_tokens": True}


def folder_of(path, config, kinds=(), pooling=POOLING, **files):
    (path / "config.json").write_text(json.dumps(config))
    if kinds:
        rows = [
            {"idx": i, "name": str(i), "path": "" if not i else f"{i}_{k}", "type": f"st.models.{k}"}
            for i, k in enumerate(kinds)
        ]
        (path / "modules.json").write_text(json.dumps(rows))
        (path / "1_Pooling").mkdir(exist_ok=True)
        (path / "1_Pooling/config.json").write_text(json.dumps(pooling))
    for name, content in files.items():
        (path / f"{name}.json").write_text(json.dumps(content))
    return path


def spec(path, config, kinds=(), pooling=POOLING, flags=None, **files):
    return encoder_spec(EngineConfig(**(flags or {})), folder_of(path, config, kinds, pooling, **files))


def test_sentence_transformers_files_decide(tmp_path):
    kinds = ("Transformer", "Pooling", "Normalize")
    found = spec(tmp_path, LLAMA, kinds, sentence_bert_config={"max_seq_length": 32})
    assert found == EncoderSpec("embed", 32, 8, "mean", normalize=True)
    last = {"pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": False}
    assert spec(tmp_path, LLAMA, kinds[:2], last) == EncoderSpec("embed", 32, 8, "last")
    assert spec(tmp_path, LLAMA, kinds[:2], {"pooling_mode": "cls"}).pooling == "cls"


def test_dense_modules_set_the_width(tmp_path):
    (tmp_path / "2_Dense").mkdir()
    (tmp_path / "2_Dense/config.json").write_text(json.dumps({"in_features": 8, "out_features": 5}))
    found = spec(tmp_path, BERT, ("Transformer", "Pooling", "Dense", "Normalize"))
    assert (found.width, found.dense) == (5, ("2_Dense",))


@pytest.mark.parametrize("name", ["LlamaForCausalLM", "GPT2LMHeadModel", "T5ForConditionalGeneration", ""])
def test_other_models_generate(tmp_path, name):
    assert spec(tmp_path, {**BERT, "architectures": [name] if name else None}) is None


def test_without_modules_the_architecture_decides(tmp_path):
    assert spec(tmp_path, BERT) == EncoderSpec("embed", 64, 8, "mean", normalize=True)
    assert spec(tmp_path, {**BERT, "architectures": ["BertForMaskedLM"]}).task == "embed"
    assert spec(tmp_path, CROSS) == EncoderSpec("score", 64, 1, sigmoid=True)
    assert (
        spec(tmp_path, {**CROSS, "sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}}).sigmoid
        is False
    )


def test_the_task_and_the_pooling_can_be_given(tmp_path):
    assert spec(tmp_path, LLAMA, flags={"task": "embed"}).pooling == "last"
    assert spec(tmp_path, LLAMA, flags={"task": "embed", "pooling": "mean"}).pooling == "mean"
    assert spec(tmp_path, BERT, flags={"task": "generate"}) is None


def test_positions_that_begin_after_the_padding_leave_fewer_tokens(tmp_path):
    roberta = {**BERT, "model_type": "xlm-roberta", "max_position_embeddings": 514, "pad_token_id": 1}
    assert spec(tmp_path, roberta).max_len == 512
    assert spec(tmp_path, roberta, flags={"max_model_len": 100}).max_len == 100


@pytest.mark.parametrize(
    ("config", "kinds", "pooling", "flags", "error", "says"),
    [
        (BERT, ("Transformer", "Pooling"), {"pooling_mode_max_tokens": True}, {}, ModelError, "pooling by max"),
        (BERT, ("Transformer", "Pooling"), {**POOLING, "pooling_mode_cls_token": True}, {}, ModelError, "cls, mean"),
        (BERT, ("Transformer", "Pooling", "WeightedLayerPooling"), POOLING, {}, ModelError, "WeightedLayerPooling"),
        (BERT, ("Transformer",), POOLING, {}, ModelError, "no Pooling"),
        ({**CROSS, "id2label": {"0": "a", "1": "b"}}, (), POOLING, {}, ModelError, "2 labels"),
        ({**CROSS, "sentence_transformers": {"activation_fn": "torch.nn.Tanh"}}, (), POOLING, {}, ModelError, "torch.nn.Tanh"),
        ({**BERT, "max_position_embeddings": None}, (), POOLING, {}, ModelError, "--max-model-len"),
        (BERT, (), POOLING, {"max_model_len": 65}, ConfigError, "64 positions"),
        (BERT, (), POOLING, {"task": "score"}, ConfigError, "classification head"),
        (CROSS, (), POOLING, {"pooling": "cls"}, ConfigError, "--pooling"),
        (LLAMA, (), POOLING, {"pooling": "cls"}, ConfigError, "--task embed"),
        (BERT, (), POOLING, {"tensor_parallel_size": 2}, ConfigError, "--tensor-parallel-size 2"),
        (BERT, (), POOLING, {"device": "sim"}, ConfigError, "--device sim"),
        (BERT, (), POOLING, {"load_format": "dummy"}, ConfigError, "--load-format dummy"),
    ],
)  # fmt: skip
def test_what_would_give_wrong_results_is_refused_by_name(tmp_path, config, kinds, pooling, flags, error, says):
    with pytest.raises(error, match=says):
        spec(tmp_path, config, kinds, pooling, flags)


@pytest.mark.parametrize("flags", [{"task": "score"}, {"task": "embed"}, {"pooling": "cls"}])
def test_a_gguf_file_is_no_encoder(tmp_path, flags):
    assert encoder_spec(EngineConfig(), tmp_path / "m.gguf") is None
    with pytest.raises(ConfigError, match="--task|--pooling"):
        encoder_spec(EngineConfig(**flags), tmp_path / "m.gguf")


def test_lowercasing_before_the_tokenizer_is_refused(tmp_path):
    with pytest.raises(ModelError, match="do_lower_case"):
        spec(tmp_path, BERT, sentence_bert_config={"do_lower_case": True})
