"""The benchmark's arithmetic: percentiles, gaps, windows, and what a failed request counts as."""

import numpy as np
import pytest

from slipstream.bench.load import stats, trace
from slipstream.bench.load.records import Conversation, Record, Turn


def record(kind="short", sent=0.0, times=(), counts=None, error=None, **more):
    times = list(times)
    return Record(0, kind, 100, len(times), sent, times, list(counts or [1] * len(times)), error=error, **more)


def test_percentiles_are_by_nearest_rank():
    values = list(range(1, 101))
    assert [stats.percentile(values, q) for q in (50, 99, 99.9, 100)] == [50, 99, 100, 100]
    assert stats.percentile([7.0], 99.9) == 7.0
    assert stats.percentile([], 50) is None


def test_gaps_stalls_and_the_worst_gap_are_counted_between_chunks_of_one_stream():
    a = record(sent=0.0, times=[0.5, 0.51, 0.57, 1.8])
    b = record(sent=0.0, times=[9.0, 9.01])
    got = stats.summary([a, b])
    assert got["gaps_over_50_ms"] == 2
    assert got["stalls_over_1_s"] == 1
    assert got["worst_gap_ms"] == pytest.approx(1230)
    assert got["ttft_short_p99_ms"] == pytest.approx(9000)


def test_tpot_counts_tokens_where_a_chunk_carries_several():
    r = record(times=[1.0, 1.1, 1.2], counts=[1, 4, 6])
    assert stats.tpot(r) == pytest.approx(20.0)
    assert stats.tpot(record(times=[1.0])) is None


def test_rates_are_over_the_time_from_the_first_request_to_the_last_chunk():
    got = stats.summary([record(sent=1.0, times=[1.5, 2.0]), record(sent=2.0, times=[2.5, 3.0])])
    assert got["seconds"] == pytest.approx(2.0)
    assert got["requests_per_s"] == pytest.approx(1.0)
    assert got["output_tokens_per_s"] == pytest.approx(2.0)


def test_a_failed_request_is_an_error_with_its_reason_and_not_a_completed_one():
    got = stats.summary([record(times=[1.0, 1.1]), record(error="HTTP 429: full"), record(times=[1.0], error="HTTP 429: full")])
    assert (got["requests"], got["completed"], got["errors"]) == (3, 1, 2)
    assert got["error_reasons"] == {"HTTP 429: full": 2}


def test_a_run_in_which_nothing_answers_has_no_figures_but_its_errors():
    got = stats.summary([record(error="cannot connect")])
    assert got["errors"] == 1
    assert "requests_per_s" not in got


def test_a_burst_is_measured_inside_its_window():
    """Window [10, 12]: from the first burst prompt sent to the last one's first token."""
    stream = record("stream", 8.0, np.arange(8.0, 14.0, 0.1))
    prompts = [record("burst", 10.0, [11.0, 11.1]), record("burst", 10.05, [12.0, 12.1])]
    got = stats.burst([stream, *prompts])
    assert got["window_s"] == pytest.approx(2.0)
    assert got["decode_chunks_per_s_per_stream"] == pytest.approx(10.0, rel=0.06)
    assert got["prefill_ktok_per_s"] == pytest.approx(0.1)
    assert got["streams_that_outlived_the_window"] == 1
    assert "note" not in got


def test_a_gap_that_straddles_the_windows_edge_counts_as_inside():
    stream = record("stream", 8.0, [8.5, 9.9, 10.4, 12.5])
    got = stats.burst([stream, record("burst", 10.0, [12.0])])
    assert got["worst_gap_in_window_ms"] == pytest.approx(2100)
    assert stats.burst([record("stream", 0.0, [1.0, 5.0, 5.1]), record("burst", 6.0, [7.0])])["worst_gap_in_window_ms"] is None


def test_a_stream_that_ends_early_counts_for_its_part_of_the_window_and_is_told():
    stream = record("stream", 8.0, np.arange(8.0, 11.0001, 0.1))
    got = stats.burst([stream, record("burst", 10.0, [12.0])])
    assert got["decode_chunks_per_s_per_stream"] == pytest.approx(10.0, rel=0.1)
    assert got["streams_that_outlived_the_window"] == 0
    assert "note" in got


def test_turns_are_completed_of_those_that_stay():
    planned = [Conversation(0, [Turn(5, 5), Turn(5, 5)]), Conversation(1, [Turn(5, 5), Turn(5, 5, leave_after=2)])]
    seen = [
        record("turn", 0.0, [1.0, 1.1]),
        record("turn", 2.0, [2.1, 2.2], turn=1, cached_tokens=90),
        record("turn", 0.0, [1.0, 1.1]),
        record("turn", 2.0, [2.1], turn=1, left=True),
    ]
    got = stats.multi_turn(seen, planned)
    assert (got["turns_completed"], got["turns_expected"], got["clients_left"]) == (3, 3, 1)
    assert got["cached_share_of_later_prompts"] == pytest.approx(0.9)


def test_the_devices_idle_share_counts_gaps_over_five_microseconds():
    def span(ts, dur, pid=0):
        return {"ph": "X", "name": "device", "ts": ts, "dur": dur, "pid": pid}

    events = [span(0, 100), span(104, 96), span(250, 50), {"ph": "M", "name": "process_name", "pid": 0}]
    assert trace.idle_share({"traceEvents": events}) == {"device_idle_percent_rank_0": pytest.approx(50 / 300 * 100)}
    assert trace.idle_share([{"ph": "X", "name": "plan", "ts": 0, "dur": 1}]) == {}
