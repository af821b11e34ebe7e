"""Decoders that run by transformers' own code: logits against plain transformers, refusals by name, and a whole server."""

import json
import pathlib
import re
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
import transformers

from slipstream.device.cpu.memory import page_arrays
from slipstream.errors import ModelError
from slipstream.log.caches import Paged, Window, windows
from slipstream.models.registry import build
from slipstream.ops.cpu.ops import PlainOps
from slipstream.ops.cpu.paged import build_step
from slipstream.shard import Shard
from slipstream.weights.checkpoint import open_checkpoint
from tests.device.groups import Group, collectives
from tests.helpers.checkpoints import tiny
from tests.helpers.server import Server

LENGTHS = (70, 1, 33)
PROMPTS = [np.random.default_rng(3).integers(3, 300, n).astype(np.int32) for n in LENGTHS]
BLOCK, COLUMNS = 8, 10
ROWS = dict(hidden_size=96, intermediate_size=200, num_hidden_layers=2, num_attention_heads=6)
GROUPED = ROWS | dict(num_key_value_heads=2)
HEADS = GROUPED | dict(head_dim=16)
MIXED = HEADS | dict(num_hidden_layers=4)
GPT = dict(n_embd=96, n_layer=2, n_head=6)
EXPERTS = GROUPED | dict(num_experts=4, num_local_experts=4, num_experts_per_tok=2)
LATENT = ROWS | dict(
    num_key_value_heads=6, head_dim=8, kv_lora_rank=32, q_lora_rank=48, qk_nope_head_dim=16, qk_rope_head_dim=8
)
LATENT |= dict(v_head_dim=16, n_routed_experts=4, num_experts_per_tok=2, n_group=1, topk_group=1, moe_intermediate_size=40)
CAPPED = dict(final_logit_softcapping=5.0, attn_logit_softcapping=3.0, query_pre_attn_scalar=16)
SCALED = dict(logits_scaling=4.0, embedding_multiplier=3.0, attention_multiplier=0.2, residual_multiplier=0.5)

# family of transformers' config: its fields, and how many ranks it is tested on
FAMILIES: dict[str, tuple[dict, int]] = {
    "phi3": (GROUPED, 3),
    "stablelm": (GROUPED | dict(use_qkv_bias=True), 1),
    "olmo2": (GROUPED, 2),
    "gpt_neox": (ROWS, 3),
    "cohere": (GROUPED | dict(logit_scale=0.25), 2),
    "cohere2": (MIXED | dict(sliding_window=24, logit_scale=0.25), 2),
    "starcoder2": (GROUPED | dict(sliding_window=20), 3),
    "smollm3": (MIXED, 2),
    "exaone4": (MIXED | dict(sliding_window=16), 2),
    "glm4": (HEADS | dict(partial_rotary_factor=0.5), 3),
    "granite": (GROUPED | SCALED, 2),
    "internlm3": (GROUPED, 2),
    "phi": (GROUPED | dict(partial_rotary_factor=0.5), 3),
    "nemotron": (GROUPED, 2),
    "gemma2": (HEADS | CAPPED | dict(sliding_window=20), 2),
    "helium": (HEADS | dict(tie_word_embeddings=True), 2),
    "ministral": (HEADS | dict(sliding_window=24), 2),
    "gpt2": (GPT, 1),
    "deepseek_v3": (LATENT, 2),
    "qwen2_moe": (EXPERTS | dict(moe_intermediate_size=40, shared_expert_intermediate_size=40), 2),
    "olmoe": (EXPERTS, 3),
    "gpt_oss": (HEADS | dict(num_local_experts=4, num_experts_per_tok=2, sliding_window=16), 1),
}


def reference(path) -> list[torch.Tensor]:
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.inference_mode():
        return [model(torch.from_numpy(p.astype(np.int64))[None]).logits[0] for p in PROMPTS]


def build_foreign(path, rank: int = 0, size: int = 1, collective=None, max_len: int | None = None):
    return build(open_checkpoint(path), PlainOps(torch.float32, Shard(rank, size), collective), max_len, "transformers")


def run_rank(path, rank: int, size: int, collective, chunk: int) -> list[torch.Tensor]:
    """This rank's logits of every position of every prompt: all prompts in one step after another of `chunk` tokens each."""
    with torch.inference_mode():
        model = build_foreign(path, rank, size, collective)
        table = (1 + np.random.default_rng(0).permutation(len(PROMPTS) * COLUMNS)).astype(np.int32).reshape(-1, COLUMNS)
        rules = windows(model.caches)
        caches = [page_arrays(c, table.size + 1, BLOCK, torch.float32) for c in model.caches]
        out = [[] for _ in PROMPTS]
        for start in range(0, max(LENGTHS), chunk):
            rows = [i for i, n in enumerate(LENGTHS) if n > start]
            counts = np.array([min(chunk, LENGTHS[i] - start) for i in rows])
            ids = np.concatenate([PROMPTS[i][start : start + n] for i, n in zip(rows, counts, strict=True)])
            starts, tables = np.full(len(rows), start), np.stack([table] * len(rules))
            step = build_step(ids, np.array(rows), starts, counts, tables, rules, caches, torch.float32, BLOCK)
            parts = model.logits(model.forward(step), step).split(counts.tolist())
            for i, part in zip(rows, parts, strict=True):
                out[i].append(part)
        return [torch.cat(o) for o in out]


