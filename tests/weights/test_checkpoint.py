"""Safetensors folders and random weights."""

import json
import pathlib
import shutil

import pytest
import torch

from slipstream.errors import ModelError
from slipstream.weights.checkpoint import open_checkpoint
from slipstream.weights.config import load_config
from tests.helpers.checkpoints import tiny_llama, tiny_qwen3

Q = "model.layers.1.self_attn.q_proj.weight"


def reference(folder: pathlib.Path) -> dict:
    from safetensors.torch import load_file

    return load_file(folder / "model.safetensors")


@pytest.fixture
def sharded(tmp_path):
    """A tiny Llama in two files behind an index."""
    from safetensors.torch import save_file

    source = tiny_llama()
    tensors = reference(source)
    names = sorted(tensors)
    parts = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for file, part in parts.items():
        save_file({n: tensors[n] for n in part}, tmp_path / file)
    index = {"weight_map": {n: file for file, part in parts.items() for n in part}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    shutil.copy(source / "config.json", tmp_path)
    return tmp_path


@pytest.mark.parametrize("make", [tiny_llama, tiny_qwen3])
def test_a_folder_gives_every_tensor_and_every_part(make):
    folder = make()
    tensors, checkpoint = reference(folder), open_checkpoint(folder)
    assert sorted(checkpoint.names()) == sorted(tensors)
    for name, value in tensors.items():
        assert checkpoint.shape(name) == tuple(value.shape)
        assert torch.equal(checkpoint.tensor(name, tuple(value.shape)), value)
    value = tensors[Q]
    assert torch.equal(checkpoint.tensor(Q, rows=(16, 48), cols=(3, 9)), value[16:48, 3:9])
    assert torch.equal(checkpoint.tensor("model.norm.weight", rows=(1, 5)), tensors["model.norm.weight"][1:5])
    half = checkpoint.tensor(Q, cols=(0, 32), dtype=torch.bfloat16)
    assert half.is_contiguous() and torch.equal(half, value[:, :32].bfloat16())


def test_a_sharded_folder_reads_the_same(sharded):
    tensors, checkpoint = reference(tiny_llama()), open_checkpoint(sharded)
    assert all(torch.equal(checkpoint.tensor(n), v) for n, v in tensors.items())


def test_an_index_cannot_point_out_of_its_folder(sharded):
    index = sharded / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {Q: "../secret.safetensors"}}))
    with pytest.raises(ModelError, match="same folder"):
        open_checkpoint(sharded)


def test_what_cannot_be_read_says_why(tmp_path):
    with pytest.raises(ModelError, match="config.json"):
        open_checkpoint(tmp_path)
    (tmp_path / "config.json").write_text("{not json")
    with pytest.raises(ModelError, match="not JSON"):
        open_checkpoint(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelError, match="no \\*.safetensors"):
        open_checkpoint(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ModelError, match="pickled weights are never read"):
        open_checkpoint(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 100)
    with pytest.raises(ModelError, match="model.safetensors"):
        open_checkpoint(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": {"quant_method": "fp8"}}))
    with pytest.raises(ModelError, match="fp8"):
        open_checkpoint(tmp_path)
    with pytest.raises(ModelError, match="does not fit"):
        open_checkpoint(tmp_path, "gguf")


def test_missing_tensors_and_wrong_shapes_are_named():
    checkpoint = open_checkpoint(tiny_llama())
    with pytest.raises(ModelError, match="no tensor nothing"):
        checkpoint.tensor("nothing")
    with pytest.raises(ModelError, match="the config asks for"):
        checkpoint.tensor(Q, (1, 2))
    with pytest.raises(ValueError, match="does not lie within"):
        checkpoint.tensor(Q, rows=(0, 10_000))
    with pytest.raises(ValueError, match="no columns"):
        checkpoint.tensor("model.norm.weight", cols=(0, 1))


def test_both_spellings_of_rotary_parameters(tmp_path):
    def config(**fields):
        (tmp_path / "config.json").write_text(json.dumps(fields))
        return load_config(tmp_path)

    assert config(rope_parameters={"rope_theta": 5.0, "rope_type": "default"})["rope_theta"] == 5.0
    assert config(rope_theta=5.0)["rope_parameters"] == {"rope_theta": 5.0, "rope_type": "default"}
    old = config(rope_theta=5.0, rope_scaling={"type": "linear", "factor": 2.0})
    assert old["rope_parameters"] == {"rope_theta": 5.0, "rope_type": "linear", "factor": 2.0}


def dummy(seed: int = 0):
    return open_checkpoint(tiny_llama() / "config.json", "dummy", seed)


def test_random_weights_are_the_same_for_every_slicing():
    shape = (300, 70)
    whole = dummy().tensor("x.weight", shape)
    for rows, cols in [((0, 300), (0, 35)), ((17, 203), (35, 70)), ((299, 300), (69, 70))]:
        part = dummy().tensor("x.weight", shape, rows=rows, cols=cols)
        assert torch.equal(part, whole[slice(*rows), slice(*cols)])
    experts = dummy().tensor("mlp.experts.gate_up_proj", (4, 6, 5))
    assert torch.equal(dummy().tensor("mlp.experts.gate_up_proj", (4, 6, 5), rows=(1, 3), cols=(2, 4)), experts[1:3, 2:4])
    part = dummy().tensor("mlp.experts.gate_up_proj", (4, 6, 5), cols=(2, 4), inner=(1, 4))
    assert torch.equal(part, experts[:, 2:4, 1:4])
    bias = dummy().tensor("x.bias", (50,))
    assert torch.equal(dummy().tensor("x.bias", (50,), rows=(7, 20)), bias[7:20])


def test_random_weights_do_not_depend_on_how_they_are_made(monkeypatch):
    from slipstream.weights import dummy as module

    whole = dummy().tensor("x.weight", (300, 70))
    monkeypatch.setitem(module._CHUNK, "cpu", 100)
    assert torch.equal(dummy().tensor("x.weight", (300, 70)), whole)


def test_random_weights_differ_by_seed_and_name_and_have_their_scale():
    a, b, c = dummy().tensor("a", (512, 256)), dummy().tensor("b", (512, 256)), dummy(1).tensor("a", (512, 256))
    for x in (a, b, c):
        assert abs(x.std().item() * 16 - 1.2) < 0.01 and abs(x.mean().item()) < 0.002
        lines = torch.corrcoef(x[:64])
        assert (lines - torch.eye(64)).abs().max() < 0.35  # 256 samples: five deviations are 0.31
    for x, y in ((a, b), (a, c), (b, c)):
        assert abs(torch.corrcoef(torch.stack((x.flatten(), y.flatten())))[0, 1]) < 0.02
    assert torch.equal(dummy().tensor("model.norm.weight", (96,)), torch.ones(96))


def test_random_weights_need_a_shape_and_read_only_the_config():
    checkpoint = dummy()
    assert checkpoint.architecture == "LlamaForCausalLM" and checkpoint.has("anything") and checkpoint.names() == []
    assert checkpoint.tensor("a", (4, 6), dtype=torch.bfloat16).dtype == torch.bfloat16
    with pytest.raises(ModelError, match="the shape that is asked for"):
        checkpoint.tensor("a")
