"""A picture of one run: the latencies' distribution, and the gaps over time. Needs matplotlib (a development extra)."""

import typing
from collections.abc import Sequence

import numpy as np

from slipstream.bench.load import stats
from slipstream.bench.load.records import Record
from slipstream.errors import ConfigError

COLOURS = {
    "short": "#0072b2",
    "long": "#d55e00",
    "stream": "#0072b2",
    "burst": "#d55e00",
    "turn": "#0072b2",
    "parity": "#0072b2",
}


def check() -> None:
    """Raises ConfigError if the library is missing. Call it before the measurement."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise ConfigError("--plot needs matplotlib: pip install matplotlib") from None


def write(path: str, title: str, records: Sequence[Record]) -> None:
    """Saves a PNG: TTFT and ITL over percentiles; below them every gap over time."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    heard = [r for r in records if r.times]
    figure, axes = pyplot.subplot_mosaic([["ttft", "itl"], ["gaps", "gaps"]], figsize=(11, 7.5), layout="constrained")
    figure.suptitle(title)
    kinds = sorted({r.kind for r in heard})
    _curves(axes["ttft"], {k: np.array([stats.ttft(r) for r in heard if r.kind == k]) for k in kinds})
    axes["ttft"].set(title="time to first token")
    _curves(axes["itl"], {k: stats.all_gaps([r for r in heard if r.kind == k]) for k in kinds})
    axes["itl"].set(title="inter-token latency")
    _timeline(axes["gaps"], heard, stats.window(records))
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _curves(axis: typing.Any, groups: dict[str, np.ndarray]) -> None:
    """Milliseconds over percentiles, stretched towards 100 so that a tail of 0.1 % is visible."""
    longest = 1
    for kind, values in groups.items():
        if len(values):
            longest = max(longest, len(values))
            share = (np.arange(len(values)) + 0.5) / len(values)
            axis.plot(1 / (1 - share), np.sort(values), color=COLOURS[kind], label=f"{kind} ({len(values)})")
    ticks = [(1 / (1 - p / 100), f"{p:g}") for p in (0, 50, 90, 99, 99.9, 99.99) if 1 / (1 - p / 100) <= 2 * longest]
    axis.set_xscale("log")
    axis.set_xticks([x for x, _ in ticks], [name for _, name in ticks])
    axis.minorticks_off()
    axis.set(xlabel="percentile", ylabel="ms", ylim=(0, None))
    axis.grid(alpha=0.3)
    axis.legend(loc="lower right", frameon=False)


def _timeline(axis: typing.Any, heard: Sequence[Record], window: tuple[float, float] | None) -> None:
    from matplotlib.ticker import LogFormatter

    start = min((r.sent for r in heard), default=0.0)
    for kind in sorted({r.kind for r in heard}):
        chosen = [r for r in heard if r.kind == kind and len(r.times) > 1]
        if chosen:
            at = np.concatenate([np.asarray(r.times[1:]) - start for r in chosen])
            axis.scatter(
                at, np.maximum(stats.all_gaps(chosen), 1e-2), s=3, alpha=0.5, color=COLOURS[kind], label=kind, linewidths=0
            )
    if window:
        axis.axvspan(window[0] - start, window[1] - start, color="#999999", alpha=0.2, label="burst window")
    axis.axhline(stats.GAP_MS, color="#cc0000", linewidth=0.8, linestyle="--", label="50 ms")
    axis.set_title("gaps between chunks", loc="left")
    axis.set(xlabel="seconds since the start", ylabel="ms", yscale="log")
    axis.yaxis.set_major_formatter(LogFormatter())
    axis.yaxis.set_minor_formatter(LogFormatter())
    axis.grid(alpha=0.3)
    axis.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=5, frameon=False, markerscale=4)
