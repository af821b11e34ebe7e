"""Rotary tables against transformers', and what is refused."""

import pytest
import torch
import transformers

from slipstream.errors import ModelError
from slipstream.models.rotary import rotary_table

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
    "rope_theta": 500000.0,
}


@pytest.mark.parametrize(
    "rope", [{"rope_type": "default", "rope_theta": 1e4}, {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}, LLAMA3]
)
def test_tables_equal_transformers(rope):
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    config = transformers.LlamaConfig(hidden_size=128, num_attention_heads=4, max_position_embeddings=512, rope_parameters=rope)
    cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1, dtype=torch.float32), torch.arange(512)[None])
    table = rotary_table(config.to_dict(), 32, 512)
    assert torch.allclose(table[:, :16], cos[0, :, :16], atol=1e-5)
    assert torch.allclose(table[:, 16:], sin[0, :, :16], atol=1e-5)


def test_older_configs_are_read():
    old = {"rope_theta": 1e4, "rope_scaling": {"type": "linear", "factor": 2.0}}
    new = {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}
    assert torch.equal(rotary_table(old, 8, 16), rotary_table(new, 8, 16))


@pytest.mark.parametrize("rope", [{"rope_type": "yarn", "factor": 4.0}, {"rope_type": "longrope"}])
def test_unknown_scaling_is_refused_by_name(rope):
    with pytest.raises(ModelError, match=rope["rope_type"]):
        rotary_table({"rope_parameters": rope}, 8, 16)


def test_partial_rotation_turns_the_first_part_of_a_head():
    whole, part = rotary_table({}, 4, 16), rotary_table({"partial_rotary_factor": 0.5}, 8, 16)
    assert torch.equal(part, whole)
