"""`python -m slipstream.bench.micro.burst_sim`: what the planner does to streams and prompts, on no real machine.

The production leader plans for a simulated device in virtual time: a step takes step_us + token_us * tokens, and the leader's
own processor time counts, so a busy machine does not spoil the figures. The workload is `slipstream bench burst`'s.
"""

import argparse
import dataclasses
import heapq
import itertools
import pathlib
import time
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

from slipstream.bench.load import workloads
from slipstream.bench.micro.host import request
from slipstream.bench.micro.solo import Solo
from slipstream.log.batch import Batch
from slipstream.log.caches import one_table
from slipstream.log.replica import Replica
from slipstream.process.protocol import Submit, Tokens
from slipstream.rank.events import Arrived, Event, SendToFront, Tick, Wake
from slipstream.rank.leader import Leader
from slipstream.schedule.budget import Budget
from slipstream.schedule.planner import Planner

SLOTS = 128


class Done(NamedTuple):
    """One step of the device, seconds of virtual time."""

    start: float
    end: float
    decodes: int
    chunks: list[tuple[int, int]]  # (request id, tokens)


class VirtualRun(Solo):
    """One leader with a simulated device."""

    def __init__(self, target: float, step: float, token: float, cap: int = 2048, asynchronous: bool = True):
        replica = Replica(one_table(pages=65_536, slots=SLOTS, max_len=40_960))
        super().__init__(Leader(replica, Planner(replica, Budget(cap, target), 4096), 1, asynchronous), 32_000)
        self.step, self.token = step, token
        self.steps: list[Done] = []
        self.heard: dict[int, list[float]] = {}  # request id -> when its tokens were sent
        self._events: list[tuple[float, int, Event]] = []
        self._order = itertools.count()
        self._device_free = 0.0
        self._began = (0.0, 0.0)  # the virtual time of the event in hand, and the processor's when it began

    @property
    def now(self) -> float:
        """Virtual seconds: the leader's own processor time counts."""
        return self._began[0] + time.thread_time() - self._began[1]

    def add(self, at: float, event: Event) -> None:
        heapq.heappush(self._events, (at, next(self._order), event))

    def run(self, until: float) -> None:
        """Carries on until that time, or until nothing is left to happen."""
        free = 0.0  # when the leader has done what it does
        while self._events and self._events[0][0] < until:
            at, _, event = heapq.heappop(self._events)
            self._began = (max(at, free), time.thread_time())
            self.perform(self.leader.on(event, self._began[0]))
            free = self.now

    def wake(self, effect: Wake) -> None:
        self.add(effect.at, Tick())

    def send_to_front(self, effect: SendToFront) -> None:
        if isinstance(effect.message, Tokens):
            for id in np.frombuffer(effect.message.ids, "<i8").tolist():
                self.heard.setdefault(id, []).append(self.now)

    def launch(self, batch: Batch) -> None:
        start = max(self.now, self._device_free)
        end = self._device_free = start + self.step + self.token * batch.tokens
        ids = self.leader.replica.ids[batch.slots[batch.decodes :]].tolist()
        counts = batch.counts[batch.decodes :].tolist()
        self.steps.append(Done(start, end, batch.decodes, list(zip(ids, counts, strict=True))))
        self.add(end, Arrived(dataclasses.replace(self.tokens.sample(batch), seconds=end - start)))


def burst(run: VirtualRun, streams: int, prompts: int, seed: int, delay: float = 2.0) -> dict[str, float]:
    """Streams decode, then prompts come all at once. Seconds and tokens a second, of the prompts' window."""
    jobs = workloads.burst(workloads.Shape(), streams, prompts, seed)
    for job in jobs:
        at = 0.0 if job.kind == "stream" else delay
        run.add(at, Submit(request(job.index, job.prompt_len, 10**4 if job.kind == "stream" else job.output_len)))
    burst_ids = [j.index for j in jobs if j.kind == "burst"]
    end = delay
    while not all(id in run.heard for id in burst_ids):
        end += 0.5
        run.run(end)
    last = max(run.heard[id][0] for id in burst_ids)
    window = [s for s in run.steps if delay <= s.start and s.end <= last]
    worst = max(_worst_gap(run.heard[j.index], delay, last) for j in jobs if j.kind == "stream")
    rate = sum(j.prompt_len for j in jobs if j.kind == "burst") / (last - delay)
    target = run.leader.planner.budget.target or 0.0
    allowed = (target - run.step - streams * run.token) / run.token / target
    busy = sum(s.end - s.start for s in window) / (window[-1].end - window[0].start)
    median = float(np.median([s.end - s.start for s in window]))
    return {
        "worst decode gap, ms": worst * 1e3,
        "median step, ms": median * 1e3,
        "prefill, ktok/s": rate / 1e3,
        "of what steps of the wished length allow": rate / allowed,
        "device busy": busy,
        "steps planned while one ran": run.leader.steps["overlap"] / run.leader.steps.total(),
    }


