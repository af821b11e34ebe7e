"""A rank that misbehaves when told to: the production worker with one of its parts wrapped.

Run in place of `slipstream.rank.worker`. Before each thing that it could spoil it looks at the file named by FAULT_FILE,
{"rank": R, "fault": NAME}; the rank that is meant takes the file away and misbehaves. FAULT_START is the same for faults at
start, {"rank": R, "fault": NAME, "from": I}, of incarnations I and later.
"""

import dataclasses
import json
import os
import signal
import sys
import time

import numpy as np

from slipstream.device.executor import StepFailed
from slipstream.log.entries import Entry, Reply
from slipstream.log.replica import Replica
from slipstream.process.channel import FollowerEnd, LeaderEnd
from slipstream.process.control import Control
from slipstream.process.protocol import Setup
from slipstream.rank import worker
from slipstream.rank.front_link import FrontLink
from slipstream.schedule.planner import Planner

SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}
setup = Setup("", "", 0, 0, -1, 0, 0)  # this rank's, once it is known
lasting: set[str] = set()  # faults that stay once they have begun


def is_due(*names: str) -> str | None:
    """The fault among `names` that this rank is to commit now. Each is committed once, but those of `lasting`."""
    for name in names:
        if name in lasting:
            return name
    path = os.environ["FAULT_FILE"]
    if not os.path.exists(path):
        return None
    try:
        with open(path) as file:
            order = json.load(file)
    except (OSError, ValueError):
        return None
    if order["rank"] != setup.rank or order["fault"] not in names:
        return None
    os.unlink(path)
    if order.get("lasting"):
        lasting.add(order["fault"])
    return order["fault"]


def strike(phase: str) -> None:
    """Ends or stops this very process in a phase of its loop: "kill:launch", "stop:settle" and the like."""
    due = is_due(*(f"{how}:{phase}" for how in SIGNALS))
    if due:
        os.kill(os.getpid(), SIGNALS[due.split(":")[0]])


class BadExecutor:
    """Wraps an executor."""

    def __init__(self, executor):
        self._executor = executor

    def __getattr__(self, name: str):
        return getattr(self._executor, name)

    def capacity(self):
        capacity = self._executor.capacity()
        if starts_with("less memory"):
            tables = tuple(t._replace(pages=t.pages // 3) for t in capacity.limits.tables)
            return dataclasses.replace(capacity, limits=capacity.limits._replace(tables=tables, slots=2))
        return capacity

    def init_slot(self, slot, request) -> None:
        strike("admit")
        self._executor.init_slot(slot, request)

    def launch(self, batch) -> None:
        strike("launch")
        if batch.decodes < len(batch.slots):
            strike("prefill")
        due = is_due("raise", "loop hangs", "exit")
        if due == "raise":
            raise RuntimeError("an illegal memory access was encountered")
        if due == "exit":
            os._exit(3)
        if due == "loop hangs":
            time.sleep(3600)
        due = is_due("out of memory", "kernel hangs")
        if due:
            on_the_gpu(due, self._executor)
        if is_due("forward hangs"):
            self._executor._work.put(lambda: time.sleep(3600))  # on the device's own thread
        self._executor.launch(batch)
        strike("step")

    def outcomes(self):
        found = self._executor.outcomes()
        if is_due("step fails"):
            raise StepFailed("a kernel failed")
        if is_due("device hangs"):
            return []
        if found and is_due("other token"):
            o = found[0]
            return [dataclasses.replace(o, tokens=np.full_like(o.tokens, 7)), *found[1:]]
        return found


def on_the_gpu(fault: str, executor) -> None:
    """Asks for more than any GPU has, or queues a kernel that spins for days before the step."""
    import torch

    if fault == "out of memory":
        torch.empty(1 << 48, dtype=torch.uint8, device=executor.device)
    with torch.cuda.stream(executor.stream):
        torch.cuda._sleep(1 << 48)


def starts_with(name: str) -> bool:
    order = json.loads(os.environ.get("FAULT_START", "null"))
    return bool(order) and order["rank"] == setup.rank and order["fault"] == name and setup.incarnation >= order["from"]


def wrap(owner: type, name: str, around) -> None:
    """Replaces a method by `around(original, self, ...)`."""
    original = getattr(owner, name)
    setattr(owner, name, lambda self, *a, **k: around(original, self, *a, **k))


def plan(original, self, depth: int):
    strike("plan")
    return original(self, depth)


def settle(original, self, outcome):
    strike("settle")
    return original(self, outcome)


def answer(original, self, reply: Reply) -> None:
    strike("answer")
    due = is_due("wrong digest", "reply twice", "reply lost", "late reply", "silent", "wrong rank")
    if due == "wrong digest":
        reply = Reply(reply.rank, reply.seq, reply.digest ^ 1, reply.existed)
    if due == "wrong rank":
        reply = Reply(0, reply.seq, reply.digest, reply.existed)
    if reply.existed and is_due("wrong existed"):
        reply = Reply(reply.rank, reply.seq, reply.digest, tuple(not x for x in reply.existed))
    if due == "late reply":
        time.sleep(1.0)
    if due in ("reply lost", "silent"):
        return
    if due == "reply twice":
        original(self, reply)
    original(self, reply)


def receive(original, self):
    if is_due("deaf"):
        return []
    return original(self)


def send(original, self, message) -> int:
    strike("publish")
    due = is_due("garbled", "entry lost", "entry twice") if isinstance(message, Entry) else None
    if due == "garbled":
        self._out[0].put(b"\xc1\xff\x00garbled")
    if due == "entry lost":
        ring = self._out.pop(0)
        size = original(self, message)
        self._out.insert(0, ring)
        return size
    if due == "entry twice":
        original(self, message)
    if os.path.exists(os.environ["FAULT_FILE"]) and len(self._out) > 1:
        first, rest = self._out[:1], self._out[1:]
        self._out = first
        original(self, message)
        strike("half published")
        self._out = rest
        size = original(self, message)
        self._out = first + rest
        return size
    return original(self, message)


def flush(original, self) -> None:
    if is_due("front link cut"):
        self.close("a fault of the test")
    original(self)


def build_executor(original):
    def build(*args):
        if starts_with("cannot load"):
            raise RuntimeError("the weights are gone")
        if starts_with("dies at start"):
            os.kill(os.getpid(), signal.SIGKILL)
        executor, model = original(*args)
        return BadExecutor(executor), {**model, "odd": 1} if starts_with("other config") else model

    return build


def learn(original, self):
    """Takes this rank's setup from the first message."""
    global setup
    got = original(self)
    if got is not None and isinstance(got[0], Setup):
        setup = got[0]
    return got


def main() -> int:
    wrap(Control, "receive", learn)
    wrap(Planner, "plan", plan)
    wrap(Replica, "settle", settle)
    wrap(FollowerEnd, "answer", answer)
    wrap(FollowerEnd, "receive", receive)
    wrap(LeaderEnd, "send", send)
    wrap(FrontLink, "flush", flush)
    worker.build_executor = build_executor(worker.build_executor)
    return worker.main()


if __name__ == "__main__":
    sys.exit(main())
