"""The CUDA executor against the CPU's, on tiny models: tokens, log probabilities, errors; two steps in flight, no waiting call.

The story (drive.py) mixes chunks of prompts with decode rows, all kinds of sampling, masks, and rows that leave.
"""

import pathlib
import sys

import numpy as np
import pytest
import torch

sys.path.insert(0, str(pathlib.Path(__file__).parent))

import drive  # noqa: E402

LLAMA = drive.TINY | {
    "architectures": ["LlamaForCausalLM"], "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 80,
}  # fmt: skip
MODELS = {"qwen3, 9 and 3 heads of 64": drive.TINY, "llama, 8 and 2 heads of 80": LLAMA, **drive.FAMILIES}


def needs(gpus: int) -> None:
    if torch.cuda.device_count() < gpus:
        pytest.skip(f"{gpus} GPUs are needed")


@pytest.fixture(scope="module", params=MODELS, ids=str)
def case(request):
    """A model's path and what the CPU made of the story."""
    path = drive.write_config(MODELS[request.param])
    return path, drive.spread(1, drive.story, "cpu", path, "float32", False), request.param not in drive.FAMILIES


@pytest.mark.parametrize("eager", [False, True], ids=["graphs", "eager"])
@pytest.mark.parametrize("size", [1, 2])
def test_tokens_equal_the_cpus(case, size, eager):
    needs(size)
    path, cpu, dense = case
    if eager and not dense:
        pytest.skip("eager steps are judged by the dense models")
    tokens, logprobs, prompts, errors = drive.spread(size, drive.story, "cuda", path, "float32", eager)
    assert tokens == cpu[0]
    assert errors == cpu[3]
    for (i, k, mine), (j, m, theirs) in zip(logprobs, cpu[1], strict=True):
        assert (i, k, mine.top_ids, mine.rank) == (j, m, theirs.top_ids, theirs.rank)
        assert mine.logprob == pytest.approx(theirs.logprob, abs=1e-4)
    for (slot, (start, mine)), (other, (first, theirs)) in zip(prompts, cpu[2], strict=True):
        assert (slot, start, len(mine)) == (other, first, len(theirs))
        assert [p.logprob for p in mine] == pytest.approx([p.logprob for p in theirs], abs=1e-3)


def alone(rank: int, size: int, fd: int, scenario: str):
    from slipstream.config import EngineConfig

    path = drive.write_config(drive.TINY)
    config = EngineConfig(
        model=path, load_format="dummy", dtype="float32", max_num_seqs=8, max_num_batched_tokens=2112, max_model_len=1200,
        kv_cache_memory_bytes=1 << 26,
    )  # fmt: skip
    executor, _ = drive.open_executor("cuda", config, path, rank, size, fd)
    return {"padding": padding, "flights": flights, "eager": eager_steps}[scenario](
        executor, drive.Feeder(executor, executor.page_size)
    )


def padding(executor, feeder) -> bool:
    """FF-23: three rows run in a graph of four; the pages that nobody was given stay as they were."""
    for slot in range(3):
        feeder.init_slot(slot, np.arange(5) + slot, temperature=0.0)
    mine = {feeder.free[-1 - i] for i in range(3)}
    before = [(k.clone(), v.clone()) for k, v in executor.caches]
    feeder.step(np.zeros(0, np.int32), [(slot, 5, True) for slot in range(3)])
    decode = np.arange(3, dtype=np.int32)
    for _ in range(3):
        feeder.step(decode)
    feeder.drain()
    other = [p for p in range(1, len(before[0][0])) if p not in mine]
    return all(
        torch.equal(now[other], old[other])
        for pair, olds in zip(executor.caches, before, strict=True)
        for now, old in zip(pair, olds, strict=True)
    )


def flights(executor, feeder) -> bool:
    """FF-07: as many launches in flight as there are places; each keeps its own events and buffers until it was taken."""
    feeder.init_slot(0, np.arange(5), temperature=0.0)
    feeder.step(np.zeros(0, np.int32), [(0, 5, True)])
    decode = np.zeros(1, np.int32)
    for _ in range(100):
        feeder.step(decode, depth=8)
        flying = [id(f) for f in executor._flying]
        assert len(set(flying)) == len(flying) and not set(flying) & {id(f) for f in executor._free}
    feeder.drain()
    eight = feeder.tokens[0]
    feeder.init_slot(1, np.arange(5), temperature=0.0)
    feeder.step(np.zeros(0, np.int32), [(1, 5, True)])
    decode = np.ones(1, np.int32)
    for _ in range(100):
        feeder.step(decode, depth=1)
    feeder.drain()
    return eight == feeder.tokens[1] and len(eight) == 101


