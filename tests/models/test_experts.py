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
from slipstream.weights import mxfp4
from slipstream.weights.checkpoint import open_checkpoint
from slipstream.weights.dummy import DummyCheckpoint
from slipstream.weights.experts import ExpertShape, read_experts, read_interleaved_experts
from tests.device.groups import Group, request
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


PROMPT = np.random.default_rng(7).integers(3, 300, 48).tolist()
OTHER = np.random.default_rng(8).integers(3, 300, 60).tolist()
SERVED = ("qwen3_moe, with a plain layer", "gpt_oss", "deepseek_v3")


def greedy(group: Group, prompt: list[int], count: int, slot: int = 0) -> list[int]:
    return group.generate([prompt], count, chunk=16, slots=[slot])[0][0]


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("name", SERVED)
def test_a_request_goes_on_after_preemption_offload_and_a_prefix_hit(name, size):
    """Computed again with the tokens that it had given; offloaded, from its pages; and from another request's pages."""
    path = MODELS[name]()
    with Group(path, slots=4, max_len=128) as group:
        expected = greedy(group, PROMPT, 10)
        assert len(set(expected)) > 4
    with Group(path, size, slots=4, max_len=128, host_pages=8) as group:
        assert greedy(group, PROMPT, 4) == expected[:4]
        places, tables = group.pages([0]), range(len(group.limits.tables))
        held = [places[(places[:, 0] == t) & (places[:, 2] < 3)][:, 3].tolist() for t in tables]
        for rank in group.ranks:
            for t in tables:
                rank.offload(t, tuple(held[t]), (4, 0, 2))
        shared = places[places[:, 2] < 2]
        shared[:, 1] = 3
        own = group.pages([3])
        group.init_slot(3, request(3, PROMPT, 30))
        group.launch([(3, 32, 16, True)], np.concatenate([own[own[:, 2] >= 2], shared]))
        assert [int(group.outcome().tokens[0, 0]), *decode(group, 3, 48, 5)] == expected[:6]
        greedy(group, OTHER, 20)  # overwrites the pages
        assert greedy(group, PROMPT + expected[:4], 6, slot=1) == expected[4:]
        target = group.pages([2])
        group.init_slot(2, request(2, PROMPT, 30))
        for rank in group.ranks:
            for t in tables:
                into = target[(target[:, 0] == t) & (target[:, 2] < 3)][:, 3].tolist()
                rank.restore(t, (4, 0, 2), tuple(into))
        group.launch([(2, 47, 1, True)], target)  # the last of the prompt again, whose key and value are there already
        assert [int(group.outcome().tokens[0, 0]), *decode(group, 2, 48, 5)] == expected[:6]


def decode(group: Group, slot: int, start: int, count: int) -> list[int]:
    found = []
    for position in range(start, start + count):
        group.launch([(slot, position, 1, True)])
        found.append(int(group.outcome().tokens[0, 0]))
    return found


def test_mxfp4_is_dequantized_bit_for_bit_as_by_transformers():
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    generator = torch.Generator().manual_seed(0)
    blocks = torch.randint(0, 256, (2, 64, 3, 16), dtype=torch.uint8, generator=generator)
    exponents = torch.randint(0, 255, (2, 64, 3), dtype=torch.uint8, generator=generator)
    for dtype, kind in ((torch.float32, torch.int32), (torch.bfloat16, torch.int16)):
        found = mxfp4.dequantize(blocks, exponents, dtype)
        theirs = convert_moe_packed_tensors(blocks, exponents, dtype=dtype).transpose(1, 2)
        assert torch.equal(found.contiguous().view(kind), theirs.contiguous().view(kind))


def test_packed_experts_of_gpt_oss_are_read_as_plain_ones(tmp_path):
    """Each rank reads only the blocks that its columns lie in, also where they begin within one."""
    from safetensors.torch import save_file

    count, inner, hidden = 3, 96, 64
    generator, prefix, packed, plain = torch.Generator().manual_seed(1), "mlp.experts.", {}, {}
    for name, out, width in (("gate_up_proj", 2 * inner, hidden), ("down_proj", hidden, inner)):
        blocks = torch.randint(0, 256, (count, out, width // 32, 16), dtype=torch.uint8, generator=generator)
        exponents = torch.randint(120, 130, (count, out, width // 32), dtype=torch.uint8, generator=generator)
        packed |= {f"{prefix}{name}_blocks": blocks, f"{prefix}{name}_scales": exponents}
        plain[prefix + name] = mxfp4.dequantize(blocks, exponents, torch.float32).transpose(1, 2).contiguous()
    both = []
    for folder, tensors, method in (("packed", packed, "mxfp4"), ("plain", plain, "")):
        (tmp_path / folder).mkdir()
        save_file(tensors, tmp_path / folder / "model.safetensors")
        more = {"quantization_config": {"quant_method": method}} if method else {}
        (tmp_path / folder / "config.json").write_text(json.dumps(more))
        both.append(open_checkpoint(tmp_path / folder))
    for part in ((0, 96), (0, 40), (40, 70), (96, 96)):
        shape = ExpertShape(count, inner, hidden, part)
        one, other = (read_interleaved_experts(c, prefix, shape, torch.float32) for c in both)
        for a, b in zip(one, other, strict=True):
            assert torch.equal(a.data, b.data), part
    gate_up = read_interleaved_experts(both[1], prefix, ExpertShape(count, inner, hidden, (40, 70)), torch.float32)[0]
    assert torch.equal(gate_up.data[:, :30], plain[prefix + "gate_up_proj"].transpose(1, 2)[:, 80:140:2])


@pytest.mark.parametrize(
    "family, base, fields, said",
    [
        ("GptOss", "gpt", {"swiglu_limit": 5.0}, "swiglu_limit is 5.0; only 7.0"),
        ("GptOss", "gpt", {"experts_per_token": 3}, "experts_per_token is 3 and num_experts_per_tok is 2"),
        ("DeepseekV3", "deep", {"scoring_func": "softmax"}, "scoring_func 'softmax'.*'sigmoid' is"),
        ("DeepseekV3", "deep", {"topk_method": "greedy"}, "topk_method 'greedy'.*noaux_tc"),
        ("DeepseekV3", "deep", {"n_group": 3}, "n_group is 3 .* do not fit 8"),
        ("DeepseekV3", "deep", {"moe_layer_freq": 2}, "moe_layer_freq is 2"),
        ("DeepseekV3", "deep", {"num_key_value_heads": 1}, "num_key_value_heads is 1"),
        ("DeepseekV2", "deep", {"norm_topk_prob": True}, "norm_topk_prob is true"),
    ],
)
def test_settings_of_other_families_are_refused_by_name(family, base, fields, said):
    config = {"architectures": [family + "ForCausalLM"], "vocab_size": 320, "max_position_embeddings": 512}
    config |= {**(GPT_OSS if base == "gpt" else DEEPSEEK), **fields}
    with pytest.raises(ModelError, match=said):
        build(DummyCheckpoint(pathlib.Path("config.json"), config, 0), PlainOps(torch.float32))


@pytest.mark.parametrize(
    "family, base", [("Mixtral", MIXTRAL), ("GptOss", GPT_OSS), ("DeepseekV2", DEEPSEEK), ("DeepseekV3", DEEPSEEK)]
)
def test_every_family_is_made_of_random_weights(family, base):
    config = {"architectures": [family + "ForCausalLM"], "vocab_size": 320, "max_position_embeddings": 512, **base}
    assert build(DummyCheckpoint(pathlib.Path("config.json"), config, 0), PlainOps(torch.float32)).vocab == 320
