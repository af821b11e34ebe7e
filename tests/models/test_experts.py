"""Families with experts: tiny random models against transformers in float32."""

import json
import pathlib

import numpy as np
import pytest
import torch

from slipstream.errors import ModelError
from slipstream.models.registry import build
from slipstream.ops.cpu.ops import PlainOps
from slipstream.shard import Shard
from slipstream.weights.checkpoint import open_checkpoint
from slipstream.weights.dummy import DummyCheckpoint
from slipstream.weights.experts import ExpertShape, read_experts
from tests.helpers import checkpoints
from tests.models.test_golden import reference, run

PROMPTS = [np.random.default_rng(5).integers(3, 300, n).astype(np.int32) for n in (300, 1, 17, 64)]
QWEN = {"hidden_size": 48, "intermediate_size": 100, "moe_intermediate_size": 20, "num_hidden_layers": 3}
QWEN |= {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 16, "num_experts": 6, "num_experts_per_tok": 2}


def tiny(family: str, **fields):
    return checkpoints._folder(family, json.dumps(fields, sort_keys=True))


DEEPSEEK = {"hidden_size": 60, "intermediate_size": 100, "moe_intermediate_size": 20, "num_hidden_layers": 3}
DEEPSEEK |= {"num_attention_heads": 5, "num_key_value_heads": 5, "n_routed_experts": 8, "num_experts_per_tok": 3}
DEEPSEEK |= {"q_lora_rank": 40, "kv_lora_rank": 24, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12}
DEEPSEEK |= {"first_k_dense_replace": 1, "n_group": 4, "topk_group": 2}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 64, "beta_fast": 32.0}
YARN |= {"beta_slow": 1.0}
MIXTRAL = {"hidden_size": 48, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 6}
MIXTRAL |= {"num_key_value_heads": 2, "num_local_experts": 5}
GPT_OSS = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 6, "head_dim": 16}
GPT_OSS |= {"num_key_value_heads": 2, "num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": 16}
GPT_OSS |= {"rope_parameters": {**YARN, "truncate": False}}
MODELS = {
    "mixtral": lambda: tiny("mixtral", **MIXTRAL),
    "mixtral, windows": lambda: tiny("mixtral", **MIXTRAL, sliding_window=16),
    "gpt_oss": lambda: tiny("gpt_oss", **GPT_OSS),
    "deepseek_v3": lambda: tiny("deepseek_v3", **DEEPSEEK, attention_bias=True),
    "deepseek_v3, yarn": lambda: tiny(
        "deepseek_v3",
        **{**DEEPSEEK, "q_lora_rank": None, "rope_interleave": False},
        rope_parameters={**YARN, "mscale": 1.0, "mscale_all_dim": 0.8},
    ),
    "deepseek_v2": lambda: tiny("deepseek_v2", **DEEPSEEK, topk_method="group_limited_greedy", n_shared_experts=2),
    "deepseek_v2, as lite": lambda: tiny(
        "deepseek_v2", **{**DEEPSEEK, "q_lora_rank": None}, rope_parameters={**YARN, "mscale": 0.7, "mscale_all_dim": 0.7}
    ),
    "qwen3_moe, with a plain layer": lambda: tiny("qwen3_moe", **QWEN, norm_topk_prob=True, mlp_only_layers=[1]),
    "qwen3_moe, every second layer, weights not normed": lambda: tiny("qwen3_moe", **QWEN, decoder_sparse_step=2),
}


@pytest.mark.parametrize("name", MODELS)
def test_models_with_experts_equal_transformers(name):
    path = MODELS[name]()
    expected = reference(path, PROMPTS)
    for size, chunk in ((1, 1000), (2, 16), (3, 64)):
        for a, b in zip(run(path, size, chunk, PROMPTS), expected, strict=True):
            assert torch.allclose(a.log_softmax(-1), b.log_softmax(-1), atol=2e-4, rtol=0), (size, chunk)


@pytest.mark.parametrize(
    "fields, said",
    [
        ({"num_experts_per_tok": 7}, "num_experts_per_tok is 7; .* all 6"),
        ({"decoder_sparse_step": 0}, "decoder_sparse_step is 0"),
    ],
)
def test_routing_that_cannot_be_is_refused_by_name(fields, said):
    config = {"architectures": ["Qwen3MoeForCausalLM"], "vocab_size": 320, "max_position_embeddings": 64, **QWEN, **fields}
    with pytest.raises(ModelError, match=said):
        build(DummyCheckpoint(pathlib.Path("config.json"), config, 0), PlainOps(torch.float32))


def test_stacked_experts_are_read_as_those_stored_one_by_one(tmp_path):
    """transformers stacks them in memory; a file may hold either."""
    from safetensors.torch import load_file, save_file

    folder = MODELS["qwen3_moe, with a plain layer"]()
    stored = load_file(folder / "model.safetensors")
    prefix, shape = "model.layers.0.mlp.experts.", (6, 20, 48)
    each = [[stored[f"{prefix}{e}.{name}_proj.weight"] for e in range(6)] for name in ("gate", "up", "down")]
    save_file(
        {
            prefix + "gate_up_proj": torch.stack([torch.cat(pair) for pair in zip(*each[:2], strict=True)]),
            prefix + "down_proj": torch.stack(each[2]),
        },
        tmp_path / "model.safetensors",
    )
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    for part in ((0, 20), (7, 14), (20, 20)):
        one, other = (
            read_experts(open_checkpoint(path), prefix, ExpertShape(*shape, part), torch.float32) for path in (folder, tmp_path)
        )
        for a, b in zip(one, other, strict=True):
            assert torch.equal(a.data, b.data)


def test_random_experts_are_the_same_on_any_number_of_ranks():
    config = {"architectures": ["Qwen3MoeForCausalLM"], "vocab_size": 320, "max_position_embeddings": 64, **QWEN}
    whole = read_experts(
        DummyCheckpoint(pathlib.Path("config.json"), config, 0), "experts.", ExpertShape(6, 20, 48, (0, 20)), torch.float32
    )
    first, last = Shard(0, 2).even(20), Shard(1, 2).even(20)
    parts = [
        read_experts(
            DummyCheckpoint(pathlib.Path("config.json"), config, 0), "experts.", ExpertShape(6, 20, 48, p), torch.float32
        )
        for p in (first, last)
    ]
    gates = torch.cat([p[0].data[:, :10] for p in parts], 1)
    assert torch.equal(gates, whole[0].data[:, :20])
    assert torch.equal(torch.cat([p[1].data for p in parts], 2), whole[1].data)
    build(DummyCheckpoint(pathlib.Path("config.json"), config, 0), PlainOps(torch.float32))
