"""Decoders with recurrent state against transformers in float32, and through executors that move their state about."""

import json
import threading

import numpy as np
import pytest
import torch
import transformers

from slipstream.device.cpu.memory import page_arrays
from slipstream.device.state import SlotState
from slipstream.errors import ModelError
from slipstream.log.caches import windows
from slipstream.models.registry import build
from slipstream.ops.cpu.ops import PlainOps
from slipstream.ops.cpu.paged import build_step
from slipstream.shard import Shard
from slipstream.weights.checkpoint import open_checkpoint
from slipstream.weights.dummy import DummyCheckpoint
from tests.device.groups import Group, collectives, request
from tests.helpers import checkpoints
from tests.helpers.checkpoints import tiny_qwen3_5 as qwen

LENGTHS = (300, 1, 77)
PROMPTS = [np.random.default_rng(3).integers(3, 300, n).astype(np.int32) for n in LENGTHS]
BLOCK, COLUMNS = 16, 19

NEMOTRON = {
    "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "layers_block_type": ["linear_attention", "mlp", "full_attention", "linear_attention"], "mamba_num_heads": 6,
    "mamba_head_dim": 16, "n_groups": 3, "ssm_state_size": 16, "use_bias": True, "mamba_ssm_cache_dtype": "float32",
}  # fmt: skip


def nemotron():
    return checkpoints._folder("nemotron_h", json.dumps(NEMOTRON, sort_keys=True))


def nemotron_moe():
    """Also two groups of experts of which one is chosen, and one layer of each kind."""
    fields = {"layers_block_type": ["linear_attention", "moe", "full_attention", "mlp", "linear_attention", "moe"]}
    fields |= {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 20, "n_group": 4, "topk_group": 2}
    fields |= {"moe_shared_expert_intermediate_size": 28, "routed_scaling_factor": 2.5, "mlp_bias": True}
    return checkpoints.tiny("nemotron_h", **{**NEMOTRON, **fields})


GRANITE = {
    "hidden_size": 64, "intermediate_size": 20, "shared_intermediate_size": 28, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 6, "num_experts_per_tok": 2,
    "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"], "mamba_n_heads": 8,
    "mamba_d_state": 16, "embedding_multiplier": 12.0, "residual_multiplier": 0.22, "attention_multiplier": 0.0625,
    "logits_scaling": 0.5, "rms_norm_eps": 1e-3, "time_step_limit": (0.01, 1.5),
}  # fmt: skip


def granite():
    """One group of heads, all of which rank 0 then holds."""
    return checkpoints.tiny("granitemoehybrid", **GRANITE, seed=3)


def granite_dense():
    """Without experts, with rotation, and with two groups."""
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    fields = {"num_local_experts": 0, "position_embedding_type": "rope", "rope_parameters": rope, "mamba_n_groups": 2}
    return checkpoints.tiny("granitemoehybrid", **{**GRANITE, **fields}, mamba_proj_bias=True)


QWEN_MOE = {
    "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
    "linear_num_key_heads": 2, "linear_num_value_heads": 6, "linear_key_head_dim": 16, "linear_value_head_dim": 24,
    "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 20, "shared_expert_intermediate_size": 28,
}  # fmt: skip


def qwen_moe():
    rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25, "mrope_section": [2, 1, 1]}
    return checkpoints.tiny("qwen3_5_moe_text", **QWEN_MOE, rope_parameters=rope)


def qwen_next():
    return checkpoints.tiny("qwen3_next", **QWEN_MOE, mlp_only_layers=[1], intermediate_size=96)


FAMILIES = {
    "Qwen3.5": qwen,
    "Nemotron-H": nemotron,
    "Nemotron-H, experts": nemotron_moe,
    "Qwen3.5-MoE": qwen_moe,
    "Qwen3-Next": qwen_next,
    "Granite 4": granite,
    "Granite 4, dense": granite_dense,
}


def reference(path) -> list[torch.Tensor]:
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    with torch.inference_mode():
        return [model(torch.from_numpy(p.astype(np.int64))[None]).logits[0].log_softmax(-1) for p in PROMPTS]


