"""`slipstream top`: groups, ranks, queue, pages, overlap and latencies of a running server, live in the terminal."""

import argparse
import time
from collections.abc import Callable
from typing import Any

from slipstream.client import remote
from slipstream.errors import ConfigError, EngineDown

Metrics = dict[str, list[tuple[dict[str, str], float]]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    remote.add_arguments(parser)
    parser.add_argument("--interval", type=float, default=1.0, help="seconds between samples (default %(default)s)")
    parser.add_argument("--once", action="store_true", help="print the difference of two samples once and exit")


def run(args: argparse.Namespace) -> int:
    from rich.console import Console
    from rich.live import Live

    if args.interval <= 0:
        raise ConfigError(f"--interval {args.interval:g}: expected more than 0")
    view = View(remote.Remote(args.base_url, args.api_key))
    view.look()
    time.sleep(args.interval)
    console = Console()
    if args.once:
        console.print(view.render())
        return 0
    with Live(view.render(), console=console, screen=console.is_terminal, auto_refresh=False) as live:
        try:
            while True:
                live.update(view.render(), refresh=True)
                time.sleep(args.interval)
        except KeyboardInterrupt:
            return 0


def total(metrics: Metrics, name: str, **labels: str) -> float:
    """The sum of a metric's samples that carry these labels."""
    return sum(v for have, v in metrics.get(name, ()) if all(have.get(k) == w for k, w in labels.items()))


def quantile(now: Metrics, before: Metrics, name: str, q: float) -> float | None:
    """The q-quantile (0..1) of a histogram's growth between two samples, interpolated within its bucket."""
    gained: dict[float, float] = {}
    for metrics, sign in ((now, 1), (before, -1)):
        for labels, value in metrics.get(name + "_bucket", ()):
            edge = float(labels["le"])
            gained[edge] = gained.get(edge, 0.0) + sign * value
    edges = sorted(gained)
    if not edges or gained[edges[-1]] <= 0:
        return None
    wanted, low, under = q * gained[edges[-1]], 0.0, 0.0
    for edge in edges:
        if gained[edge] >= wanted:
            if edge == float("inf"):
                return low
            inside = gained[edge] - under
            return low + (edge - low) * ((wanted - under) / inside if inside else 1.0)
        low, under = edge, gained[edge]
    return low


class View:
    """Two samples of a server and their difference."""

    def __init__(self, server: remote.Remote):
        self.server = server
        self.before: Metrics = {}
        self.at = 0.0

    def look(self) -> tuple[Metrics, float]:
        """Takes a sample; returns it and the seconds since the one before."""
        metrics, now = self.server.metrics(), time.monotonic()
        seconds, self.at = now - self.at, now
        metrics, self.before = self.before, metrics
        return metrics, seconds

    def render(self) -> Any:
        from rich.console import Group
        from rich.panel import Panel
        from rich.text import Text

        try:
            before, seconds = self.look()
            health = self.server.json("/health")
        except EngineDown as e:
            return Panel(Text(str(e), style="bold red"), title="slipstream top")
        now = self.before
        title = f"slipstream top  {self.server.base_url}  {health.get('status', '?')} {health.get('reason', '')}"
        return Panel(Group(self._gauges(now, before, seconds), Text(), self._ranks()), title=title, title_align="left")

    def _gauges(self, now: Metrics, before: Metrics, seconds: float) -> Any:
        from rich.table import Table

        def rate(name: str, **labels: str) -> float:
            return (total(now, name, **labels) - total(before, name, **labels)) / seconds

        steps = rate("steps_total") or 1e-9
        overlapped = rate("steps_total", order="overlap") + rate("steps_total", order="late_sample")
        looked = total(now, "prefix_cache_queries_total") or total(now, "prefix_cache_queries") or 1e-9
        hits = total(now, "prefix_cache_hits_total") or total(now, "prefix_cache_hits")
        table = Table.grid(padding=(0, 3))
        for _ in range(6):
            table.add_column()
        running, waiting = total(now, "num_requests_running"), total(now, "num_requests_waiting")
        table.add_row(
            "running", f"{running:.0f}", "tokens/s", f"{rate('generation_tokens_total'):.0f}", "steps/s", f"{steps:.0f}"
        )
        prompt = f"{rate('prompt_tokens_total'):.0f}"
        table.add_row("waiting", f"{waiting:.0f}", "prompt tok/s", prompt, "overlapped", f"{overlapped / steps:.0%}")
        pages = f"{total(now, 'kv_cache_usage_perc'):.0%}"
        table.add_row(
            "pages used", pages, "cache hits", f"{hits / looked:.0%}", "host/step", self._host(now, before, steps * seconds)
        )
        table.add_row(
            "eager steps", self._eager(rate, steps), "pages copied/s", f"{rate('kv_pages_copied_total'):.0f}",
            "restarts", f"{total(now, 'group_restarts_total'):.0f}",
        )  # fmt: skip
        drafts = rate("spec_decode_num_draft_tokens_total")
        accepted = rate("spec_decode_num_accepted_tokens_total")
        table.add_row("drafts/s", f"{drafts:.0f}", "accepted", f"{accepted / drafts:.0%}" if drafts else "–")
        for label, name in (("TTFT", "time_to_first_token_seconds"), ("ITL", "inter_token_latency_seconds")):
            cells = [f"{label} p50 / p99"]
            values = [quantile(now, before, name, q) for q in (0.5, 0.99)]
            cells.append(" / ".join("–" if v is None else f"{v * 1e3:.1f}" for v in values) + " ms")
            table.add_row(*cells)
        return table

    def _eager(self, rate: Callable[..., float], steps: float) -> str:
        """The share of steps that ran outside captured graphs, by reason."""
        reasons = [labels["reason"] for labels, _ in self.before.get("eager_steps_total", ())]
        shares = {reason: rate("eager_steps_total", reason=reason) / steps for reason in reasons}
        return ", ".join(f"{reason} {share:.0%}" for reason, share in shares.items() if share) or "none"

    @staticmethod
    def _host(now: Metrics, before: Metrics, steps: float) -> str:
        gained = total(now, "step_host_seconds_total") - total(before, "step_host_seconds_total")
        return f"{gained / steps * 1e6:.0f} µs" if steps >= 1 else "–"

    def _ranks(self) -> Any:
        from rich.table import Table
        from rich.text import Text

        try:
            ranks = self.server.json("/debug/ranks")
        except ConfigError:
            return Text("ranks are shown if the server runs with --enable-debug", style="dim")
        names = ("group", "rank", "pid", "state", "phase", "MiB", "launched", "settled", "waits for")
        table = Table(box=None, padding=(0, 1))
        for name in names:
            table.add_column(name, no_wrap=True)
        for r in ranks:
            waits = "" if r["waits_for"] is None else f"rank {r['waits_for']}"
            style = "" if r["state"] == "ready" else "bold red"
            cells = (r["group"], r["rank"], r["pid"], r["state"], r["phase"], f"{r['weight_bytes'] / 2**20:.0f}")
            table.add_row(*map(str, cells), str(r["launched"]), str(r["settled"]), waits, style=style)
        return table
