"""The names of GGUF as names of Hugging Face: the config and the tensors. Values in, values out; torch-free.

Follows llama.cpp's `convert_hf_to_gguf.py` backwards.
"""

import math
import re
from typing import Any

from slipstream.errors import ModelError
from slipstream.weights.gguf_experts import DEEPSEEK_LAYER, GPT_OSS_LAYER, Take, deepseek, gpt_oss
from slipstream.weights.gguf_file import GGUFFile

_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3moe": "Qwen3MoeForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3": "Gemma3ForCausalLM",
    "gpt-oss": "GptOssForCausalLM",
    "deepseek2": "DeepseekV2ForCausalLM",  # and V3, which scores experts otherwise
}
_GEMMA = ("gemma2", "gemma3")
_MIXTRAL = "MixtralForCausalLM"  # stored as `llama` with experts
_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


_GEMMA_LAYER = {
    "ffn_norm": "pre_feedforward_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
# The experts of a layer are one tensor [experts, out, in] here, and one tensor each there.
_EXPERTS = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.gate_proj",
    "ffn_up_exps": "mlp.experts.up_proj",
    "ffn_down_exps": "mlp.experts.down_proj",
}
_MIXTRAL_EXPERTS = {
    "ffn_gate_inp": "block_sparse_moe.gate",
    "ffn_gate_exps": "block_sparse_moe.experts.w1",
    "ffn_up_exps": "block_sparse_moe.experts.w3",
    "ffn_down_exps": "block_sparse_moe.experts.w2",
}
_OWN_LAYER = {
    "llama": _MIXTRAL_EXPERTS,
    "gpt-oss": GPT_OSS_LAYER,
    "deepseek2": DEEPSEEK_LAYER,
    **dict.fromkeys(_GEMMA, _GEMMA_LAYER),
}
_NO_WEIGHTS = ("rope_freqs.weight",)  # read for the config


def hf_names(file: GGUFFile) -> dict[str, str]:
    """Hugging Face's name of each tensor to GGUF's; a tensor that is not known keeps GGUF's name, so that nothing reads it."""
    arch = file.metadata.get("general.architecture", "")
    own = {
        "llama": _MIXTRAL_EXPERTS,
        "gpt-oss": GPT_OSS_LAYER,
        "deepseek2": DEEPSEEK_LAYER,
        **dict.fromkeys(_GEMMA, _GEMMA_LAYER),
    }
    layer = _LAYER | own.get(arch, _EXPERTS)
    return {_hf_name(name, layer): name for name in file.tensors if name not in _NO_WEIGHTS}


def _hf_name(name: str, layer: dict[str, str]) -> str:
    """`blk.3.attn_q.weight` -> `model.layers.3.self_attn.q_proj.weight`."""
    stem, _, kind = name.rpartition(".")
    if stem in _TOP:
        return f"{_TOP[stem]}.{kind}"
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)", stem)
    if match and f"{match[2]}.{kind}" in layer:
        return f"model.layers.{match[1]}.{layer[f'{match[2]}.{kind}']}"
    if match and match[2] in layer:
        return f"model.layers.{match[1]}.{layer[match[2]]}.{kind}"
    return name


def norms_hold_one(file: GGUFFile) -> bool:
    """Whether norms are stored as 1 + w."""
    return file.metadata.get("general.architecture") in _GEMMA


