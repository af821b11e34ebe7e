"""Linear layers as every kind of checkpoint gives them: cut for a rank, joined with others."""

import pytest
import torch

from slipstream.errors import ModelError
from slipstream.weights.checkpoint import open_checkpoint
from slipstream.weights.packed import DENSE, dense, join
from tests.helpers.checkpoints import smollm2, tiny_llama

Q, K = "model.layers.1.self_attn.q_proj", "model.layers.1.self_attn.k_proj"
KINDS = {
    "safetensors": lambda: open_checkpoint(tiny_llama()),
    "gguf, rows in another order": lambda: open_checkpoint(smollm2()),
    "random": lambda: open_checkpoint(tiny_llama() / "config.json", "dummy", 3),
}


@pytest.fixture(params=KINDS)
def checkpoint(request):
    return KINDS[request.param]()


def sizes(checkpoint) -> tuple[int, int, int]:
    c = checkpoint.config
    return c["hidden_size"], c["num_attention_heads"], c["num_key_value_heads"]


def test_a_layer_is_cut_by_outputs_and_inputs(checkpoint):
    hidden, _, _ = sizes(checkpoint)
    whole = checkpoint.linear(Q, (hidden, hidden), dtype=torch.float32)
    assert whole.scheme is DENSE and whole.scale is None and whole.zero is None
    assert torch.equal(whole.data, checkpoint.tensor(Q + ".weight", (hidden, hidden), dtype=torch.float32))
    part = checkpoint.linear(Q, (hidden, hidden), rows=(32, 80), cols=(3, 40), dtype=torch.bfloat16)
    assert part.data.dtype == torch.bfloat16 and torch.equal(part.data, whole.data[32:80, 3:40].bfloat16())


def test_a_rank_without_heads_reads_an_empty_part_and_its_shape_is_checked_too(checkpoint):
    hidden, _, _ = sizes(checkpoint)
    assert checkpoint.linear(Q, (hidden, hidden), rows=(64, 64)).data.shape == (0, hidden)
    assert checkpoint.linear(Q, (hidden, hidden), cols=(0, 0)).data.shape == (hidden, 0)
    if checkpoint.names():
        with pytest.raises(ModelError, match="q_proj.weight is of shape"):
            checkpoint.linear(Q, (hidden, hidden + 1), rows=(64, 64))


def test_layers_with_one_input_are_joined_output_after_output(checkpoint):
    hidden, q, k = sizes(checkpoint)
    width = hidden * k // q
    parts = [checkpoint.linear(Q, (hidden, hidden), rows=(0, 32)), checkpoint.linear(K, (width, hidden), rows=(16, 32))]
    joined = join(parts)
    assert joined.scheme is DENSE and joined.data.shape == (48, hidden)
    assert torch.equal(joined.data[:32], parts[0].data) and torch.equal(joined.data[32:], parts[1].data)


def test_one_layer_alone_is_joined_without_a_copy():
    weight = torch.zeros(4, 4)
    assert join([dense(weight)]).data.data_ptr() == weight.data_ptr()
