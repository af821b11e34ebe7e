"""A checkpoint of which something would be ignored is refused: the error names the file, the key or tensor, and the value."""

import json
import re
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from slipstream.errors import ModelError
from slipstream.models.registry import build
from slipstream.ops.cpu.ops import PlainOps
from slipstream.shard import Shard
from slipstream.weights.checkpoint import open_checkpoint
from tests.device.groups import collectives
from tests.helpers.checkpoints import tiny_llama, tiny_qwen3


@pytest.fixture
def changed(tmp_path):
    """A copy of a tiny checkpoint with other config fields and tensors; None takes one out."""

    def change(config=None, tensors=None, source=None):
        folder = tmp_path / "model"
        shutil.copytree(source or tiny_llama(), folder)
        for file, read, write, fields in (
            ("config.json", lambda p: json.loads(p.read_text()), lambda v, p: p.write_text(json.dumps(v)), config),
            ("model.safetensors", load_file, save_file, tensors),
        ):
            merged = {**read(folder / file), **(fields or {})}
            write({k: v for k, v in merged.items() if v is not None}, folder / file)
        return folder

    return change


def load(folder, size: int = 1):
    sums = collectives(size)
    for rank in range(size):
        build(open_checkpoint(folder), PlainOps(torch.float32, Shard(rank, size), sums[rank]))


@pytest.mark.parametrize(
    "config, tensors, said",
    [
        ({"sliding_window": 128}, None, "LlamaForCausalLM is not known to have.*sliding_window: 128"),
        ({"logit_scale": 0.5, "use_qk_norm": True}, None, "logit_scale: 0.5; use_qk_norm: True"),
        ({"hidden_act": "relu"}, None, "hidden_act 'relu' is not supported; known: silu"),
        ({"rope_parameters": {"rope_type": "default", "scale": 2}}, None, "rope_parameters: scale 2 is not known"),
        ({"vocab_size": None}, None, "the config lacks vocab_size"),
        (
            {"intermediate_size": 208},
            None,
            r"mlp.gate_proj.weight is of shape \[200, 96\].*\[208, 96\] \(intermediate_size 208\)",
        ),
        ({"num_hidden_layers": 3}, None, "there is no tensor model.layers.2.input_layernorm.weight"),
        ({"num_hidden_layers": 1}, None, "tensors that nothing reads.*model.layers.1.* and 4 more"),
        (None, {"model.layers.0.self_attn.q_proj.bias": torch.zeros(96)}, "nothing reads.*layers.0.self_attn.q_proj.bias$"),
        (None, {"model.layers.1.mlp.up_proj.weight": None}, "there is no tensor model.layers.1.mlp.up_proj.weight"),
    ],
)
def test_what_would_be_ignored_or_is_missing_is_refused_by_name(changed, config, tensors, said):
    folder = changed(config, tensors)
    with pytest.raises(ModelError, match=said) as raised:
        load(folder)
    assert re.search(str(folder), str(raised.value))


@pytest.mark.parametrize("size", [1, 3])
def test_what_changes_nothing_is_taken(changed, size):
    """Also on ranks that read no part of the biases that one rank adds."""
    source = tiny_llama(attention_bias=True, mlp_bias=True)
    config = {"use_cache": True, "bos_token_id": 1, "attention_dropout": 0.1, "sliding_window": None, "_name_or_path": "x"}
    extra = {"model.vision_tower.x": torch.zeros(2), "mtp.y": torch.zeros(2)}
    load(changed(config, {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8), **extra}, source), size)
    load(tiny_qwen3(), size)


def test_an_output_layer_beside_a_tied_embedding_counts_where_it_differs(changed):
    source = tiny_llama(tie_word_embeddings=True)
    embedding = load_file(source / "model.safetensors")["model.embed_tokens.weight"]
    hidden = torch.randn(2, 96)
    for stored, head in ((None, embedding), (embedding.clone(), embedding), (embedding * 2, embedding * 2)):
        folder = changed(tensors={"lm_head.weight": stored}, source=source)
        model = build(open_checkpoint(folder), PlainOps(torch.float32))
        assert torch.allclose(model.ops.linear(hidden, model.head, None), hidden @ head.T, atol=1e-4)
        shutil.rmtree(folder)
