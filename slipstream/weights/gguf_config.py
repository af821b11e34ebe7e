"""The names of GGUF as names of Hugging Face: the config and the tensors. Values in, values out; torch-free.

Follows llama.cpp's `convert_hf_to_gguf.py` backwards.
"""

import math
import re

from slipstream.errors import ModelError
from slipstream.weights.gguf_file import GGUFFile

_ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
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


def hf_name(name: str) -> str | None:
    """`blk.3.attn_q.weight` -> `model.layers.3.self_attn.q_proj.weight`; None for rope_freqs, which is not a weight."""
    stem, _, kind = name.rpartition(".")
    if stem in _TOP:
        return f"{_TOP[stem]}.{kind}"
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)", stem)
    if match and match[2] in _LAYER:
        return f"model.layers.{match[1]}.{_LAYER[match[2]]}.{kind}"
    return None


def hf_config(file: GGUFFile) -> dict:
    """config.json's content from the metadata. Raises ModelError naming a key that is missing.

    An unknown architecture keeps GGUF's name in `architectures`, so that the models' registry refuses it by that name.
    """
    meta = file.metadata
    arch = meta.get("general.architecture", "")

    def need(key: str):
        if f"{arch}.{key}" not in meta:
            raise ModelError(f"{file.path}: the metadata lack {arch}.{key}")
        return meta[f"{arch}.{key}"]

    hidden, heads = need("embedding_length"), need("attention.head_count")
    if "token_embd.weight" not in file.tensors:
        raise ModelError(f"{file.path}: there is no token_embd.weight")
    config = {
        "architectures": [_ARCHITECTURES.get(arch, arch)],
        "model_type": arch,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": need("feed_forward_length"),
        "num_hidden_layers": need("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": meta.get(f"{arch}.attention.head_count_kv", heads),
        "head_dim": meta.get(f"{arch}.attention.key_length", hidden // heads),
        "max_position_embeddings": need("context_length"),
        "rms_norm_eps": _round(need("attention.layer_norm_rms_epsilon")),
        "rope_theta": float(meta.get(f"{arch}.rope.freq_base", 10000.0)),
        "vocab_size": file.tensors["token_embd.weight"].shape[0],
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in file.tensors,
        "bos_token_id": meta.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": eos_ids(meta),
        "pad_token_id": meta.get("tokenizer.ggml.padding_token_id"),
        "torch_dtype": "float32",
    }
    scaling = _rope_scaling(file, arch, config)
    if scaling:
        config["rope_scaling"] = scaling
    return config


def eos_ids(meta: dict) -> list[int]:
    """The ids that end an answer: end of text, end of turn, end of message, as far as the metadata name them."""
    keys = ("eos_token_id", "eot_token_id", "eom_token_id")
    return list(dict.fromkeys(meta[f"tokenizer.ggml.{k}"] for k in keys if f"tokenizer.ggml.{k}" in meta))


def _round(value: float) -> float:
    """The decimal that was meant by a float32 (1e-05, not 9.999999747378752e-06)."""
    return float(f"{value:.7g}")


def _rope_scaling(file: GGUFFile, arch: str, config: dict) -> dict | None:
    meta = file.metadata
    kind = meta.get(f"{arch}.rope.scaling.type")
    if kind in ("linear", "yarn"):
        scaling = {"rope_type": kind, "factor": float(meta[f"{arch}.rope.scaling.factor"])}
        original = meta.get(f"{arch}.rope.scaling.original_context_length")
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
