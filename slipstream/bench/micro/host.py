"""`python -m slipstream.bench.micro.host`: what a step costs the host, without a GPU.

Two measurements. The machine alone: plan, publish (encoding included), launch and settle of one leader on one core, with no
device behind it. The engine alone: real processes on the `sim` device at TP 2, and the share of the time in which the device
was busy, which is the throughput against the device's own rate; the client does nothing but count.
"""

import argparse
import json
import os
import pathlib
import socket
import statistics
import tempfile
import threading
import time

import msgspec
import numpy as np

from slipstream.bench.micro.solo import Solo
from slipstream.config import EngineConfig
from slipstream.log.batch import Batch, Outcome
from slipstream.log.caches import one_table
from slipstream.log.entries import Entry
from slipstream.log.replica import Replica
from slipstream.log.request import Request, SamplingParams
from slipstream.process.board import PHASES, Board
from slipstream.process.group import Spec
from slipstream.process.protocol import Attach, Finished, Submit, ToFront
from slipstream.process.supervisor import Supervisor
from slipstream.rank.events import Arrived, Event, Send, SendToFront, Span
from slipstream.rank.leader import Leader
from slipstream.schedule.budget import Budget
from slipstream.schedule.planner import Planner
from slipstream.system.framing import Frames, frame

ROWS = 128
PHASES_SHOWN = ("plan", "publish", "launch", "settle")


def request(id: int, prompt_len: int, max_tokens: int) -> Request:
    rng = np.random.default_rng(id)
    prompt = rng.integers(0, 30_000, prompt_len, dtype=np.int32).tobytes()
    return Request(id, prompt, max_tokens, SamplingParams(temperature=0.0, stop_ids=(2,)))


class TimedLeader(Solo):
    """Sums the host's time by phase and notes the size of each entry; drawing tokens is the device's and does not count."""

    def __init__(self, leader: Leader):
        super().__init__(leader, 30_000)
        self.encode = msgspec.msgpack.Encoder().encode
        self.spent: dict[str, float] = dict.fromkeys(PHASES_SHOWN, 0.0)
        self.outcomes: list[Outcome] = []
        self.sizes: list[int] = []
        self.counting = False
        self._since = 0.0

    def on(self, event: Event, now: float) -> None:
        self._since = time.perf_counter()
        self.perform(self.leader.on(event, now))

    def span(self, effect: Span) -> None:
        now = time.perf_counter()
        if self.counting:
            self.spent[effect.phase] += now - self._since
        self._since = now

    def send(self, effect: Send) -> None:
        size = len(self.encode(effect.message))
        if self.counting and isinstance(effect.message, Entry):
            self.sizes.append(size)

    def send_to_front(self, effect: SendToFront) -> None:
        self.encode(effect.message)

    def launch(self, batch: Batch) -> None:
        pause = time.perf_counter()
        self.outcomes.append(self.tokens.sample(batch))
        self._since += time.perf_counter() - pause


def machine_cost(waiting: int, steps: int = 2000) -> dict[str, float]:
    """Microseconds per step by phase, and bytes per entry, of a leader with ROWS decoding rows and `waiting` requests."""
    replica = Replica(one_table(pages=ROWS * 400, slots=ROWS, max_len=6000, page_size=16))
    timed = TimedLeader(Leader(replica, Planner(replica, Budget(2048), waiting + ROWS), 1, True))
    for id in range(ROWS + waiting):
        timed.on(Submit(request(id, 32, 5900)), id * 1e-6)
    now = 1.0
    for done in range(steps + 50):
        now += 0.004
        timed.counting = done >= 50
        timed.on(Arrived(timed.outcomes.pop(0)), now)
    cost = {phase: seconds / steps * 1e6 for phase, seconds in timed.spent.items()}
    return {**cost, "together": sum(cost.values()), "bytes": statistics.median(timed.sizes)}


def receive_all(sock: socket.socket, count: int) -> None:
    """Reads frames until `count` requests have finished."""
    decode, frames = msgspec.msgpack.Decoder(ToFront).decode, Frames()
    while count:
        part = sock.recv(1 << 20)
        if not part:
            raise SystemExit("the engine ended")
        count -= sum(isinstance(message, Finished) for message in map(decode, frames.feed(part)))


def engine_share(scheduling: str, step_us: float, size: int = 2, tokens: int = 1000) -> dict[str, float]:
    """The device's busy share, and tokens per second, of ROWS requests decoding on real processes."""
    with tempfile.TemporaryDirectory() as folder:
        sizes = {"vocab_size": 30_000, "max_position_embeddings": 8192}
        (pathlib.Path(folder) / "config.json").write_text(json.dumps(sizes))
        config = EngineConfig(
            model=folder,
            device="sim",
            scheduling=scheduling,
            max_num_seqs=ROWS,
            sim_step_us=step_us,
            sim_token_us=0.0,
            max_num_batched_tokens=8192,
        )
        board = Board.create(size)
        attached: list[socket.socket] = []
        there = threading.Event()

        def on_attach(_: Attach, sock: socket.socket) -> None:
            attached.append(sock)
            there.set()

        supervisor = Supervisor([Spec(0, config, folder, size, 0)], board, 30.0, on_attach)
        thread = threading.Thread(target=supervisor.run, daemon=True)
        thread.start()
        there.wait(60)
        sock = attached[0]
        encode = msgspec.msgpack.Encoder().encode
        frames = [frame(encode(Submit(request(id, 32, tokens)))) for id in range(ROWS)]
        begin = time.monotonic()
        sock.sendall(b"".join(frames))
        receive_all(sock, ROWS)
        seconds = time.monotonic() - begin
        spans = board.spans(0, seconds)
        spans = spans[spans["phase"] == PHASES.index("device")][5:-5]
        supervisor.stop()
        thread.join()
    wall = spans["end"][-1] - spans["start"][0]
    return {"share": float((spans["end"] - spans["start"]).sum() / wall), "tokens_per_s": ROWS * tokens / seconds}


def main() -> None:
    parser = argparse.ArgumentParser(prog="slipstream.bench.micro.host", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer steps")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each row; the median is shown")
    args = parser.parse_args()
    steps, tokens = (500, 300) if args.quick else (2000, 1000)
    print(
        f"{ROWS} decoding rows, microseconds per step, one core ({os.cpu_count()} in the machine), median of {args.repeats}\n"
    )
    print("| waiting | plan | publish | launch | settle | together | bytes per entry |\n|---|---|---|---|---|---|---|")
    for waiting in (0, 10_000):
        runs = sorted((machine_cost(waiting, steps) for _ in range(args.repeats)), key=lambda r: r["together"])
        r = runs[len(runs) // 2]
        cells = " | ".join(f"{r[p]:.0f}" for p in (*PHASES_SHOWN, "together", "bytes"))
        print(f"| {waiting} | {cells} |", flush=True)
    print("\n| step, ms | scheduling | device busy | tokens/s |\n|---|---|---|---|")
    for step_us in (3000.0, 500.0):
        for scheduling in ("async", "serial"):
            runs = sorted(
                (engine_share(scheduling, step_us, tokens=tokens) for _ in range(args.repeats)), key=lambda r: r["share"]
            )
            r = runs[len(runs) // 2]
            print(f"| {step_us / 1e3:g} | {scheduling} | {r['share']:.3f} | {r['tokens_per_s']:.0f} |", flush=True)


if __name__ == "__main__":
    main()
