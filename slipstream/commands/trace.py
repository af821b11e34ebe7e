"""`slipstream trace`: the ranks' last seconds as Chrome trace JSON, which Perfetto opens, and as a picture."""

import argparse
import json
import pathlib
from typing import Any

from slipstream.client import remote
from slipstream.errors import ConfigError

COLORS = {"plan": "#f59e0b", "publish": "#a855f7", "launch": "#10b981", "settle": "#ea580c", "device": "#3b82f6"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    remote.add_arguments(parser)
    parser.add_argument("--seconds", type=float, default=5.0, help="seconds to go back (default %(default)s)")
    parser.add_argument("--output", metavar="FILE", default="trace.json", help="the file for the JSON (default %(default)s)")
    parser.add_argument("--png", metavar="FILE", help="the file for the picture (default: next to the JSON)")


def run(args: argparse.Namespace) -> int:
    server = remote.Remote(args.base_url, args.api_key)
    if not 0 < args.seconds <= 600:
        raise ConfigError(f"--seconds {args.seconds:g}: expected more than 0 and at most 600")
    trace = server.json(f"/debug/timeline?seconds={args.seconds}")
    if "traceEvents" not in trace:
        raise ConfigError(f"{server.base_url}: {trace.get('error', {}).get('message', 'no timeline here')}")
    output = pathlib.Path(args.output)
    output.write_text(json.dumps(trace))
    events = [e for e in trace["traceEvents"] if e["ph"] == "X"]
    print(f"{output}: {len(events)} spans of {args.seconds:g} s; open it in Perfetto or chrome://tracing")
    picture = pathlib.Path(args.png) if args.png else output.with_suffix(".png")
    if events:
        draw(trace["traceEvents"], picture)
        print(f"{picture}: the same, drawn")
    return 0


def draw(events: list[dict[str, Any]], file: pathlib.Path, title: str = "") -> None:
    """Draws a trace: for each rank a lane for its loop and one for its device; time in milliseconds.

    `events` are Chrome trace events; spans are "X" with microseconds. Needs matplotlib.
    """
    try:
        import matplotlib
    except ImportError:
        raise ConfigError("the picture needs matplotlib: pip install matplotlib") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.patches import Patch

    names = {e["pid"]: e["args"]["name"] for e in events if e["ph"] == "M" and e["name"] == "process_name"}
    threads = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["ph"] == "M" and e["name"] == "thread_name"}
    spans = [e for e in events if e["ph"] == "X"]
    lanes = sorted({(e["pid"], e["tid"]) for e in spans})
    begin = min(e["ts"] for e in spans)
    figure, axes = pyplot.subplots(figsize=(14, 1.2 + 0.55 * len(lanes)), layout="constrained")
    for row, lane in enumerate(lanes):
        own = [e for e in spans if (e["pid"], e["tid"]) == lane]
        axes.broken_barh(
            [((e["ts"] - begin) / 1e3, max(e["dur"] / 1e3, 0.02)) for e in own],
            (row - 0.4, 0.8),
            facecolors=[COLORS.get(e["name"].split()[0], "#9ca3af") for e in own],
            edgecolor="white",
            linewidth=0.3,
        )
    axes.set_yticks(range(len(lanes)), [f"{names.get(p, p)}\n{threads.get((p, t), t)}" for p, t in lanes])
    axes.invert_yaxis()
    axes.set_xlabel("milliseconds")
    axes.set_title(title)
    seen = {e["name"].split()[0] for e in spans}
    axes.legend(
        handles=[Patch(color=c, label=n) for n, c in COLORS.items() if n in seen], loc="upper right", ncols=7, fontsize=8
    )
    figure.savefig(file, dpi=130)
    pyplot.close(figure)