def _worst_gap(times: Iterable[float], start: float, end: float) -> float:
    at = np.array([t for t in times if start <= t <= end])
    return float(np.diff(at).max())


def draw(run: VirtualRun, file: pathlib.Path, start: float = 0.2, end: float = 0.5) -> None:
    """The device's steps between two times: their length, what they hold, and the gaps that a stream feels."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (upper, lower) = pyplot.subplots(2, 1, figsize=(11, 5.5), sharex=True, layout="constrained", height_ratios=(3, 2))
    shown = [s for s in run.steps if start <= s.start < end]
    prompts = sorted({id for s in shown for id, _ in s.chunks})
    colors = {id: pyplot.get_cmap("tab10")(i % 10) for i, id in enumerate(prompts)}
    for s in shown:
        _bar(upper, s, start, colors)
    upper.set(
        ylabel="tokens of the step",
        title="One bar a step, as wide as it lasts: decoding rows in grey, a colour for each prompt",
    )
    times = np.array(next(iter(run.heard.values())))
    times = times[(times >= start) & (times <= end)]
    lower.step(
        (times[1:] - start) * 1e3,
        np.diff(times) * 1e3,
        where="pre",
        color="#0072b2",
        label="gap between two tokens of a stream",
    )
    target = run.leader.planner.budget.target
    if target:
        lower.axhline(target * 1e3, color="#cc0000", linewidth=0.9, linestyle="--", label="--target-itl-ms")
    lower.set(xlabel="milliseconds", ylabel="ms", ylim=(0, None))
    lower.legend(loc="center", frameon=False)
    figure.savefig(file, dpi=110)
    pyplot.close(figure)


def _bar(axis: Any, step: Done, begin: float, colors: dict[int, Any]) -> None:
    left, width = (step.start - begin) * 1e3, (step.end - step.start) * 1e3
    axis.bar(left, step.decodes, width, align="edge", color="#555555", edgecolor="white", linewidth=0.3)
    bottom = step.decodes
    for id, tokens in step.chunks:
        axis.bar(left, tokens, width, bottom, align="edge", color=colors[id], edgecolor="white", linewidth=0.3)
        bottom += tokens


def main() -> None:
    parser = argparse.ArgumentParser(prog="slipstream.bench.micro.burst_sim", description=__doc__)
    parser.add_argument("--streams", type=int, default=16, help="streams that decode (default %(default)s)")
    parser.add_argument("--prompts", type=int, default=32, help="prompts of 16k to 30k tokens (default %(default)s)")
    parser.add_argument("--target-itl-ms", type=float, default=16.0, help="the wish (default %(default)s)")
    parser.add_argument("--sim-step-us", type=float, default=3000.0, help="microseconds of a step (default %(default)s)")
    parser.add_argument("--sim-token-us", type=float, default=17.0, help="microseconds of a token (default %(default)s)")
    parser.add_argument("--png", metavar="FILE", help="draw how a few prompts pass beside the streams")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    run = VirtualRun(args.target_itl_ms * 1e-3, args.sim_step_us * 1e-6, args.sim_token_us * 1e-6)
    for name, value in burst(run, args.streams, args.prompts, args.seed).items():
        print(f"{name:42} {value:8.3f}")
    if args.png:
        draw(_example(args), pathlib.Path(args.png))


def _example(args: argparse.Namespace) -> VirtualRun:
    """Streams, then two long prompts at once, then short ones."""
    run = VirtualRun(args.target_itl_ms * 1e-3, args.sim_step_us * 1e-6, args.sim_token_us * 1e-6)
    for id in range(args.streams):
        run.add(0.0, Submit(request(id, 200, 1000)))
    for id, (at, length) in enumerate([(0.24, 5000), (0.24, 3000), (0.30, 300), (0.34, 900), (0.36, 120)], 1000):
        run.add(at, Submit(request(id, length, 16)))
    run.run(0.6)
    return run


if __name__ == "__main__":
    main()
