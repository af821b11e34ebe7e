"""Logits of tiny random models against transformers in float32: in chunks, several rows in a step, on 1 to 4 ranks."""

import threading

import numpy as np
import pytest
import torch
import transformers

from slipstream.device.cpu.memory import page_arrays
from slipstream.errors import ModelError
from slipstream.log.caches import windows
from slipstream.models.registry import build
from slipstream.ops.cpu.ops import PlainOps
from slipstream.ops.cpu.paged import build_step
from slipstream.shard import Shard
from slipstream.weights.checkpoint import open_checkpoint
from tests.device.groups import collectives
from tests.helpers import checkpoints
from tests.helpers.checkpoints import tiny_llama, tiny_qwen3

LENGTHS = (70, 1, 33)
PROMPTS = [np.random.default_rng(3).integers(3, 300, n).astype(np.int32) for n in LENGTHS]
BLOCK, COLUMNS = 8, 10


def tiny(family: str, **fields):
    base = {"hidden_size": 96, "intermediate_size": 200, "num_hidden_layers": 2, "num_attention_heads": 6}
    import json

    return checkpoints._folder(family, json.dumps({**base, "num_key_value_heads": 2, **fields}, sort_keys=True))


LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
    "rope_theta": 10000.0,
}
MODELS = {
    "llama": lambda: tiny_llama(),
    "llama, tied, with biases": lambda: tiny_llama(tie_word_embeddings=True, attention_bias=True, mlp_bias=True),
    "llama, heads wider than hidden / heads, llama3 rotary": lambda: tiny_llama(head_dim=32, rope_parameters=LLAMA3),
    "llama, an odd vocabulary and MLP": lambda: tiny_llama(vocab_size=321, intermediate_size=201),
    "mistral": lambda: tiny("mistral", sliding_window=None, head_dim=16),
    "qwen2": lambda: tiny("qwen2"),
    "qwen3": lambda: tiny_qwen3(),
}


def reference(path, prompts=PROMPTS) -> list[torch.Tensor]:
    # eager: the others leave soft caps of scores out
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    with torch.inference_mode():
        return [model(torch.from_numpy(p.astype(np.int64))[None]).logits[0] for p in prompts]


def run_rank(checkpoint, rank: int, size: int, collective, chunk: int, prompts) -> list[torch.Tensor]:
    """This rank's logits of every position of every prompt: all prompts in one step after another of `chunk` tokens each."""
    with torch.inference_mode():
        ops = PlainOps(torch.float32, Shard(rank, size), collective)
        model = build(checkpoint, ops)
        lengths, sizes = [len(p) for p in prompts], windows(model.caches)
        columns = -(-max(lengths) // BLOCK)
        pages = len(prompts) * columns
        order = [np.random.default_rng(seed).permutation(pages) for seed in range(len(sizes))]
        tables = (1 + np.stack(order)).astype(np.int32).reshape(len(sizes), -1, columns)
        caches = [page_arrays(c, pages + 1, BLOCK, torch.float32) for c in model.caches]
        out = [[] for _ in prompts]
        for start in range(0, max(lengths), chunk):
            rows = [i for i, n in enumerate(lengths) if n > start]
            counts = np.array([min(chunk, lengths[i] - start) for i in rows])
            ids = np.concatenate([prompts[i][start : start + n] for i, n in zip(rows, counts, strict=True)])
            starts = np.full(len(rows), start)
            step = build_step(ids, np.array(rows), starts, counts, tables, sizes, caches, torch.float32, BLOCK)
            parts = model.logits(model.forward(step), step).split(counts.tolist())
            for i, part in zip(rows, parts, strict=True):
                out[i].append(part)
        return [torch.cat(o) for o in out]


def run(path, size: int, chunk: int, prompts=PROMPTS) -> list[torch.Tensor]:
    checkpoint, sums = open_checkpoint(path), collectives(size)
    found = [None] * size

    def work(rank):
        found[rank] = run_rank(checkpoint, rank, size, sums[rank], chunk, prompts)

    threads = [threading.Thread(target=work, args=(r,), daemon=True) for r in range(size)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(60)
    return [torch.cat(parts, dim=1) for parts in zip(*found, strict=True)]


@pytest.mark.parametrize("name", MODELS)
def test_logits_equal_transformers(name):
    path = MODELS[name]()
    expected = reference(path)
    for size, chunk in ((1, 1000), (1, 9), (2, 32), (3, 1000), (4, 17)):
        for a, b in zip(run(path, size, chunk), expected, strict=True):
            assert torch.allclose(a, b, atol=2e-4, rtol=1e-4), (size, chunk, (a - b).abs().max())


def test_bfloat16_stays_near_float32():
    path = tiny_llama()
    with torch.inference_mode():
        ops = PlainOps(torch.bfloat16)
        model = build(open_checkpoint(path), ops)
        caches = [page_arrays(c, COLUMNS + 1, BLOCK, torch.bfloat16) for c in model.caches]
        table = np.arange(1, COLUMNS + 1, dtype=np.int32)[None]
        n = np.array([LENGTHS[0]])
        step = build_step(PROMPTS[0], np.zeros(1, int), np.zeros(1, int), n, table[None], (0,), caches, torch.bfloat16, BLOCK)
        error = (model.logits(model.forward(step), step) - reference(path)[0]).abs().mean()
    assert error < 0.05


def config_of(**fields) -> dict:
    base = {"architectures": ["LlamaForCausalLM"], "vocab_size": 320, "hidden_size": 32, "intermediate_size": 64}
    return {**base, "num_hidden_layers": 1, "num_attention_heads": 2, "max_position_embeddings": 512, **fields}


class Config:
    """A checkpoint of which nothing but the config is read."""

    path = "config.json"

    def __init__(self, **fields):
        self.config = config_of(**fields)


@pytest.mark.parametrize(
    "fields, said",
    [
        ({"architectures": ["MambaForCausalLM"]}, "MambaForCausalLM.*LlamaForCausalLM"),
        ({"architectures": []}, "names no architecture"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported; known: silu"),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 8, "layer_types": ["full_attention"]}, "layer_types"),
        ({"architectures": ["MinistralForCausalLM"], "layer_types": ["chunked_attention"]}, "'chunked_attention' of layer 0"),
        ({"architectures": ["MinistralForCausalLM"], "layer_types": ["sliding_attention"]}, "sliding_window is None"),
        ({"architectures": ["Qwen2ForCausalLM"], "sliding_window": 8, "layer_types": ["sliding_attention"]}, "use_sliding"),
        ({"architectures": ["Qwen2ForCausalLM"], "layer_types": ["full_attention"] * 2}, "layer_types names 2 layers"),
        ({"rope_scaling": {"rope_type": "axial"}}, "axial"),
        ({"num_key_value_heads": 3, "num_attention_heads": 4}, "num_key_value_heads"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(fields, said):
    with pytest.raises(ModelError, match=said):
        build(Config(**fields), PlainOps(torch.float32), None, "slipstream")
