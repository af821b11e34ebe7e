"""GGUF files of families with experts: written by the gguf package's names from a tiny model, they give that model's logits."""

import json
import re

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tests.models.test_experts import DEEPSEEK, GPT_OSS, MODELS, YARN, tiny
from tests.models.test_golden import run

PROMPTS = [np.random.default_rng(5).integers(3, 300, n).astype(np.int32) for n in (70, 17)]


def gpt_oss_tensors(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    found = {}
    for name, tensor in tensors.items():
        if name.endswith("gate_up_proj"):
            tensor = tensor.transpose(1, 2)
            found |= {name.replace("gate_up", n) + ".weight": tensor[:, i::2] for i, n in enumerate(("gate", "up"))}
        elif name.endswith("gate_up_proj_bias"):
            found |= {
                name.replace("gate_up_proj_bias", f"{n}_proj.bias"): tensor[:, i::2] for i, n in enumerate(("gate", "up"))
            }
        elif name.endswith("down_proj"):
            found[name + ".weight"] = tensor.transpose(1, 2)
        else:
            found[name.replace("down_proj_bias", "down_proj.bias").replace("sinks", "sinks.weight")] = tensor
    return found


def deepseek_tensors(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    found, experts = {}, {}
    for name, tensor in tensors.items():
        if match := re.fullmatch(r"(.*experts)\.\d+\.(.*)", name):
            experts.setdefault(f"{match[1]}.{match[2]}", []).append(tensor)
        elif "kv_b_proj" in name:
            parts = tensor.view(5, 28, 24).split([16, 12], 1)
            found[name.replace("kv_b", "k_b")], found[name.replace("kv_b", "v_b")] = parts[0].transpose(1, 2), parts[1]
        else:
            found[name.replace("e_score_correction_bias", "e_score_correction.bias")] = tensor
    return found | {name: torch.stack(each) for name, each in experts.items()}


def gpt_oss_keys(w: gguf.GGUFWriter) -> None:
    w.add_head_count_kv(2)
    w.add_key_length(16)
    w.add_value_length(16)
    w.add_sliding_window(16)
    w.add_expert_count(5)
    w.add_expert_used_count(2)
    w.add_expert_feed_forward_length(96)


def deepseek_keys(w: gguf.GGUFWriter, q_rank: int | None, groups: int) -> None:
    w.add_head_count_kv(1)
    w.add_key_length(24 + 8)
    w.add_value_length(24)
    w.add_key_length_mla(24)
    w.add_value_length_mla(12)
    w.add_rope_dimension_count(8)
    w.add_kv_lora_rank(24)
    if q_rank:
        w.add_q_lora_rank(q_rank)
    w.add_leading_dense_block_count(1)
    w.add_expert_count(8)
    w.add_expert_used_count(3)
    w.add_expert_feed_forward_length(20)
    if groups > 1:
        w.add_expert_group_count(groups)
        w.add_expert_group_used_count(2)


def deepseek_v3_keys(w: gguf.GGUFWriter) -> None:
    deepseek_keys(w, 40, 4)
    w.add_expert_shared_count(1)
    w.add_expert_weights_scale(2.5)
    w.add_expert_weights_norm(True)
    w.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)


def deepseek_v2_keys(w: gguf.GGUFWriter) -> None:
    deepseek_keys(w, None, 1)
    w.add_expert_shared_count(2)
    w.add_rope_scaling_yarn_log_mul(0.1 * 0.7)


FAMILIES = {
    "gpt_oss": (MODELS["gpt_oss"], gguf.MODEL_ARCH.GPT_OSS, GPT_OSS, gpt_oss_tensors, gpt_oss_keys, True),
    "deepseek_v3": (
        lambda: tiny("deepseek_v3", **DEEPSEEK), gguf.MODEL_ARCH.DEEPSEEK2, DEEPSEEK, deepseek_tensors, deepseek_v3_keys, False,
    ),
    "deepseek_v2, as lite": (
        MODELS["deepseek_v2, as lite"], gguf.MODEL_ARCH.DEEPSEEK2, DEEPSEEK, deepseek_tensors, deepseek_v2_keys, True,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FAMILIES)
def test_a_gguf_file_gives_the_logits_of_the_model_that_it_was_made_of(name, tmp_path):
    make, arch, sizes, convert, add_keys, yarn = FAMILIES[name]
    folder, file = make(), tmp_path / "model.gguf"
    config = json.loads((folder / "config.json").read_text())
    writer = gguf.GGUFWriter(file, gguf.MODEL_ARCH_NAMES[arch])
    writer.add_block_count(sizes["num_hidden_layers"])
    writer.add_context_length(512)
    writer.add_embedding_length(sizes["hidden_size"])
    writer.add_feed_forward_length(sizes["intermediate_size"])
    writer.add_head_count(sizes["num_attention_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(10000.0)
    if yarn:
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(YARN["factor"])
        writer.add_rope_scaling_orig_ctx_len(YARN["original_max_position_embeddings"])
    add_keys(writer)
    names = gguf.get_tensor_name_map(arch, sizes["num_hidden_layers"])
    for hf, tensor in convert(load_file(folder / "model.safetensors")).items():
        stored = names.get_name(hf, try_suffixes=(".weight", ".bias"))
        assert stored, hf
        writer.add_tensor(stored, np.ascontiguousarray(tensor.float().numpy()))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    expected = run(folder, 1, 1000, PROMPTS)
    for size in (1, 2):
        for a, b in zip(run(file, size, 64, PROMPTS), expected, strict=True):
            assert torch.allclose(a.log_softmax(-1), b.log_softmax(-1), atol=2e-4, rtol=0), size