def eager_steps(executor, feeder) -> list[dict[str, int]]:
    """What each step adds to the counts: two chunks that are captured, plain rows, then each reason to run eager."""
    added, before = [], dict(executor.eager_steps)

    def step(*args, **more) -> None:
        nonlocal before
        feeder.step(*args, **more)
        now = dict(executor.eager_steps)
        added.append({reason: n - before[reason] for reason, n in now.items() if n != before[reason]})
        before = now

    nobody, mask = np.zeros(0, np.int32), np.full((1, -(-1031 // 32)), 0xFFFFFFFF, np.uint32)
    for slot, sampling in enumerate(
        ({}, {"temperature": 0.9, "seed": 1}, {"top_k": 5, "temperature": 0.5}, {"prompt_logprobs": 1})
    ):
        feeder.init_slot(slot, np.arange(1050) % 1031, **{"temperature": 0.0, **sampling})
    step(nobody, [(0, 1000, False), (1, 1000, False)])
    step(nobody, [(0, 50, True), (1, 50, True)])
    step(np.arange(2, dtype=np.int32))
    step(np.arange(2, dtype=np.int32), masks={0: mask})
    step(nobody, [(2, 1049, False), (3, 1049, False)])
    step(nobody, [(2, 1, True)])
    step(np.arange(3, dtype=np.int32))
    feeder.drain()
    return added


def test_steps_outside_captured_graphs_are_counted_by_reason():
    none: dict[str, int] = {}
    large = {"step_size": 1, "prompt_logprobs": 1}
    assert drive.spread(1, alone, "eager") == [none, none, none, {"grammar": 1}, large, {"sampling": 1}, {"sampling": 1}]


def test_ff23_padding_rows_write_to_no_request():
    assert drive.spread(1, alone, "padding") is True


def test_ff07_an_event_is_not_recorded_again_before_it_was_waited_for():
    assert drive.spread(1, alone, "flights") is True


def test_more_ranks_than_gpus_are_refused_by_name():
    from slipstream.device.cuda.memory import choose_device
    from slipstream.errors import ConfigError

    count = torch.cuda.device_count()
    with pytest.raises(ConfigError, match=f"--tensor-parallel-size {count + 1} needs {count + 1} GPUs"):
        choose_device(0, count + 1)


def test_a_model_that_does_not_fit_is_refused_with_the_arithmetic():
    from slipstream.config import EngineConfig
    from slipstream.device.cuda.memory import GIB, cache_memory
    from slipstream.device.memory import CacheNeeds
    from slipstream.errors import ConfigError
    from slipstream.log.caches import Paged

    needs = CacheNeeds((Paged(8, 128),), torch.bfloat16, 64, 8, 1024)

    with pytest.raises(ConfigError, match=r"GiB × --gpu-memory-utilization 0.9 = .* for weights"):
        cache_memory(EngineConfig(), needs, 900 * GIB, 900 * GIB, torch.device("cuda", 0))


def test_pages_of_layers_of_any_shape_come_back_from_the_host():
    from slipstream.device.cuda.offload import HostPages

    device = torch.device("cuda", 0)
    arrays = [torch.randn((41, *shape), device=device, dtype=torch.bfloat16) for shape in ((2, 16, 8), (2, 16, 8), (16, 24))]
    before = [a.clone() for a in arrays]
    host = HostPages(30, arrays, device)
    pages, to, back = tuple(range(1, 21)), tuple(range(25, 5, -1)), tuple(range(40, 20, -1))
    host.save(pages, to)
    for a in arrays:
        a[1:21] = -1.0
    host.load(to, back)
    for a, old in zip(arrays, before, strict=True):
        assert torch.equal(a[list(back)], old[list(pages)]) and torch.equal(a[0], old[0]) and (a[1:21] == -1.0).all()
    assert host.seconds() > 0 and HostPages(0, arrays, device).seconds() == 0 == HostPages(4, [], device).seconds()


def test_state_is_copied_to_snapshots_and_back_in_order():
    from slipstream.device.state import SlotState
    from slipstream.log.caches import Paged, PerSlot, StateArray

    layouts = (Paged(1, 16), PerSlot((StateArray((4, 3), "float32"), StateArray((2,), "bfloat16"))))
    state = SlotState(layouts, 3, 2, torch.device("cuda", 0))
    assert list(state.arrays) == [1] and [tuple(a.shape) for a in state.arrays[1]] == [(4, 4, 3), (4, 2)]
    for a in state.arrays[1]:
        a[1] = 7.0
    state.save(((1, 2),))
    state.set(0, 2)
    state.set(1, 0)
    for a in state.arrays[1]:
        assert (a[0] == 7.0).all() and not a[1:].any()