def run_rank(checkpoint, shard: Shard, collective, chunk: int) -> list[torch.Tensor]:
    """This rank's logits of every position of every prompt: all prompts in one step after another of `chunk` tokens each."""
    with torch.inference_mode():
        model = build(checkpoint, PlainOps(torch.float32, shard, collective))
        places = (1 + np.random.default_rng(0).permutation(len(PROMPTS) * COLUMNS)).astype(np.int32)
        tables = places.reshape(1, -1, COLUMNS)[: len(windows(model.caches))]
        state = SlotState(model.caches, len(PROMPTS), 0, torch.device("cpu")).arrays
        caches = [
            state.get(i) or page_arrays(c, places.size + 1, BLOCK, torch.float32) if c else ()
            for i, c in enumerate(model.caches)
        ]
        out = [[] for _ in PROMPTS]
        for start in range(0, max(LENGTHS), chunk):
            rows = [i for i, n in enumerate(LENGTHS) if n > start]
            counts = np.array([min(chunk, LENGTHS[i] - start) for i in rows])
            ids = np.concatenate([PROMPTS[i][start : start + n] for i, n in zip(rows, counts, strict=True)])
            starts = np.full(len(rows), start)
            step = build_step(ids, np.array(rows), starts, counts, tables, windows(model.caches), caches, torch.float32, BLOCK)
            parts = model.logits(model.forward(step), step).split(counts.tolist())
            for i, part in zip(rows, parts, strict=True):
                out[i].append(part)
        return [torch.cat(o) for o in out]


