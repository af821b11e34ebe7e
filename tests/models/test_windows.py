"""Families with windows against transformers in float32, with windows that bind: Gemma 2 and 3, Mistral, Qwen."""

import json

import numpy as np
import pytest
import torch

from slipstream.log.caches import Paged, Window
from slipstream.models.registry import build
from slipstream.ops.cpu.ops import PlainOps
from slipstream.weights.checkpoint import open_checkpoint
from tests.helpers import checkpoints
from tests.helpers.checkpoints import tiny_gemma3
from tests.models.test_golden import reference, run

WINDOW = 16
PROMPTS = [np.random.default_rng(5).integers(3, 300, n).astype(np.int32) for n in (300, 1, 17, 64)]
BASE = {"hidden_size": 48, "intermediate_size": 100, "num_hidden_layers": 3, "num_attention_heads": 6}
BASE |= {"num_key_value_heads": 3, "head_dim": 16, "sliding_window": WINDOW}
FULL, SLIDING = "full_attention", "sliding_attention"


def tiny(family: str, **fields):
    return checkpoints._folder(family, json.dumps({**BASE, **fields}, sort_keys=True))


ROPES = {
    FULL: {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
    SLIDING: {"rope_type": "default", "rope_theta": 1e4},
}
MODELS = {
    "gemma3": tiny_gemma3,
    "gemma3, tied, scaled positions, capped logits": lambda: tiny_gemma3(
        tie_word_embeddings=True, rope_parameters=ROPES, final_logit_softcapping=5.0
    ),
    "gemma2": lambda: tiny("gemma2", query_pre_attn_scalar=24, attn_logit_softcapping=2.0, final_logit_softcapping=3.0),
    "mistral": lambda: tiny("mistral"),
    "ministral": lambda: tiny("ministral", layer_types=[FULL, SLIDING, SLIDING]),
    "qwen2": lambda: tiny("qwen2", use_sliding_window=True, max_window_layers=1),
    "qwen3": lambda: tiny("qwen3", use_sliding_window=True, layer_types=[SLIDING, FULL, SLIDING]),
}


@pytest.mark.parametrize("name", MODELS)
def test_windowed_models_equal_transformers(name):
    path = MODELS[name]()
    expected = reference(path, PROMPTS)
    for size, chunk in ((1, 1000), (2, 16), (3, 64)):
        for a, b in zip(run(path, size, chunk, PROMPTS), expected, strict=True):
            assert torch.allclose(a.log_softmax(-1), b.log_softmax(-1), atol=2e-4, rtol=0), (size, chunk)


def layouts(path, max_len=None):
    return build(open_checkpoint(path), PlainOps(torch.float32), max_len).caches


def test_only_layers_whose_window_binds_keep_a_window():
    path = tiny_gemma3()
    assert [type(c) for c in layouts(path)] == [Window, Paged]
    assert [type(c) for c in layouts(path, WINDOW + 1)] == [Window, Paged]
    assert [type(c) for c in layouts(path, WINDOW)] == [Paged] * 2


def test_a_window_that_is_not_used_is_none():
    assert [type(c) for c in layouts(tiny("qwen2", use_sliding_window=False))] == [Paged] * 3
    assert [type(c) for c in layouts(tiny("mistral", sliding_window=None))] == [Paged] * 3
