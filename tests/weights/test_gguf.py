"""GGUF files: the real one against what transformers reads, and small written ones for what it does not have."""

import hashlib
import json
import pathlib
import struct

import numpy as np
import pytest
import torch

from slipstream.errors import ModelError
from slipstream.weights.checkpoint import open_checkpoint
from slipstream.weights.dequant import dequantize
from slipstream.weights.gguf_file import GGUFFile
from tests.helpers.checkpoints import smollm2

DATA = pathlib.Path(__file__).parents[1] / "data"
HIDDEN, HEADS, KEYS, INNER, VOCAB = 64, 4, 2, 96, 40


def write_gguf(path, arch="llama", *, extra=(), tensors=None, qtype=None):
    """A one-layer model in GGUF's own names, and the float32 arrays it was made from."""
    import gguf

    qtype = gguf.GGMLQuantizationType.F32 if qtype is None else qtype
    rng = np.random.default_rng(0)
    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(1)
    writer.add_context_length(256)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KEYS)
    writer.add_layer_norm_rms_eps(1e-5)
    for key, value in extra:
        add = {float: writer.add_float32, int: writer.add_uint32, str: writer.add_string, list: writer.add_array}
        add[type(value)](key, value)
    kv = HIDDEN // HEADS * KEYS
    shapes = {
        "token_embd": (VOCAB, HIDDEN),
        "blk.0.attn_q": (HIDDEN, HIDDEN),
        "blk.0.attn_k": (kv, HIDDEN),
        "blk.0.ffn_down": (HIDDEN, INNER),
    }
    arrays = {f"{name}.weight": rng.standard_normal(shape, dtype=np.float32) for name, shape in shapes.items()}
    arrays |= tensors or {}
    for name, array in arrays.items():
        kind = qtype if array.ndim > 1 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(name, gguf.quants.quantize(array, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return arrays


def test_the_real_file_equals_what_transformers_loads():
    checkpoint = open_checkpoint(smollm2())
    reference = json.loads((DATA / "smollm2_weights.json").read_text())["sha256"]
    for name, digest in reference.items():
        assert hashlib.sha256(checkpoint.tensor(name).numpy().tobytes()).hexdigest() == digest, name


def test_the_real_files_config():
    config = open_checkpoint(smollm2()).config
    expected = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "max_position_embeddings": 8192,
        "vocab_size": 49152,
        "rms_norm_eps": 1e-5,
        "rope_theta": 100000.0,
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": [2],
    }
    assert {k: config[k] for k in expected} == expected


@pytest.mark.parametrize("name", ["model.layers.3.self_attn.q_proj.weight", "model.layers.7.mlp.down_proj.weight"])
def test_a_part_equals_that_part_of_the_whole(name):
    checkpoint = open_checkpoint(smollm2())
    whole = checkpoint.tensor(name)
    for rows, cols in [((0, 64), None), ((64, 192), (33, 100)), (None, (1, 2)), ((575, 576), (0, 576)), ((5, 5), None)]:
        r, c = slice(*(rows or (None, None))), slice(*(cols or (None, None)))
        part = checkpoint.tensor(name, rows=rows, cols=cols)
        assert torch.equal(part, whole[r, c]) and part.is_contiguous()


def test_rotary_rows_of_llama_are_put_back_and_those_of_qwen_left(tmp_path):
    for arch in ("llama", "qwen3"):
        arrays = write_gguf(tmp_path / f"{arch}.gguf", arch)
        checkpoint = open_checkpoint(tmp_path / f"{arch}.gguf")
        for short, heads in (("q", HEADS), ("k", KEYS)):
            stored = arrays[f"blk.0.attn_{short}.weight"]
            if arch == "llama":  # llama.cpp: [heads, 2, half] -> [heads, half, 2]
                stored = stored.reshape(heads, -1, 2, HIDDEN).swapaxes(1, 2).reshape(stored.shape)
            read = checkpoint.tensor(f"model.layers.0.self_attn.{short}_proj.weight")
            assert np.array_equal(read.numpy(), stored)


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_every_type_is_dequantized_as_the_gguf_package_does(kind):
    import gguf

    qtype = gguf.GGMLQuantizationType[kind]
    raw = gguf.quants.quantize(np.random.default_rng(1).standard_normal((7, 96), dtype=np.float32), qtype).view(np.uint8)
    assert np.array_equal(dequantize(raw, int(qtype)).numpy(), gguf.quants.dequantize(raw, qtype))


def test_k_quants_go_through_the_package():
    import gguf

    raw = np.random.default_rng(1).integers(0, 60, (3, 144 * 2), dtype=np.uint8)
    qtype = gguf.GGMLQuantizationType.Q4_K
    np.testing.assert_array_equal(dequantize(raw, int(qtype)).numpy(), gguf.quants.dequantize(raw, qtype))


def test_llama3_scaling_is_found_from_its_divisors(tmp_path):
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaling = {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling |= {"original_max_position_embeddings": 8192, "rope_theta": 500000.0}
    config = LlamaConfig(hidden_size=HIDDEN, num_attention_heads=HEADS, rope_parameters=scaling, max_position_embeddings=131072)
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    plain = 1.0 / 500000.0 ** (torch.arange(0, 16, 2).float() / 16)
    divisors = {"rope_freqs.weight": (plain / scaled).numpy()}
    write_gguf(tmp_path / "m.gguf", extra=[("llama.rope.freq_base", 500000.0)], tensors=divisors)
    assert open_checkpoint(tmp_path / "m.gguf").config["rope_parameters"] == scaling
    write_gguf(tmp_path / "n.gguf", tensors={"rope_freqs.weight": np.full(8, 3.0, np.float32)})
    with pytest.raises(ModelError, match="rope_freqs"):
        open_checkpoint(tmp_path / "n.gguf")


def config_of(path, keys) -> dict:
    config = open_checkpoint(path).config
    return {key: config.get(key) for key in keys}


def test_gemmas_config_names_and_norms(tmp_path):
    norms = {f"blk.0.{n}.weight": np.full(HIDDEN, 1.5, np.float32) for n in ("attn_norm", "post_attention_norm", "ffn_norm")}
    extra = [("gemma3.attention.sliding_window", 128), ("gemma3.rope.freq_base", 1e6), ("gemma3.rope.scaling.type", "linear")]
    extra += [("gemma3.rope.scaling.factor", 8.0), ("gemma3.attention.key_length", 24), ("gemma3.attention.value_length", 24)]
    write_gguf(tmp_path / "m.gguf", "gemma3", extra=extra, tensors=norms)
    expected = {
        "architectures": ["Gemma3ForCausalLM"],
        "hidden_activation": "gelu_pytorch_tanh",
        "sliding_window": 128,
        "head_dim": 24,
        "query_pre_attn_scalar": 24,
        "rope_parameters": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "final_logit_softcapping": None,
        "gemma3.attention.value_length": None,
    }
    assert config_of(tmp_path / "m.gguf", expected) == expected
    checkpoint = open_checkpoint(tmp_path / "m.gguf")
    for name in ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm"):
        assert checkpoint.tensor(f"model.layers.0.{name}.weight").tolist() == [0.5] * HIDDEN
    extra = [("gemma2.attention.sliding_window_pattern", [True, False]), ("gemma2.attn_logit_softcapping", 50.0)]
    write_gguf(tmp_path / "n.gguf", "gemma2", extra=extra)
    expected = {"layer_types": ["sliding_attention", "full_attention"], "attn_logit_softcapping": 50.0}
    assert config_of(tmp_path / "n.gguf", expected) == expected


EXPERTS = 4


@pytest.mark.parametrize(
    "arch, gate, down",
    [
        ("qwen3moe", "mlp.experts{}.gate_proj", "mlp.experts{}.down_proj"),
        ("llama", "block_sparse_moe.experts{}.w1", "block_sparse_moe.experts{}.w2"),
    ],
)
def test_experts_are_read_together_in_part_and_one_by_one(tmp_path, arch, gate, down):
    import gguf

    rng = np.random.default_rng(3)
    shapes = {"ffn_gate_exps": (EXPERTS, INNER, HIDDEN), "ffn_down_exps": (EXPERTS, HIDDEN, INNER)}
    tensors = {f"blk.0.{n}.weight": rng.standard_normal(s, dtype=np.float32) for n, s in shapes.items()}
    extra = [(f"{arch}.expert_count", EXPERTS), (f"{arch}.expert_used_count", 2)]
    extra += [("qwen3moe.expert_feed_forward_length", INNER)] if arch == "qwen3moe" else []
    kind = gguf.GGMLQuantizationType.Q8_0
    write_gguf(tmp_path / "m.gguf", arch, extra=extra, tensors=tensors, qtype=kind)
    checkpoint = open_checkpoint(tmp_path / "m.gguf")
    for name, short in ((gate, "gate"), (down, "down")):
        stored = tensors[f"blk.0.ffn_{short}_exps.weight"]
        flat = gguf.quants.dequantize(gguf.quants.quantize(stored, kind), kind)
        whole = torch.from_numpy(np.ascontiguousarray(flat.reshape(stored.shape)))
        stem = f"model.layers.0.{name}.weight"
        assert torch.equal(checkpoint.tensor(stem.format(""), stored.shape), whole)
        assert torch.equal(checkpoint.tensor(stem.format(""), rows=(1, 3), cols=(5, 20)), whole[1:3, 5:20])
        assert checkpoint.shape(stem.format(".2")) == stored.shape[1:] and not checkpoint.has(stem.format("x"))
        assert torch.equal(checkpoint.tensor(stem.format(".2"), rows=(3, 9), cols=(32, 50)), whole[2, 3:9, 32:50])
        with pytest.raises(ModelError, match="experts.4"):
            checkpoint.tensor(stem.format(f".{EXPERTS}"))
    assert not [name for name in checkpoint.unread() if "experts" in name]
    expected = {"qwen3moe": {"architectures": ["Qwen3MoeForCausalLM"], "num_experts": EXPERTS, "moe_intermediate_size": INNER},
                "llama": {"architectures": ["MixtralForCausalLM"], "num_local_experts": EXPERTS}}[arch]  # fmt: skip
    assert config_of(tmp_path / "m.gguf", expected) == expected and checkpoint.config["num_experts_per_tok"] == 2


def test_what_is_not_known_keeps_its_name_so_that_a_model_refuses_it(tmp_path):
    extra = [("llama.logit_scale", 0.5), ("llama.attention.value_length", 8)]
    write_gguf(tmp_path / "m.gguf", extra=extra, tensors={"blk.0.attn_sinks.weight": np.ones(4, np.float32)})
    checkpoint = open_checkpoint(tmp_path / "m.gguf")
    assert checkpoint.config["llama.logit_scale"] == 0.5 and checkpoint.config["llama.attention.value_length"] == 8
    assert "blk.0.attn_sinks.weight" in checkpoint.unread()


def test_the_rotated_part_of_a_head_is_read(tmp_path):
    write_gguf(tmp_path / "m.gguf", extra=[("llama.rope.dimension_count", 4)])
    assert open_checkpoint(tmp_path / "m.gguf").config["partial_rotary_factor"] == 0.25


def test_files_of_an_unknown_architecture_are_refused_by_its_name(tmp_path):
    for arch in ("strange", "nemotron_h"):
        write_gguf(tmp_path / f"{arch}.gguf", arch)
        with pytest.raises(ModelError, match=f"GGUF files of '{arch}' are not supported .*llama, .*deepseek2"):
            open_checkpoint(tmp_path / f"{arch}.gguf")


def test_a_missing_tensor_and_a_wrong_shape_are_named(tmp_path):
    write_gguf(tmp_path / "m.gguf")
    checkpoint = open_checkpoint(tmp_path / "m.gguf")
    with pytest.raises(ModelError, match="lm_head.weight"):
        checkpoint.tensor("lm_head.weight")
    with pytest.raises(ModelError, match="embed_tokens"):
        checkpoint.tensor("model.embed_tokens.weight", (VOCAB + 1, HIDDEN))


def test_damaged_files_are_refused_not_read(tmp_path):
    write_gguf(tmp_path / "m.gguf")
    good = (tmp_path / "m.gguf").read_bytes()
    huge = good[:8] + struct.pack("<QQ", 1 << 60, 1 << 60) + good[24:]
    damaged = [b"", b"GGU", good[:4], good[:100], good[:-1], b"PK" + good[2:], huge]
    rng = np.random.default_rng(2)
    for _ in range(200):
        copy = bytearray(good)
        copy[rng.integers(4, 900)] = rng.integers(256)
        damaged.append(bytes(copy))
    for data in damaged:
        (tmp_path / "bad.gguf").write_bytes(data)
        try:
            file = GGUFFile(tmp_path / "bad.gguf")
            for name in file.tensors:
                file.raw(name)
        except ModelError:
            pass


@pytest.mark.parametrize("key", ["attention.head_count", "attention.head_count_kv"])
def test_numbers_that_differ_between_layers_are_refused_by_name(key, tmp_path):
    """As hybrids have them; the same number for every layer is that number."""
    write_gguf(tmp_path / "same.gguf", "qwen3", extra=[(f"qwen3.{key}", [4, 4])])
    assert open_checkpoint(tmp_path / "same.gguf").config["num_attention_heads"] == 4
    write_gguf(tmp_path / "unlike.gguf", "qwen3", extra=[(f"qwen3.{key}", [0, 4])])
    with pytest.raises(ModelError, match=rf"qwen3\.{key} differs between layers \(\[0, 4\]\)"):
        open_checkpoint(tmp_path / "unlike.gguf")


def test_latent_attention_without_its_sizes_is_refused_by_name(tmp_path):
    write_gguf(tmp_path / "m.gguf", "deepseek2", extra=[("deepseek2.expert_count", 4)])
    with pytest.raises(ModelError, match="the metadata lack deepseek2.rope.dimension_count"):
        open_checkpoint(tmp_path / "m.gguf")
