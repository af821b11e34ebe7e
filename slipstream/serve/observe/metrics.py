"""Counters, gauges and histograms of the front end, and of the engine as its leader reports it, in Prometheus' text form.

Names follow vLLM's with the prefix `slipstream:`. A front end's own counts are summed over all front ends of the server
(`shared_counters`). The leader's report reaches each of them, so it is not summed.
"""

from bisect import bisect_left
from collections.abc import Iterator, Sequence

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from slipstream.process.protocol import Load
from slipstream.serve.observe.http_counts import HttpCounts
from slipstream.serve.observe.shared_counters import SharedCounters

P = "slipstream:"
TTFT = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560)
ITL = (
    0.001,
    0.002,
    0.003,
    0.004,
    0.005,
    0.0075,
    0.01,
    0.025,
    0.05,
    0.075,
    0.1,
    0.15,
    0.2,
    0.3,
    0.4,
    0.5,
    0.75,
    1,
    2.5,
    5,
    10,
    20,
    40,
    80,
)
E2E = (0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
REASONS = ("stop", "length", "abort", "error")
ORDERS = ("no_overlap", "overlap", "late_sample")
PHASES = ("plan", "publish", "launch", "settle")
COPIES = ("offload", "restore")
DRAFTS = ("rows", "drafts", "accepted")


class Histogram:
    """Counts per bucket, then the sum of the observed values; `observe` costs two additions."""

    __slots__ = ("bounds", "_cells", "_own")

    def __init__(self, bounds: Sequence[float], shared_counters: SharedCounters):
        self.bounds = bounds
        self._cells = shared_counters.cells(len(bounds) + 2)
        self._own = self._cells.own

    def observe(self, value: float) -> None:
        self._own[bisect_left(self.bounds, value)] += 1
        self._own[-1] += value

    def read(self) -> tuple[list[tuple[str, float]], float]:
        """Cumulative counts by upper bound, and the sum."""
        *counts, whole = self._cells.sums()
        out, total = [], 0.0
        for bound, count in zip((*map(str, map(float, self.bounds)), "+Inf"), counts, strict=True):
            total += count
            out.append((bound, total))
        return out, whole


def _add(totals: dict, new: dict, old: dict) -> None:
    """Adds the growth of a leader's own count."""
    for name, value in new.items():
        totals[name] = totals.get(name, 0) + value - old.get(name, 0)


class Metrics(Collector):
    """All values of one front end. Counters of the engine go on growing across restarts of its leader."""

    def __init__(self, model: str, shared_counters: SharedCounters | None = None):
        self.model = model
        shared_counters = shared_counters or SharedCounters()
        self._tokens = shared_counters.cells(2)
        self._own_tokens = self._tokens.own
        self.time_to_first = Histogram(TTFT, shared_counters)  # seconds
        self.inter_token = Histogram(ITL, shared_counters)  # seconds
        self.end_to_end = Histogram(E2E, shared_counters)  # seconds
        self._requests = shared_counters.cells(len(REASONS))
        self.step_tokens = Histogram(STEP_TOKENS, SharedCounters())  # the leader's, so not summed
        self.steps: dict[str, int] = dict.fromkeys(ORDERS, 0)
        self.host_seconds: dict[str, float] = dict.fromkeys(PHASES, 0.0)
        self.eager_steps: dict[str, int] = {}
        self.pages_copied: dict[str, int] = dict.fromkeys(COPIES, 0)
        self.drafts: dict[str, int] = dict.fromkeys(DRAFTS, 0)
        self.drafts_accepted_at: dict[int, int] = {}
        self.restarts: dict[str, int] = {}  # by group; each front end hears of all of them, so not summed
        self.poisonings: dict[str, int] = {}
        self.prefix_queries = self.prefix_hits = self.preemptions = 0
        self.http: HttpCounts | None = None  # set with the application, which has the routes
        self._load: Load | None = None
        self._counted: Load | None = None  # the last report added to the counters
        self._pages_total = 0
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)

    def prompt(self, tokens: int) -> None:
        """Counts an admitted prompt of that many tokens."""
        self._own_tokens[0] += tokens

    def token(self) -> None:
        """Counts one generated token."""
        self._own_tokens[1] += 1

    def ended(self, reason: str, seconds: float | None) -> None:
        self._requests.own[REASONS.index(reason)] += 1
        if seconds is not None:
            self.end_to_end.observe(seconds)

    def on_load(self, load: Load | None, first: bool) -> None:
        """Takes a leader's report. None means that the leader is gone, and sets the load to idle."""
        self._load = load
        if load is None:
            return
        before, self._counted = None if first else self._counted, load
        self._pages_total = load.pages_total
        _add(self.steps, load.steps, before.steps if before else {})
        _add(self.host_seconds, load.host_seconds, before.host_seconds if before else {})
        _add(self.eager_steps, load.eager_steps, before.eager_steps if before else {})
        _add(self.drafts, load.drafts, before.drafts if before else {})
        _add(self.drafts_accepted_at, load.drafts_accepted_at, before.drafts_accepted_at if before else {})
        _add(self.pages_copied, load.pages_copied, before.pages_copied if before else {})
        self.prefix_queries += load.prefix_queries - (before.prefix_queries if before else 0)
        self.prefix_hits += load.prefix_hits - (before.prefix_hits if before else 0)
        self.preemptions += load.preemptions - (before.preemptions if before else 0)
        for n in load.step_tokens:
            self.step_tokens.observe(n)

    def attached(self, group: int, incarnation: int) -> None:
        """A group is ready; its incarnations count from 1."""
        self.restarts[str(group)] = incarnation - 1
        self.poisonings.setdefault(str(group), 0)

    def poisoned(self, group: int) -> None:
        self.poisonings[str(group)] = self.poisonings.get(str(group), 0) + 1

    def render(self) -> bytes:
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        load, (prompt_tokens, generation_tokens) = self._load, self._tokens.sums()
        requests = dict(zip(REASONS, self._requests.sums(), strict=True))
        running, waiting, used = (load.running, load.waiting, load.pages_used) if load else (0, 0, 0)
        yield self._gauge("num_requests_running", "Requests that are running.", running)
        yield self._gauge("num_requests_waiting", "Requests that wait for room.", waiting)
        yield self._gauge("kv_pages_used", "Pages of the KV cache that requests hold.", used)
        yield self._gauge("kv_pages", "Pages of the KV cache, used or not.", self._pages_total)
        yield self._gauge(
            "kv_cache_usage_perc", "Share of the KV cache in use, 0 to 1.", used / self._pages_total if self._pages_total else 0
        )
        yield self._counter("prompt_tokens", "Prompt tokens of admitted requests.", prompt_tokens)
        yield self._counter("generation_tokens", "Tokens generated.", generation_tokens)
        yield self._counter("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", self.prefix_queries)
        yield self._counter("prefix_cache_hits", "Prompt tokens found in the prefix cache.", self.prefix_hits)
        yield self._counter("num_preemptions", "Preemptions.", self.preemptions)
        yield self._counter("spec_decode_num_drafts", "Rows that verified drafts.", self.drafts["rows"])
        yield self._counter("spec_decode_num_draft_tokens", "Drafts verified.", self.drafts["drafts"])
        yield self._counter("spec_decode_num_accepted_tokens", "Drafts accepted.", self.drafts["accepted"])
        yield self._counters(
            "spec_decode_num_accepted_tokens_per_pos",
            "Drafts accepted, by position in their row.",
            "position",
            {str(position): count for position, count in self.drafts_accepted_at.items()},
        )
        yield self._counters("kv_pages_copied", "Pages of preempted requests, to the host and back.", "copy", self.pages_copied)
        yield self._counters("group_restarts", "Starts of a group after its first.", "group", self.restarts)
        yield self._counters("groups_poisoned", "Groups that were ended because of a fault.", "group", self.poisonings)
        yield self._counters("request_success", "Requests by how they ended.", "finished_reason", requests)
        if self.http is not None:
            yield self._http_responses(self.http)
        yield self._counters("steps", "Steps launched, by phase order.", "order", self.steps)
        yield self._counters("eager_steps", "Steps that ran outside captured graphs, by reason.", "reason", self.eager_steps)
        yield self._counters("step_host_seconds", "Host time of steps, by phase.", "phase", self.host_seconds)
        yield self._histogram("time_to_first_token_seconds", "From a request's arrival to its first token.", self.time_to_first)
        yield self._histogram("inter_token_latency_seconds", "Between two tokens of one request.", self.inter_token)
        yield self._histogram("e2e_request_latency_seconds", "From a request's arrival to its last token.", self.end_to_end)
        yield self._histogram("iteration_tokens_total", "Tokens computed in one step.", self.step_tokens)

    def _gauge(self, name: str, help: str, value: float) -> Metric:
        family = GaugeMetricFamily(P + name, help, labels=["model_name"])
        family.add_metric([self.model], value)
        return family

    def _counter(self, name: str, help: str, value: float) -> Metric:
        family = CounterMetricFamily(P + name, help, labels=["model_name"])
        family.add_metric([self.model], value)
        return family

    def _counters(self, name: str, help: str, label: str, values: dict) -> Metric:
        family = CounterMetricFamily(P + name, help, labels=["model_name", label])
        for key, value in values.items():
            family.add_metric([self.model, key], value)
        return family

    def _http_responses(self, http: HttpCounts) -> Metric:
        labels = ["model_name", "route", "status"]
        family = CounterMetricFamily(P + "http_responses", "HTTP answers by route and status.", labels=labels)
        for route, status, count in http.read():
            family.add_metric([self.model, route, status], count)
        return family

    def _histogram(self, name: str, help: str, histogram: Histogram) -> Metric:
        family = HistogramMetricFamily(P + name, help, labels=["model_name"])
        buckets, whole = histogram.read()
        family.add_metric([self.model], buckets=buckets, sum_value=whole)
        return family