def run(path, size: int, chunk: int) -> list[torch.Tensor]:
    sums, found = collectives(size), [None] * size

    def work(rank):
        found[rank] = run_rank(path, rank, size, sums[rank], chunk)

    threads = [threading.Thread(target=work, args=(r,), daemon=True) for r in range(size)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(60)
    return [torch.cat(parts, dim=1) for parts in zip(*found, strict=True)]


@pytest.mark.parametrize("family", FAMILIES)
def test_log_probabilities_equal_transformers_whole_in_chunks_and_on_several_ranks(family):
    fields, ranks = FAMILIES[family]
    path = tiny(family, **fields)
    expected = [logits.log_softmax(-1) for logits in reference(path)]
    for size, chunk in ((1, 1000), (1, 9), *((n, 32) for n in range(2, ranks + 1))):
        for a, b in zip(run(path, size, chunk), expected, strict=True):
            difference = (a.log_softmax(-1) - b).abs().max()
            assert difference < 2e-4, (size, chunk, difference)


def test_windows_become_windowed_caches_and_layers_without_rotation_stay_as_they_are():
    layouts = build_foreign(tiny("cohere2", **FAMILIES["cohere2"][0])).caches
    assert layouts == (Window(2, 16, 24),) * 3 + (Paged(2, 16),)
    assert build_foreign(tiny("phi3", **GROUPED)).caches == (Paged(2, 16),) * 2


def test_an_architecture_of_our_own_runs_by_transformers_when_asked(capfd):
    path = tiny("qwen2", **GROUPED)
    expected = [logits.log_softmax(-1) for logits in reference(path)]
    for a, b in zip(run(path, 1, 40), expected, strict=True):
        assert (a.log_softmax(-1) - b).abs().max() < 2e-4
    assert "Qwen2ForCausalLM runs by the code of transformers" in capfd.readouterr().err
    build(open_checkpoint(path), PlainOps(torch.float32))
    assert "Qwen2ForCausalLM runs by Slipstream's own code" in capfd.readouterr().err


def test_random_weights_are_the_same_on_one_rank_and_two(tmp_path):
    path = changed(tiny("cohere2", **FAMILIES["cohere2"][0]), tmp_path, weights=False)
    prompts = [[5, 6, 7, 8] * 9, [9, 4]]
    found = []
    for size in (1, 2):
        with Group(path, size, load_format="dummy") as group:
            found.append(group.generate(prompts, 8, chunk=16)[0])
    assert found[0] == found[1] and len(set(found[0][0])) > 3


def changed(path: pathlib.Path, folder: pathlib.Path, weights: bool = True, **fields) -> pathlib.Path:
    """A copy of a checkpoint whose config has other fields."""
    config = json.loads((path / "config.json").read_text()) | fields
    (folder / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not None}))
    if weights:
        shutil.copy(path / "model.safetensors", folder)
    return folder


def test_a_config_in_the_old_spelling_of_rotations_gives_the_same_logits(tmp_path):
    path = tiny("phi3", **GROUPED, rope_parameters={"rope_type": "default", "rope_theta": 500.0})
    old = changed(path, tmp_path, rope_parameters=None, rope_theta=500.0, rope_scaling=None)
    for a, b in zip(run(old, 1, 1000), run(path, 1, 1000), strict=True):
        assert torch.equal(a, b)


LONG = dict(rope_type="longrope", rope_theta=1e4, short_factor=[1.0] * 8, long_factor=[4.0] * 8)
DYNAMIC = dict(rope_type="dynamic", rope_theta=1e4, factor=2.0)


def test_rotations_that_follow_the_longest_request_are_held_to_the_length_at_which_they_would_change():
    path = tiny(
        "phi3", **GROUPED, rope_parameters=LONG | dict(original_max_position_embeddings=96), original_max_position_embeddings=96
    )
    assert build_foreign(path).max_len == 96
    with pytest.raises(ModelError, match="longrope.*more than 96 tokens.*--max-model-len 96"):
        build_foreign(path, max_len=97)
    expected = [logits.log_softmax(-1) for logits in reference(path)]
    for a, b in zip(run(path, 1, 32), expected, strict=True):
        assert (a.log_softmax(-1) - b).abs().max() < 2e-4
    assert build_foreign(tiny("olmo2", **GROUPED, rope_parameters=DYNAMIC)).max_len == 512


REFUSED = {
    "falcon": (dict(hidden_size=96, num_hidden_layers=2, num_attention_heads=6), "FalconForCausalLM.*attention interface"),
    "bloom": (dict(hidden_size=96, n_layer=2, n_head=6), "BloomForCausalLM.*attention interface.*position biases"),
    "mamba": (dict(hidden_size=96, num_hidden_layers=2), "MambaForCausalLM.*state of its own"),
    "bert": (ROWS, "BertLMHeadModel.*bidirectional"),
    "lfm2": (GROUPED | dict(layer_types=["conv", "full_attention"]), "Lfm2ForCausalLM.*from token to token.*convolution"),
    "llama4_text": (HEADS | dict(num_local_experts=2), "Llama4ForCausalLM.*fixed chunks"),
    "opt": (ROWS | dict(ffn_dim=200, word_embed_proj_dim=96, add_cross_attention=True), "OPTForCausalLM.*add_cross_attention"),
}


