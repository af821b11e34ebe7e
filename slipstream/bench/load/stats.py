"""Arithmetic over records: percentiles, gaps, windows. Results are plain values, times in milliseconds unless named otherwise.

A gap is the time between two chunks of one stream; ITL percentiles are over gaps. TPOT is (last - first) / (tokens - 1) of a
request, so it stays comparable where a chunk carries several tokens. TTFT counts from before the request's first byte is sent.
"""

import collections
import math
import typing
from collections.abc import Callable, Sequence

import numpy as np

from slipstream.bench.load.records import Conversation, Record

GAP_MS = 50.0
STALL_MS = 1000.0


def percentile(values: Sequence[float] | np.ndarray, q: float) -> float | None:
    """The smallest value that at least q % of the values do not exceed (nearest rank); None for no values."""
    if not len(values):
        return None
    ordered = np.sort(np.asarray(values, dtype=float))
    return float(ordered[max(0, math.ceil(q / 100 * len(ordered)) - 1)])


def gaps(record: Record) -> np.ndarray:
    """Milliseconds between successive chunks."""
    return np.diff(np.asarray(record.times, dtype=float)) * 1e3


def all_gaps(records: Sequence[Record]) -> np.ndarray:
    return np.concatenate([gaps(r) for r in records]) if records else np.zeros(0)


def ttft(record: Record) -> float:
    return (record.times[0] - record.sent) * 1e3


def tpot(record: Record) -> float | None:
    """Milliseconds a token after the first chunk; None if there is only one chunk."""
    later = record.tokens - record.counts[0] if record.counts else 0
    return (record.times[-1] - record.times[0]) * 1e3 / later if later else None


def summary(records: Sequence[Record]) -> dict[str, typing.Any]:
    """The figures that every workload reports. Failed requests count only as errors."""
    ok = [r for r in records if r.ok]
    out: dict[str, typing.Any] = {"requests": len(records), "completed": len(ok), **errors(records)}
    heard = [r for r in records if r.times]
    if not heard:
        return out
    span = max(r.times[-1] for r in heard) - min(r.sent for r in records)
    tokens = sum(r.tokens for r in records)
    out |= {
        "seconds": span,
        "requests_per_s": len(ok) / span,
        "output_tokens_per_s": tokens / span,
        "prompt_tokens_per_s": sum(r.prompt_len for r in ok) / span,
        "tokens_per_chunk": tokens / sum(len(r.times) for r in heard),
    }
    for kind in sorted({r.kind for r in heard}):
        values = [ttft(r) for r in heard if r.kind == kind]
        out[f"ttft_{kind}_p50_ms"], out[f"ttft_{kind}_p99_ms"] = percentile(values, 50), percentile(values, 99)
    return out | _latencies(heard)


def _latencies(heard: Sequence[Record]) -> dict[str, typing.Any]:
    waits = all_gaps(heard)
    paces = [p for p in map(tpot, heard) if p is not None]
    return {
        "itl_p50_ms": percentile(waits, 50),
        "itl_p99_ms": percentile(waits, 99),
        "itl_p999_ms": percentile(waits, 99.9),
        "tpot_p50_ms": percentile(paces, 50),
        "tpot_p99_ms": percentile(paces, 99),
        "gaps_over_50_ms": int((waits > GAP_MS).sum()),
        "stalls_over_1_s": int((waits > STALL_MS).sum()),
        "worst_gap_ms": float(waits.max()) if len(waits) else None,
    }


def errors(records: Sequence[Record]) -> dict[str, typing.Any]:
    """How many requests failed, and the reasons with their counts, most frequent first."""
    reasons = collections.Counter(r.error for r in records if r.error is not None)
    return {"errors": sum(reasons.values()), "error_reasons": dict(reasons.most_common())}


def window(records: Sequence[Record]) -> tuple[float, float] | None:
    """A burst's window: from the first burst prompt sent to the last one's first token. None if none got a token."""
    prompts = [r for r in records if r.kind == "burst"]
    firsts = [r.times[0] for r in prompts if r.times]
    return (min(r.sent for r in prompts), max(firsts)) if firsts else None


def burst(records: Sequence[Record]) -> dict[str, typing.Any]:
    """The burst's effect on the decoding streams, inside its window.

    A stream counts for its part of the window, from its first chunk to its last.
    """
    out = {**summary(records), **_only(records, "stream", _latencies)}
    span = window(records)
    if span is None:
        return out
    start, end = span
    streams = [r for r in records if r.kind == "stream" and r.times]
    lived = sum(max(0.0, min(end, r.times[-1]) - max(start, r.times[0])) for r in streams)
    inside = sum(int(((t := np.asarray(r.times)) >= start).sum() - (t > end).sum()) for r in streams)
    prefilled = sum(r.prompt_len for r in records if r.kind == "burst" and r.times)
    outlived = sum(r.times[-1] >= end for r in streams)
    worst = max((float(g.max()) for r in streams if len(g := _gaps_touching(r, start, end))), default=None)
    if outlived < len(streams):
        out["note"] = "streams ended inside the window or before it; a larger --stream-output-len keeps them decoding"
    return out | {
        "window_s": end - start,
        "decode_chunks_per_s_per_stream": inside / lived if lived else None,
        "prefill_ktok_per_s": prefilled / (end - start) / 1e3 if end > start else None,
        "worst_gap_in_window_ms": worst,
        "streams_that_outlived_the_window": outlived,
        "streams": sum(r.kind == "stream" for r in records),
    }


def _only(records: Sequence[Record], kind: str, of: Callable[[list[Record]], dict[str, typing.Any]]) -> dict[str, typing.Any]:
    picked = [r for r in records if r.kind == kind and r.times]
    return of(picked) if picked else {}


def _gaps_touching(record: Record, start: float, end: float) -> np.ndarray:
    """The gaps that overlap the window."""
    times = np.asarray(record.times)
    touching = (times[1:] > start) & (times[:-1] < end)
    return (np.diff(times) * 1e3)[touching]


def multi_turn(records: Sequence[Record], planned: Sequence[Conversation]) -> dict[str, typing.Any]:
    """Turns ended of those expected, and what the first turn cost against later ones."""
    out = summary(records)
    first = [ttft(r) for r in records if r.times and r.turn == 0]
    later = [ttft(r) for r in records if r.times and r.turn > 0]
    known = [r for r in records if r.cached_tokens is not None and r.turn > 0]
    out |= {
        "turns_completed": sum(r.ok for r in records),
        "turns_expected": sum(c.expected for c in planned),
        "clients_left": sum(r.left for r in records),
        "ttft_first_turn_p50_ms": percentile(first, 50),
        "ttft_later_turn_p50_ms": percentile(later, 50),
    }
    if known:
        out["cached_share_of_later_prompts"] = sum(r.cached_tokens or 0 for r in known) / sum(r.prompt_len for r in known)
    return out