def hf_config(file: GGUFFile) -> dict:
    """config.json's content from the metadata. Raises ModelError naming an architecture that is not known, or a missing key.

    Keys of the architecture that are not known here keep GGUF's names. A model refuses them as it does those of a config.json.
    """
    meta = file.metadata
    arch = meta.get("general.architecture", "")
    if arch not in _ARCHITECTURES:
        known = ", ".join(_ARCHITECTURES)
        raise ModelError(f"{file.path}: GGUF files of {arch!r} are not supported (known: {known}); safetensors of it may be")
    left = {key: value for key, value in meta.items() if key.startswith(f"{arch}.")}

    def take(key: str, default=None):
        return left.pop(f"{arch}.{key}", default)

    def need(key: str):
        if f"{arch}.{key}" not in left:
            raise ModelError(f"{file.path}: the metadata lack {arch}.{key}")
        return one(key, take(key))

    def one(key: str, value: Any) -> Any:
        """A number that is the same for all layers."""
        if isinstance(value, list) and len(set(value)) != 1:
            raise ModelError(f"{file.path}: {arch}.{key} differs between layers ({value}), which is not supported")
        return value[0] if isinstance(value, list) else value

    hidden, heads = need("embedding_length"), need("attention.head_count")
    if "token_embd.weight" not in file.tensors:
        raise ModelError(f"{file.path}: there is no token_embd.weight")
    config: dict[str, Any] = {
        "architectures": [_ARCHITECTURES[arch]],
        "model_type": arch,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": need("feed_forward_length"),
        "num_hidden_layers": need("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": one("attention.head_count_kv", take("attention.head_count_kv", heads)),
        "head_dim": left.get(f"{arch}.attention.key_length", hidden // heads),
        "max_position_embeddings": need("context_length"),
        "rms_norm_eps": _round(need("attention.layer_norm_rms_epsilon")),
        "rope_theta": float(take("rope.freq_base", 10000.0)),
        "vocab_size": file.tensors["token_embd.weight"].shape[0],
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in file.tensors,
        "bos_token_id": meta.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": eos_ids(meta),
        "pad_token_id": meta.get("tokenizer.ggml.padding_token_id"),
        "torch_dtype": "float32",
    }
    scaling = _rope_scaling(file, take, config)
    if scaling:
        config["rope_scaling"] = scaling
    if arch != "deepseek2":
        _head_sizes(arch, take, config, left)
    if window := take("attention.sliding_window"):
        config["sliding_window"] = window
    take("vocab_size")
    if arch in _GEMMA:
        config |= _gemma(arch, take, config)
    if experts := take("expert_count"):
        config |= _experts(arch, experts, take, config)
    return config | left


def _head_sizes(arch: str, take: Take, config: dict, left: dict) -> None:
    """Heads of which a part is rotated; a file whose values are not as wide as its keys keeps that key, which nothing reads."""
    take("attention.key_length")
    rotated, values = take("rope.dimension_count"), take("attention.value_length", config["head_dim"])
    if rotated and rotated != config["head_dim"]:
        config["partial_rotary_factor"] = rotated / config["head_dim"]
    if values != config["head_dim"]:
        left[f"{arch}.attention.value_length"] = values


def _gemma(arch: str, take: Take, config: dict) -> dict:
    """What Gemma's configs have more. GGUF has no key for the scale of scores, which two models have of their own."""
    own_scale = (arch, config["num_hidden_layers"]) in (("gemma2", 46), ("gemma3", 62))
    more = {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": config["hidden_size"] // config["num_attention_heads"] if own_scale else config["head_dim"],
        "attn_logit_softcapping": take("attn_logit_softcapping"),
        "final_logit_softcapping": take("final_logit_softcapping"),
    }
    if local := take("rope.freq_base_swa"):
        more["rope_local_base_freq"] = float(local)
    pattern = take("attention.sliding_window_pattern")
    if isinstance(pattern, list):
        more["layer_types"] = ["sliding_attention" if windowed else "full_attention" for windowed in pattern]
    elif pattern:
        more["sliding_window_pattern"] = pattern
    return more


def _experts(arch: str, experts: int, take: Take, config: dict) -> dict:
    if arch == "deepseek2":
        return deepseek(take, config, experts)
    if arch == "gpt-oss":
        return gpt_oss(take, config, experts)
    used = take("expert_used_count")
    if arch == "llama":
        return {"architectures": [_MIXTRAL], "num_local_experts": experts, "num_experts_per_tok": used}
    inner = take("expert_feed_forward_length")
    return {"num_experts": experts, "num_experts_per_tok": used, "moe_intermediate_size": inner, "norm_topk_prob": True}


def eos_ids(meta: dict) -> list[int]:
    """The ids that end an answer: end of text, end of turn, end of message, as far as the metadata name them."""
    keys = ("eos_token_id", "eot_token_id", "eom_token_id")
    return list(dict.fromkeys(meta[f"tokenizer.ggml.{k}"] for k in keys if f"tokenizer.ggml.{k}" in meta))


def _round(value: float) -> float:
    """The decimal that was meant by a float32 (1e-05, not 9.999999747378752e-06)."""
    return float(f"{value:.7g}")


def _rope_scaling(file: GGUFFile, take: Take, config: dict) -> dict | None:
    kind, factor = take("rope.scaling.type"), take("rope.scaling.factor")
    original = take("rope.scaling.original_context_length")
    take("rope.scaling.finetuned")
    if kind not in (None, "none"):
        scaling = {"rope_type": kind, "factor": float(factor or 1.0)}
        if original:
            scaling["original_max_position_embeddings"] = original
        return scaling
    if "rope_freqs.weight" in file.tensors:
        return _llama3_scaling(file, config)
    return None


def _llama3_scaling(file: GGUFFile, config: dict) -> dict:
    """Llama 3's scaling from the divisors that the converter stored: found by trying the released values, refused otherwise."""
    stored = file.raw("rope_freqs.weight").reshape(-1).view("<f4").tolist()
    for original in (8192, 4096, 2048):
        scaling = {
            "rope_type": "llama3",
            "factor": _round(max(stored)),
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": original,
        }
        if all(math.isclose(a, b, rel_tol=1e-3) for a, b in zip(stored, _llama3_divisors(scaling, config), strict=True)):
            return scaling
    raise ModelError(f"{file.path}: rope_freqs.weight holds a scaling of positions that is not known (Llama 3's is)")


def _llama3_divisors(scaling: dict, config: dict) -> list[float]:
    dim, divisors = config["head_dim"], []
    low, high, factor = scaling["low_freq_factor"], scaling["high_freq_factor"], scaling["factor"]
    original = scaling["original_max_position_embeddings"]
    for i in range(0, dim, 2):
        wavelength = 2 * math.pi * config["rope_theta"] ** (i / dim)
        if wavelength < original / high:
            divisors.append(1.0)
        elif wavelength > original / low:
            divisors.append(factor)
        else:
            smooth = (original / wavelength - low) / (high - low)
            divisors.append(1 / ((1 - smooth) / factor + smooth))
    return divisors
