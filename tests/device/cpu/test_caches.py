"""State, snapshots, windows, page tables and copies to the host on the CPU device, under a model that has all of them."""

import numpy as np
import pytest
import torch

from slipstream.config import EngineConfig
from slipstream.device.cpu.executor import CpuExecutor
from slipstream.models import registry
from slipstream.ops.collective import Solo
from slipstream.shard import Shard
from slipstream.weights.checkpoint import open_checkpoint
from tests.device.groups import Group, request
from tests.device.toy_model import WINDOW, Stateful, Toy, write_config
from tests.helpers.checkpoints import tiny_llama

PROMPT = np.random.default_rng(4).integers(3, 300, 48).tolist()
OTHER = np.random.default_rng(5).integers(3, 300, 90).tolist()
SEED = 1  # of weights under which the answer does not repeat itself
FULL, WINDOWED = 0, 1  # page tables: without a window first


@pytest.fixture
def toy(monkeypatch, tmp_path):
    monkeypatch.setitem(registry.ARCHITECTURES, "ToyForCausalLM", Toy)
    return write_config(tmp_path)


def group(path, size: int = 1, **fields) -> Group:
    return Group(path, size, slots=4, max_len=128, load_format="dummy", seed=SEED, **fields)


def tokens_after(g: Group, slot: int, start: int, count: int = 6) -> list[int]:
    """Greedy tokens of a slot that has computed positions [0, start), its last token known."""
    out = []
    for at in range(start, start + count):
        g.launch([(slot, at, 1, True)])
        out.append(int(g.outcome().tokens[0, 0]))
    return out


def prefill(g: Group, slot: int, prompt: list[int], chunks: list[int], saves: dict[int, int] | None = None) -> list[int]:
    """Computes a prompt in chunks that end at the given positions; `saves`: snapshot by end. Returns what it sampled."""
    g.init_slot(slot, request(slot, prompt, 30))
    pages, start, out = g.pages([slot]), 0, []
    for end in chunks:
        saved = ((slot, saves[end]),) if saves and end in saves else ()
        g.launch([(slot, start, end - start, end == len(prompt))], pages if not start else g.pages([]), saved)
        out += g.outcome().tokens[:, 0].tolist()
        start = end
    return out


@pytest.fixture
def expected(toy) -> list[int]:
    with group(toy) as g:
        return g.generate([PROMPT], 10)[0][0]


def test_a_model_whose_first_layer_has_no_attention_gives_one_answer_in_any_chunks_and_batch(toy, expected):
    assert len(set(expected)) > 4
    with group(toy) as g:
        for chunk in (1, 7, 16, 33):
            assert g.generate([PROMPT], 10, chunk=chunk)[0][0] == expected
        others = g.generate([OTHER, PROMPT, OTHER[:5]], 10, chunk=20, joins=[0, 2, 1], slots=[2, 0, 3])[0]
        assert others[1] == expected


@pytest.mark.parametrize("size", [2, 3])
def test_state_and_tables_are_split_over_ranks(toy, expected, size: int):
    with group(toy, size) as g:
        assert sum(rank.state.arrays[0][0].shape[1] for rank in g.ranks) == 48
        assert g.generate([PROMPT], 10, chunk=13)[0][0] == expected


def test_a_slots_next_owner_begins_with_zeros(toy, expected):
    with group(toy) as g:
        g.generate([OTHER], 3)
        assert g.generate([PROMPT], 10)[0][0] == expected


def test_a_model_without_attention_is_built_and_has_no_page_table(monkeypatch, tmp_path):
    monkeypatch.setitem(registry.ARCHITECTURES, "ToyForCausalLM", Stateful)
    path = write_config(tmp_path)
    with group(path) as g:
        assert g.limits.tables == () and g.ranks[0].model.attentions == ()
        assert g.ranks[0].capacity().limits.tables == ()
        assert g.generate([PROMPT], 5, chunk=9)[0] == g.generate([PROMPT], 5)[0]


def test_a_request_goes_on_from_a_snapshot_and_shared_pages_as_if_it_had_computed_them(toy, expected):
    with group(toy, snapshots=3) as g:
        assert prefill(g, 0, PROMPT, [32, 48], {32: 2}) == expected[:1]
        for state, same in ((2, True), (0, False), (3, False)):  # a place that nothing was saved to holds zeros
            g.init_slot(1, request(1, PROMPT, 30))
            g.ranks[0].set_state(1, state)
            shared = g.pages([0, 1])
            shared = shared[(shared[:, 1] == 1) & (shared[:, 2] >= 2) | (shared[:, 1] == 0) & (shared[:, 2] < 2)]
            shared[:, 1] = 1  # its first two pages are the other slot's
            g.launch([(1, 32, 16, True)], shared)
            found = [int(g.outcome().tokens[0, 0]), *tokens_after(g, 1, 48)]
            assert (found == expected[:7]) is same
        assert g.ranks[0].state.arrays[0][1][1].item() == 48 + 6 - 32, "the last one began with zeros at position 32"


