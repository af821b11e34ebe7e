"""Rotary tables against transformers', and what is refused."""

import pytest
import torch
import transformers

from slipstream.errors import ModelError
from slipstream.models.rotary import rope_parameters, rotary_table

MOST, ORIGINAL, DIM = 512, 64, 32
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": ORIGINAL,
    "rope_theta": 500000.0,
}
YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": ORIGINAL}
LONG = {
    "rope_type": "longrope",
    "short_factor": [1.0 + 0.1 * i for i in range(DIM // 2)],
    "long_factor": [2.0 + 0.5 * i for i in range(DIM // 2)],
    "original_max_position_embeddings": ORIGINAL,
}
KINDS = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "llama3": LLAMA3,
    "yarn": YARN,
    "yarn, its factor from the lengths": {**YARN, "factor": None},
    "yarn, not cut to whole pairs": {**YARN, "truncate": False, "beta_fast": 4.0, "beta_slow": 0.5},
    "yarn, as DeepSeek has it": {**YARN, "mscale": 0.7, "mscale_all_dim": 1.3},
    "yarn, with a factor of its own": {**YARN, "attention_factor": 1.5},
    "longrope": LONG,
    "longrope, with factors of its own": {**LONG, "factor": 3.0, "attention_factor": 1.25},
    "proportional": {"rope_type": "proportional", "factor": 2.0, "partial_rotary_factor": 0.5},
    "in part": {"rope_type": "default", "partial_rotary_factor": 0.5},
    "yarn in part": {**YARN, "partial_rotary_factor": 0.5},
}


def config_of(rope: dict) -> transformers.LlamaConfig:
    rope = {"rope_theta": 10000.0, **rope}
    return transformers.LlamaConfig(
        hidden_size=4 * DIM, num_attention_heads=4, max_position_embeddings=MOST, rope_parameters=rope
    )


def reference(config, length: int) -> torch.Tensor:
    """transformers' table for requests of `length` tokens."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
    from transformers.models.glm.modeling_glm import GlmRotaryEmbedding

    functions = {"default": GlmRotaryEmbedding.compute_default_rope_parameters, **ROPE_INIT_FUNCTIONS}
    frequencies, factor = functions[config.rope_parameters["rope_type"]](config, "cpu", seq_len=length)
    angles = torch.outer(torch.arange(length).float(), frequencies)
    return torch.cat([angles.cos(), angles.sin()], 1) * factor


@pytest.mark.parametrize("name", KINDS)
def test_tables_equal_transformers(name):
    config = config_of(KINDS[name])
    length = ORIGINAL if "longrope" in name else MOST
    table = rotary_table(config.to_dict(), DIM, length)
    assert torch.allclose(table, reference(config, length), atol=1e-5)


def test_kinds_differ_from_the_plain_table():
    plain = rotary_table(config_of({}).to_dict(), DIM, ORIGINAL)
    for name, rope in KINDS.items():
        found = rotary_table(config_of(rope).to_dict(), DIM, ORIGINAL)
        assert torch.equal(found, plain) == (name in ("default", "dynamic")), name


def test_older_configs_are_read():
    old = {"rope_theta": 1e4, "rope_scaling": {"type": "linear", "factor": 2.0}}
    new = {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}
    assert torch.equal(rotary_table(old, 8, 16), rotary_table(new, 8, 16))
    phi3 = {"rope_scaling": {**LONG, "original_max_position_embeddings": None}, "original_max_position_embeddings": ORIGINAL}
    phi3 |= {"max_position_embeddings": MOST}
    assert torch.equal(rotary_table(phi3, DIM, 64), rotary_table(config_of(LONG).to_dict(), DIM, 64))


def test_sections_of_images_change_nothing_for_text():
    sections = {"rope_parameters": {"type": "mrope", "mrope_section": [1, 1, 2], "mrope_interleaved": True}}
    assert torch.equal(rotary_table(sections, 8, 16), rotary_table({}, 8, 16))


def test_each_layer_type_has_parameters_of_its_own():
    both = {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_theta": 1e4},
    }
    config = {"rope_parameters": both}
    full, sliding = (rotary_table(config, 8, 16, kind) for kind in both)
    assert torch.equal(full, rotary_table({"rope_parameters": both["full_attention"]}, 8, 16))
    assert torch.equal(sliding, rotary_table({}, 8, 16))


@pytest.mark.parametrize(
    "rope, length, said",
    [
        ({"rope_type": "axial"}, 16, "rope_type 'axial' is not supported; known: default, linear"),
        (
            {"rope_type": "linear", "factor": 2.0, "attn_factor": 3.0},
            16,
            "attn_factor 3.0 is not known with rope_type 'linear'",
        ),
        ({"rope_type": "llama3", "factor": 8.0}, 16, "'llama3' needs low_freq_factor"),
        ({**LONG, "long_factor": [1.0]}, 16, "long_factor has 1 numbers; 16 pairs"),
        (LONG, ORIGINAL + 1, "--max-model-len must be at most 64, not 65"),
        ({"rope_type": "dynamic", "factor": 2.0}, MOST + 1, "--max-model-len must be at most 512, not 513"),
    ],
)
def test_what_would_turn_wrongly_is_refused_by_name(rope, length, said):
    with pytest.raises(ModelError, match=said):
        rotary_table({"rope_parameters": rope, "max_position_embeddings": MOST}, DIM, length)


def test_one_table_is_right_where_short_and_long_requests_turn_alike():
    rope = {**LONG, "long_factor": LONG["short_factor"]}
    config = config_of(rope)
    assert torch.allclose(rotary_table(config.to_dict(), DIM, MOST), reference(config, MOST), atol=1e-5)


def test_partial_rotation_turns_the_first_part_of_a_head():
    whole, part = rotary_table({}, 4, 16), rotary_table({"partial_rotary_factor": 0.5}, 8, 16)
    assert torch.equal(part, whole)
    assert rope_parameters({"rope_parameters": {"partial_rotary_factor": 0.25}})["partial_rotary_factor"] == 0.25
