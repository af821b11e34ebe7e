"""GGUF's names and metadata of families with experts, as Hugging Face's: DeepSeek-V2, DeepSeek-V3 and gpt-oss. Torch-free."""

from collections.abc import Callable
from typing import Any

from slipstream.errors import ModelError

Take = Callable[..., Any]  # a key of the architecture, and what counts where it is absent; it is then known

_SIGMOID = 2  # of llama.cpp's ways to score experts; 1 is a softmax
DEEPSEEK_LAYER = {
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",  # older files; newer ones have its two parts
    "attn_k_b": "self_attn.k_b_proj",
    "attn_v_b": "self_attn.v_b_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.gate_proj",
    "ffn_up_exps": "mlp.experts.up_proj",
    "ffn_down_exps": "mlp.experts.down_proj",
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
    "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj",
    "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",  # whole names, which end otherwise there
}
GPT_OSS_LAYER = {
    "post_attention_norm": "post_attention_layernorm",
    "attn_sinks.weight": "self_attn.sinks",
    "ffn_gate_inp": "mlp.router",
    "ffn_gate_exps": "mlp.experts.gate_proj",
    "ffn_up_exps": "mlp.experts.up_proj",
    "ffn_down_exps": "mlp.experts.down_proj",
}


def deepseek(take: Take, config: dict, experts: int) -> dict:
    """GGUF says that all heads share one key, since that is how llama.cpp computes latent attention."""
    rotated, latent = take("rope.dimension_count"), take("attention.kv_lora_rank")
    keys, values = take("attention.key_length"), take("attention.value_length")
    keys, values = take("attention.key_length_mla", keys), take("attention.value_length_mla", values)
    needed = {"rope.dimension_count": rotated, "attention.key_length": keys, "attention.value_length": values}
    for key, value in needed.items():
        if value is None:
            raise ModelError(f"the metadata lack deepseek2.{key}")
    groups, best = take("expert_group_count", 1) or 1, take("expert_group_used_count", 1) or 1
    sigmoid = take("expert_gating_func") == _SIGMOID
    more = {
        "architectures": ["DeepseekV3ForCausalLM" if sigmoid else "DeepseekV2ForCausalLM"],
        "num_key_value_heads": config["num_attention_heads"],
        "head_dim": rotated,
        "q_lora_rank": take("attention.q_lora_rank") or None,
        "kv_lora_rank": latent,
        "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": keys - rotated,
        "v_head_dim": values,
        "first_k_dense_replace": take("leading_dense_block_count", 0),
        "n_routed_experts": experts,
        "num_experts_per_tok": take("expert_used_count"),
        "n_shared_experts": take("expert_shared_count", 0),
        "moe_intermediate_size": take("expert_feed_forward_length"),
        "routed_scaling_factor": take("expert_weights_scale", 1.0) or 1.0,
        "norm_topk_prob": bool(take("expert_weights_norm", False)),
        "n_group": groups,
        "topk_group": best,
        "topk_method": "noaux_tc" if sigmoid else "group_limited_greedy" if groups > 1 else "greedy",
    }
    if scaling := config.get("rope_scaling"):  # the two are the same in every released model, and GGUF has one of them
        magnitude = 10 * take("rope.scaling.yarn_log_multiplier", 0.0)
        more["rope_scaling"] = scaling | {"mscale": magnitude, "mscale_all_dim": magnitude}
    return more


def gpt_oss(take: Take, config: dict, experts: int) -> dict:
    """Every second layer has the window, and YaRN's bounds are not rounded; GGUF does not say so."""
    more = {
        "num_local_experts": experts,
        "num_experts_per_tok": take("expert_used_count"),
        "intermediate_size": take("expert_feed_forward_length", config["intermediate_size"]),
    }
    if scaling := config.get("rope_scaling"):
        more["rope_scaling"] = scaling | {"truncate": False}
    return more