@pytest.mark.parametrize("family", REFUSED)
def test_what_cannot_be_served_is_refused_by_name(family):
    fields, said = REFUSED[family]
    with pytest.raises(ModelError, match=said):
        build_foreign(tiny(family, **fields))


@pytest.mark.parametrize(
    "fields, said",
    [
        (dict(model_type="nobody", auto_map={"AutoModelForCausalLM": "x.Y"}), "no model_type 'nobody'.*auto_map.*never run"),
        (dict(architectures=["Phi3ForSequenceClassification"]), "Phi3ForSequenceClassification is not a decoder"),
        (dict(num_attention_heads=5), "Phi3ForCausalLM.*(shape|5)"),
    ],
)
def test_a_config_that_names_no_decoder_is_refused_by_name(tmp_path, fields, said):
    with pytest.raises(ModelError, match=said):
        build_foreign(changed(tiny("phi3", **GROUPED), tmp_path, **fields))


def test_ranks_that_a_model_cannot_be_split_over_are_refused_by_name():
    no_plan, too_many = "no tensor-parallel plan", "7 ranks are too many for the 6"
    for family, size, said in (("stablelm", 2, no_plan), ("gpt_oss", 2, no_plan), ("gpt_neox", 7, too_many)):
        with pytest.raises(ModelError, match=said):
            build_foreign(tiny(family, **FAMILIES[family][0]), 0, size, collectives(size)[0])


@pytest.mark.parametrize("missing", ["model.layers.1.mlp.gate_up_proj.weight", "lm_head.weight", ""])
def test_tensors_that_are_missing_or_left_over_are_named(tmp_path, missing):
    from safetensors.torch import load_file, save_file

    path = changed(tiny("phi3", **GROUPED), tmp_path)
    tensors = load_file(path / "model.safetensors")
    extra = "model.layers.2.input_layernorm.weight"
    if missing:
        del tensors[missing]
    else:
        tensors[extra] = torch.ones(96)
    save_file(tensors, path / "model.safetensors")
    with pytest.raises(ModelError, match=re.escape(missing or extra)):
        build_foreign(path)


def test_without_transformers_an_unknown_architecture_is_an_error_that_names_the_flag():
    with pytest.raises(
        ModelError, match=r"Phi3ForCausalLM is not supported by --model-impl slipstream .known: .*Llama.*auto may run it"
    ):
        build(open_checkpoint(tiny("phi3", **GROUPED)), PlainOps(torch.float32), None, "slipstream")


def test_a_server_streams_the_tokens_of_transformers_after_prefix_hits_and_preemption():
    path = tiny("cohere2", **FAMILIES["cohere2"][0])
    prompts = [[int(t) for t in np.random.default_rng(i % 2).integers(3, 260, 48)] + [3 + i] for i in range(6)]
    expected = greedy(path, prompts, 40)
    memory = 2 * 6 * 16 * (2 * 2 * 16 * 4) * 4  # pages of 16 tokens for two of the longest requests, in all four layers
    flags = ["--device", "cpu", "--dtype", "float32", "--max-num-seqs", "4", "--max-num-batched-tokens", "32"]
    flags += ["--kv-cache-memory-bytes", str(memory), "--max-model-len", "96"]
    with Server(*flags, model=str(path)) as server, ThreadPoolExecutor(len(prompts)) as clients:
        assert "Cohere2ForCausalLM runs by the code of transformers" in server.log

        def ask(prompt: list[int]) -> list[int]:
            events = server.stream(prompt=prompt, max_tokens=40, ignore_eos=True, return_token_ids=True)
            return [id for event in events if event.data != "[DONE]" for id in event.data["choices"][0]["token_ids"]]

        found = list(clients.map(ask, prompts))
        assert server.metric("slipstream:num_preemptions_total") > 0
        assert server.metric("slipstream:prefix_cache_hits_total") > 0
    for got, (tokens, margins) in zip(found, expected, strict=True):
        same = next((k for k in range(40) if got[k] != tokens[k]), 40)
        assert len(got) == 40 and (same == 40 or margins[same] < 1e-3), (got, tokens)


def greedy(path, prompts: list[list[int]], count: int) -> list[tuple[list[int], list[float]]]:
    """transformers' greedy tokens of prompts of one length, and how far each was above the next best."""
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()
    out = model.generate(
        torch.tensor(prompts), max_new_tokens=count, do_sample=False, eos_token_id=None, return_dict_in_generate=True,
        output_logits=True,
    )  # fmt: skip
    best = torch.stack(out.logits, 1).topk(2).values  # [prompts, count, 2]
    tokens = out.sequences[:, len(prompts[0]) :].tolist()
    return list(zip(tokens, (best[..., 0] - best[..., 1]).tolist(), strict=True))