def test_a_snapshot_is_of_the_state_after_its_step_and_later_steps_leave_it_alone(toy):
    with group(toy, snapshots=1) as g:
        prefill(g, 0, PROMPT, [16, 48], {16: 1})
        g.ranks[0].set_state(2, 1)
        tokens_after(g, 0, 48, 2)
        counts = g.ranks[0].state.arrays[0][1]
        assert (counts[0].item(), counts[2].item()) == (50, 16)


def test_pages_that_a_window_has_left_may_be_anothers(toy, expected):
    with group(toy) as g:
        assert prefill(g, 0, PROMPT, [48]) == expected[:1]
        left = (48 - WINDOW) // g.page_size  # columns that no row of slot 0 reads again
        assert left
        mine = g.pages([0])
        given = mine[(mine[:, 0] == WINDOWED) & (mine[:, 2] < left)]
        given[:, 1] = 1
        g.init_slot(1, request(1, OTHER[:16], 30))
        g.launch([(1, 0, 16, True)], np.concatenate([g.pages([1]), given]))
        g.outcome()
        assert tokens_after(g, 0, 48) == expected[1:7]


@pytest.mark.parametrize("size", [1, 2])
def test_a_preempted_requests_pages_come_back_by_table(toy, expected, size: int):
    with group(toy, size, snapshots=1, host_pages=5) as g:
        prefill(g, 0, PROMPT[:32], [32], {32: 1})
        places = g.pages([0])
        host = {FULL: (4, 0), WINDOWED: (1, 3)}
        pages = {t: places[(places[:, 0] == t) & (places[:, 2] < 2)][:, 3].tolist() for t in host}
        for rank in g.ranks:
            for table, to in host.items():
                rank.offload(table, tuple(pages[table]), to)
        prefill(g, 0, OTHER, [64, 90])  # overwrites the pages and the state
        target = g.pages([2])
        g.init_slot(2, request(2, PROMPT, 30))
        for rank in g.ranks:
            rank.set_state(2, 1)
            for table, origin in host.items():
                into = target[(target[:, 0] == table) & (target[:, 2] < 2)][:, 3].tolist()
                rank.restore(table, origin, tuple(into))
        g.launch([(2, 32, 16, True)], target)
        assert [int(g.outcome().tokens[0, 0]), *tokens_after(g, 2, 48)] == expected[:7]


def test_capacity_counts_state_snapshots_and_the_pages_of_both_tables(toy):
    config = EngineConfig(
        dtype="float32", max_num_seqs=4, max_model_len=128, load_format="dummy", kv_cache_memory_bytes=200_000,
        kv_cache_dtype="bfloat16", kv_offload_memory_bytes=50_000,
    )  # fmt: skip
    executor = CpuExecutor(open_checkpoint(toy, "dummy"), config, Shard(), Solo())
    limits = executor.capacity().limits
    state, page = 48 * 4 + 4, 16 * 2 * 3 * 8 * 2
    full, windowed = limits.tables
    assert (limits.snapshots, limits.snapshot_tokens) == (8, 256)
    assert (full.window, windowed.window, windowed.pages) == (0, WINDOW, 4 * 3 + 8)
    assert full.pages == (200_000 - (6 + 8) * state - windowed.pages * page) // page
    assert (full.host_pages + windowed.host_pages) * page <= 50_000
    executor.start(limits)
    assert [[tuple(a.shape) for a in arrays] for arrays in executor.caches] == [
        [(5, 48), (5, 1)], [(windowed.pages + 1, 16, 6, 8)], [(full.pages + 1, 16, 6, 8)]
    ]  # fmt: skip
    assert [a.dtype for arrays in executor.caches for a in arrays] == [
        torch.float32, torch.int32, torch.bfloat16, torch.bfloat16
    ]  # fmt: skip
    executor.close()


@pytest.mark.parametrize("stored", ["bfloat16", "float16"])
def test_the_caches_dtype_is_its_own(stored: str):
    """Answers differ a little from those of a wider cache, and not at all with the chunks of the prompt."""
    prompt = OTHER[:70]
    with Group(tiny_llama()) as wide, Group(tiny_llama(), kv_cache_dtype=stored) as narrow:
        assert {a.dtype for arrays in narrow.ranks[0].caches for a in arrays} == {getattr(torch, stored)}
        assert {a.dtype for arrays in wide.ranks[0].caches for a in arrays} == {torch.float32}
        wide.generate([prompt], 8)
        found = [narrow.generate([prompt], 8, chunk=chunk)[0][0] for chunk in (100, 16, 1)]
        assert found[0] == found[1] == found[2]
        pages = [next(a for arrays in g.ranks[0].caches for a in arrays).float() for g in (wide, narrow)]
        assert torch.allclose(*pages, atol=0.05) and not torch.equal(*pages)
