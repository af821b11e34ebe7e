"""What of the CUDA device needs no GPU: padding, capture failures, and that nothing is tuned by a rank's own clock."""

import pathlib
import types

import numpy as np
import pytest
import torch

from slipstream.device.cuda import graphs
from slipstream.errors import ConfigError
from slipstream.log.batch import Batch

ROOT = pathlib.Path(graphs.__file__).parents[2]


def test_ff18_a_failed_capture_stops_the_start_with_its_reason(monkeypatch):
    class Graph:
        def capture_begin(self, **_):
            pass

        def capture_end(self):
            pass

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)

    def work(size):
        if size == 4:
            raise RuntimeError("operation not permitted when stream is capturing")

    with pytest.raises(ConfigError, match="size 4 failed: operation not permitted.*--enforce-eager"):
        graphs.Graphs(types.SimpleNamespace(), eager=False).capture("decode", [1, 2, 4], work)


def test_eager_runs_only_where_it_was_asked_for(monkeypatch):
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    done = []
    eager = graphs.Graphs(types.SimpleNamespace(), eager=True)
    eager.capture("decode", [1, 2], done.append)
    eager.run("decode", 2)
    assert done == [2]


def test_decode_sizes_are_those_of_the_design():
    assert graphs.decode_buckets(32) == [1, 2, 4, 8, 16, 24, 32]
    assert graphs.decode_buckets(1) == [1]
    assert graphs.padded([1, 2, 4, 8], 5) == 8
    assert graphs.padded([1, 2, 4, 8], 9) is None


def test_a_mixed_step_of_the_planners_size_is_captured_without_padding():
    from slipstream.schedule.budget import sizes

    assert set(sizes(2048)) <= set(graphs.token_buckets(2048))
    assert graphs.token_buckets(8192)[-1] == graphs.MAX_CAPTURED_TOKENS


def test_ff19_no_kernel_is_tuned_by_local_timing():
    for path in (ROOT / "ops").rglob("*.py"):
        assert "autotune" not in path.read_text(), path


def test_ff23_padding_rows_name_nobody():
    """Nobody's page table is all zeros, so what padding rows write goes to page 0, which is given to no request."""
    pytest.importorskip("triton", reason="the tables' module launches kernels")
    from slipstream.device.cuda.tables import Layout, StepInputs
    from slipstream.ops.cuda.prompt_blocks import Cutter

    layout = Layout(tokens=256, judged=8, parts=80)
    inputs = StepInputs(layout, Cutter(4, 132), 1, torch.device("cpu"))
    host = torch.full((layout.size,), 7, dtype=torch.int32)
    buffers = types.SimpleNamespace(inputs=host, inputs_view=host.numpy())
    column = lambda *values: np.array(values, np.int32)
    batch = Batch(0, column(3, 1, 2), column(9, 30, 0), column(1, 1, 150), column(1, 1, 0), 1, 2, np.zeros((0, 4), np.int32))
    inputs.upload_step(batch, 160, 8, buffers)
    assert inputs.slots[:160].tolist() == [3, 1] + [2] * 150 + [8] * 8
    assert inputs.positions[:160].tolist() == [9, 30, *range(150), *[0] * 8]
    assert inputs.sample_slot.tolist() == [3, 1] + [8] * 6
    assert inputs.sample_position[:2].tolist() == [10, 31]
    assert inputs.parts[:18].tolist() == [2, 128, 130, 22, 0, 2, 1, 0, 0, 2, 0, 2, 128, 0, 1, 1, 0, 0]
    assert inputs.counts[:3].tolist() == [2, 2, 0]


def test_a_row_has_a_place_for_each_token_that_it_may_give():
    """At width 3, a row that verifies two drafts takes all of its places, one that samples once takes the first."""
    pytest.importorskip("triton", reason="the tables' module launches kernels")
    from slipstream.device.cuda.tables import Layout, StepInputs
    from slipstream.ops.cuda.prompt_blocks import Cutter

    layout = Layout(tokens=64, judged=12, parts=80)
    inputs = StepInputs(layout, Cutter(4, 132), 3, torch.device("cpu"))
    host = torch.full((layout.size,), 7, dtype=torch.int32)
    buffers = types.SimpleNamespace(inputs=host, inputs_view=host.numpy())
    column = lambda *values: np.array(values, np.int32)
    batch = Batch(
        0, column(2, 0, 1, 3), column(9, 30, 0, 5), column(3, 1, 4, 8), column(3, 1, 1, 0), 3, 2, np.zeros((0, 4), np.int32)
    )
    inputs.upload_step(batch, 20, 4, buffers)
    assert inputs.slots[:20].tolist() == [2] * 3 + [0] + [1] * 4 + [3] * 8 + [4] * 4
    assert inputs.sample_slot.tolist() == [2, 2, 2, 0, 4, 4, 1, 4, 4, 4, 4, 4]
    assert inputs.sample_token[[0, 1, 2, 3, 6]].tolist() == [0, 1, 2, 3, 7]
    assert inputs.sample_position[[0, 1, 2, 3, 6]].tolist() == [10, 11, 12, 31, 4]
    assert inputs.counts[0] == 4, "tokens of decode rows"
    inputs.upload_slots(column(3, 1), 4, 4, buffers)
    assert inputs.row_slots.tolist() == [3, 1, 4, 4] and inputs.slots[:20].tolist()[:3] == [2] * 3


def test_what_the_attention_kernels_lack_is_refused_by_name():
    pytest.importorskip("triton", reason="the operations' module launches kernels")
    from slipstream.errors import ModelError
    from slipstream.ops.cuda.ops import check_attention
    from slipstream.ops.layers import Attention
    from slipstream.shard import Heads

    spec = lambda q, kv, dim: Attention(0, 0, Heads(0, q, 0, kv), dim, 1.0, torch.zeros(0))
    check_attention(spec(16, 1, 256))
    for refused, why in ((spec(8, 2, 288), "head_dim 288"), (spec(17, 1, 64), "17 query heads")):
        with pytest.raises(ModelError, match=why):
            check_attention(refused)
