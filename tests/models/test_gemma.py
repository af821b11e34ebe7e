"""Gemma 3 with its real weights against the tokens that transformers gave, and a tiny one whose pages move.

The real prompts of 600 tokens and more are longer than the window of 512 tokens that most layers have.
"""

import json
import pathlib

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from slipstream.log.caches import Window
from slipstream.weights.checkpoint import open_checkpoint
from tests.device.groups import Group, request
from tests.helpers.checkpoints import gemma3, tiny_gemma3
from tests.models.test_golden import run

REAL = json.loads((pathlib.Path(__file__).parents[1] / "data" / "gemma3_greedy.json").read_text())
CASES = {case["name"]: case for case in REAL["cases"]}
TOKENS = 8
NEAR_TIE = 2e-3  # nats between the best two tokens below which either may come
PROMPT, OTHER = (np.random.default_rng(seed).integers(3, 300, 48).tolist() for seed in (4, 5))


@pytest.mark.parametrize("size, names, chunk", [(1, ("sum", "wetter", "tokyo"), 512), (2, ("fib", "long600"), 128)])
def test_greedy_tokens_of_the_real_weights_equal_transformers(size, names, chunk):
    cases = [CASES[name] for name in names]
    with Group(gemma3(), size, slots=len(cases), max_len=768) as group:
        windows = {c.size for c in group.ranks[0].model.caches if isinstance(c, Window)}
        assert windows == {REAL["sliding_window"]} == {512}
        found = group.generate([c["prompt_token_ids"] for c in cases], TOKENS, chunk=chunk)[0]
    for case, tokens in zip(cases, found, strict=True):
        differing = [k for k, (a, b) in enumerate(zip(case["token_ids"], tokens, strict=False)) if a != b]
        assert not differing or case["margin"][differing[0]] < NEAR_TIE, (case["name"], differing[0])


def test_the_real_files_config():
    config = open_checkpoint(gemma3()).config
    expected = {"architectures": ["Gemma3ForCausalLM"], "head_dim": 256, "sliding_window": 512, "vocab_size": 262_144}
    expected |= {"query_pre_attn_scalar": 256, "rope_theta": 1e6, "tie_word_embeddings": True, "eos_token_id": [1]}
    assert {k: config[k] for k in expected} == expected


def answer(group: Group, prompt: list[int], count: int, slot: int = 0) -> list[int]:
    return group.generate([prompt], count, chunk=16, slots=[slot])[0][0]


@pytest.fixture(scope="module")
def expected() -> list[int]:
    with Group(tiny_gemma3(), slots=4, max_len=128) as group:
        return answer(group, PROMPT, 10)


@pytest.mark.parametrize("size", [1, 2])
def test_a_windowed_request_goes_on_after_a_preemption(expected, size):
    """Computed again with the tokens that it had given; and, offloaded, from its pages."""
    with Group(tiny_gemma3(), size, slots=4, max_len=128, host_pages=8) as group:
        assert len(set(expected)) > 4 and answer(group, PROMPT, 4) == expected[:4]
        places = group.pages([0])
        held = {table: places[(places[:, 0] == table) & (places[:, 2] < 3)][:, 3].tolist() for table in (0, 1)}
        for rank in group.ranks:
            for table, pages in held.items():
                rank.offload(table, tuple(pages), (4, 0, 2))
        answer(group, OTHER, 20)  # overwrites them
        assert answer(group, PROMPT + expected[:4], 6, slot=1) == expected[4:]
        group.init_slot(2, request(2, PROMPT, 30))
        target = group.pages([2])
        for rank in group.ranks:
            for table in held:
                into = target[(target[:, 0] == table) & (target[:, 2] < 3)][:, 3].tolist()
                rank.restore(table, (4, 0, 2), tuple(into))
        found = []
        for position in range(47, 53):  # the last of the prompt again, whose key and value are there already
            group.launch([(2, position, 1, True)], target if not found else group.pages([]))
            found.append(int(group.outcome().tokens[0, 0]))
        assert found == expected[:6]


def test_a_windowed_request_goes_on_from_the_pages_of_a_prefix(expected):
    """Of the windowed table only the pages that its first row reads."""
    with Group(tiny_gemma3(), slots=4, max_len=128) as group:
        answer(group, PROMPT, 2)
        shared, own = group.pages([0]), group.pages([1])
        windowed = [table.window for table in group.limits.tables].index(16)
        reads = (shared[:, 2] < 2) & ((shared[:, 0] != windowed) | (shared[:, 2] >= 1))
        taken = shared[reads]
        taken[:, 1] = 1
        group.init_slot(1, request(1, PROMPT, 30))
        group.launch([(1, 32, 16, True)], np.concatenate([own[own[:, 2] >= 2], taken]))
        found = [int(group.outcome().tokens[0, 0])]
        for position in range(48, 53):
            group.launch([(1, position, 1, True)])
            found.append(int(group.outcome().tokens[0, 0]))
        assert found == expected[:6]


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
def test_a_composite_checkpoint_loads_as_text(prefix, tmp_path):
    """As older and newer files name it, beside tensors of its vision tower."""
    config = json.loads((tiny_gemma3() / "config.json").read_text())
    tied = load_file(tiny_gemma3() / "model.safetensors")
    named = {name.replace("model.", prefix, 1): tensor for name, tensor in tied.items()}
    vision = "vision_tower.vision_model.embeddings.position_embedding.weight"
    named |= {vision: torch.ones(2, 2), "multi_modal_projector.mm_soft_emb_norm.weight": torch.ones(2)}
    save_file(named, tmp_path / "model.safetensors")
    whole = {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "text_config": config}
    whole |= {"vision_config": {"hidden_size": 2}, "mm_tokens_per_image": 256, "boi_token_index": 255_999}
    (tmp_path / "config.json").write_text(json.dumps(whole))
    for a, b in zip(run(tmp_path, 1, 1000), run(tiny_gemma3(), 1, 1000), strict=True):
        assert torch.equal(a, b)