def run(path, size: int, chunk: int) -> list[torch.Tensor]:
    checkpoint, sums = open_checkpoint(path), collectives(size, 1 << 18)
    found = [None] * size

    def work(rank):
        found[rank] = run_rank(checkpoint, Shard(rank, size), sums[rank], chunk)

    threads = [threading.Thread(target=work, args=(r,), daemon=True) for r in range(size)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(60)
    return [torch.cat(parts, dim=1).log_softmax(-1) for parts in zip(*found, strict=True)]


@pytest.mark.parametrize("name", FAMILIES)
def test_log_probabilities_equal_transformers(name):
    path = FAMILIES[name]()
    expected = reference(path)
    for size, chunk in ((1, 16), (2, 64), (3, 1000)):
        for a, b in zip(run(path, size, chunk), expected, strict=True):
            assert torch.allclose(a, b, atol=2e-4, rtol=0), (size, chunk, (a - b).abs().max())


@pytest.mark.parametrize("name", FAMILIES)
def test_greedy_tokens_survive_preemption_offload_and_a_snapshot(name):
    """Slot 0 computes a prompt; its state and pages then go to a snapshot and the host, and to other slots."""
    prompt = PROMPTS[2][:48].tolist()
    with Group(FAMILIES[name](), slots=4, max_len=128, snapshots=2, host_pages=4) as g:
        expected = g.generate([prompt], 12)[0][0]
        assert len(set(expected)) > 4
        g.generate([PROMPTS[0][:90].tolist()], 3)  # leaves its state in the slot
        assert g.generate([prompt], 12, chunk=7)[0][0] == expected, "the next owner of a slot begins with zeros"
        rank, places = g.ranks[0], g.pages([0])
        g.init_slot(0, request(0, prompt, 30))
        g.launch([(0, 0, 32, False)], places, ((0, 1),))
        g.outcome()
        pages = tuple(places[places[:, 2] < 2][:, 3].tolist())
        rank.offload(0, pages, (2, 0))
        g.generate([PROMPTS[0][:90].tolist()], 3)  # overwrites state and pages
        for slot in (1, 2):  # two go on from one snapshot in one step
            g.init_slot(slot, request(slot, prompt, 30))
            rank.set_state(slot, 1)
        targets = g.pages([1, 2])
        for slot in (1, 2):
            into = targets[(targets[:, 1] == slot) & (targets[:, 2] < 2)][:, 3].tolist()
            rank.restore(0, (2, 0), tuple(into))
        g.launch([(1, 32, 16, True), (2, 32, 16, True)], targets)
        found = [g.outcome().tokens[:, 0].tolist()]
        for at in range(48, 59):
            g.launch([(1, at, 1, True), (2, at, 1, True)])
            found.append(g.outcome().tokens[:, 0].tolist())
        assert [list(row) for row in zip(*found, strict=True)] == [expected, expected]


@pytest.mark.parametrize("name", FAMILIES)
def test_two_requests_with_one_prefix_in_one_step_have_states_of_their_own(name):
    prefix = PROMPTS[0][:40].tolist()
    prompts = [prefix + [7, 9], prefix + [11], prefix]
    with Group(FAMILIES[name](), slots=4, max_len=128) as g:
        alone = [g.generate([p], 8)[0][0] for p in prompts]
        assert g.generate(prompts, 8)[0] == alone
        assert g.generate(prompts, 8, chunk=13, joins=[0, 1, 1])[0] == alone


def test_ranks_split_the_state_and_agree():
    with Group(qwen(), size=3, slots=4, max_len=128, snapshots=2) as g, Group(qwen(), slots=4, max_len=128) as one:
        heads = [rank.state.arrays[0][1].shape[1] for rank in g.ranks]
        assert sum(heads) == 6 and min(heads) > 0
        prompt = PROMPTS[2][:30].tolist()
        assert g.generate([prompt], 8, chunk=9)[0] == one.generate([prompt], 8)[0]


def composite(tiny, kind: str, folder):
    """The text of a composite checkpoint, beside tensors of its vision tower and of its heads that draft tokens."""
    from safetensors.torch import load_file, save_file

    config = json.loads((tiny() / "config.json").read_text())
    tensors = one_by_one(load_file(tiny() / "model.safetensors"))
    named = {n.replace("model.", "model.language_model.", 1) if n.startswith("model.") else n: t for n, t in tensors.items()}
    named |= {"model.visual.patch_embed.proj.weight": torch.ones(2, 2), "mtp.fc.weight": torch.ones(2, 2)}
    save_file(named, folder / "model.safetensors")
    whole = {"architectures": [kind], "model_type": "qwen3_5", "text_config": config}
    whole |= {"vision_config": {"depth": 2}, "image_token_id": 300, "tie_word_embeddings": False}
    (folder / "config.json").write_text(json.dumps(whole))
    return folder


def one_by_one(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Experts that are stored as one tensor, as many files have them: each by itself."""
    found = {}
    for name, tensor in tensors.items():
        prefix, _, last = name.rpartition(".")
        if not prefix.endswith(".experts"):
            found[name] = tensor
            continue
        for e, expert in enumerate(tensor):
            parts = expert.chunk(2) if last == "gate_up_proj" else (expert,)
            layers = ("gate_proj", "up_proj") if last == "gate_up_proj" else (last,)
            found |= {f"{prefix}.{e}.{layer}.weight": part.clone() for layer, part in zip(layers, parts, strict=True)}
    return found


@pytest.mark.parametrize("kind, tiny", [("Qwen3_5", qwen), ("Qwen3_5Moe", qwen_moe)])
def test_a_composite_checkpoint_loads_as_text(kind, tiny, tmp_path):
    folder = composite(tiny, kind + "ForConditionalGeneration", tmp_path)
    for a, b in zip(run(folder, 1, 1000), run(tiny(), 1, 1000), strict=True):
        assert torch.equal(a, b)


def test_a_config_that_contradicts_itself_is_refused_by_name():
    config = json.loads((qwen() / "config.json").read_text())
    for fields, said in (
        ({"layer_types": ["full_attention"]}, "layer_types names 1 layers, and num_hidden_layers is 4"),
        ({"layer_types": ["mamba"] * 4}, "'mamba' of layer 0"),
        ({"linear_num_value_heads": 5}, "linear_num_value_heads 5 is not a multiple of linear_num_key_heads 2"),
        ({"output_gate_type": "swish"}, "output_gate_type: 'swish'"),
    ):
        with pytest.raises(ModelError, match=said):
            build(DummyCheckpoint(qwen(), {**config, **fields}, 0), PlainOps(torch.float32))
    config = json.loads((qwen_moe() / "config.json").read_text())
    with pytest.raises(ModelError, match="norm_topk_prob is false"):
        build(DummyCheckpoint(qwen_moe(), {**config, "norm_topk_prob": False}, 0), PlainOps(torch.float32))


def test_the_shape_of_a_released_model_builds_with_random_weights():
    """Qwen3.5-9B's config with a 32nd of its sizes, and one period of its layers."""
    rope = {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25, "mrope_section": [11, 11, 10]}
    config = {
        "architectures": ["Qwen3_5ForCausalLM"], "dtype": "bfloat16", "vocab_size": 7760, "hidden_size": 128,
        "intermediate_size": 384, "num_hidden_layers": 4, "num_attention_heads": 16, "num_key_value_heads": 4,
        "hidden_act": "silu", "max_position_embeddings": 65536, "initializer_range": 0.02, "rms_norm_eps": 1e-6,
        "use_cache": True, "tie_word_embeddings": False, "rope_parameters": rope | {"mrope_interleaved": True},
        "attention_bias": False, "attention_dropout": 0.0, "head_dim": 16, "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_num_key_heads": 16, "linear_num_value_heads": 32,
        "layer_types": ["linear_attention"] * 3 + ["full_attention"], "pad_token_id": None, "eos_token_id": 248044,
        "model_type": "qwen3_5_text",
    }  # fmt: skip
    model = build(DummyCheckpoint(qwen(), config, 0), PlainOps(torch.bfloat16), 256)
    assert [type(layout).__name__ for layout in model.caches] == ["PerSlot"] * 3 + ["Paged"]
    assert [(a.shape, a.dtype) for a in model.caches[0].arrays] == [((3, 512), "bfloat16"), ((32, 8, 8), "float32")]


@pytest.mark.parametrize(
    "pattern, said",
    [("M*-X", "'X' of layer 3 is not supported"), ("M*-", "layers_block_type names 3 layers, and num_hidden_layers is 4")],
)
def test_layers_of_nemotron_h_that_cannot_run_are_refused_by_name(pattern, said):
    config = json.loads((nemotron() / "config.json").read_text())
    del config["layers_block_type"]
    config |= {"hybrid_override_pattern": pattern, "num_hidden_layers": 4}
    with pytest.raises(ModelError, match=said):
        build(DummyCheckpoint(nemotron(), config, 0), PlainOps(torch.float32))


@pytest.mark.parametrize(
    "tiny, fields, said",
    [
        (nemotron_moe, {"moe_latent_size": 32}, "moe_latent_size is 32"),
        (nemotron_moe, {"topk_group": 5}, "n_group is 4 and topk_group 5, which do not fit 8 experts"),
        (nemotron, {"n_groups": 4}, "mamba_num_heads 6 is not a multiple of n_groups 4"),
        (granite, {"residual_multiplier": 0.0}, "residual_multiplier is 0.0; it must be a number above 0"),
        (granite, {"mamba_d_head": 8}, "mamba_n_heads 8 heads of mamba_d_head 8 are not .* hidden_size, 128"),
        (granite, {"position_embedding_type": "alibi"}, "position_embedding_type 'alibi'"),
    ],
)
def test_numbers_of_mixers_and_experts_that_cannot_be_are_refused_by_name(tiny, fields, said):
    config = json.loads((tiny() / "config.json").read_text())
    with pytest.raises(ModelError, match=said):
        build(DummyCheckpoint(tiny(), {**config, **fields}, 0), PlainOps(torch.float32))


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_is_made_of_random_weights(name):
    folder = FAMILIES[name]()
    config = json.loads((folder / "config.json").read_text())
    assert build(DummyCheckpoint(folder, config, 0), PlainOps(torch.float32)).vocab == 320
