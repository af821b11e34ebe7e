"""The client's processes: starts them together, watches them, gathers their records. No loss goes unnoticed."""

import multiprocessing
import multiprocessing.connection
import os
import time
import typing

import msgspec

from slipstream.bench.load import worker
from slipstream.bench.load.records import Record
from slipstream.bench.load.worker import Shared, Task
from slipstream.errors import SlipstreamError


class ClientFailed(SlipstreamError):
    """A process of the load generator failed; the figures would be wrong, so none are shown."""


def default_processes(concurrency: int) -> int:
    """The number of client processes: several, so that it does not limit the result; at most half the cores; at least 2."""
    return max(1, min(concurrency, max(2, min(8, len(os.sched_getaffinity(0)) // 2))))


def run(task: Task, processes: int, progress: typing.Callable[[int], None] | None = None) -> list[Record]:
    """Sends the whole workload; returns records in the order of sending. Raises ClientFailed if a process dies."""
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(processes + 1)
    shared = Shared(
        context.Value("q", 0), context.Value("q", 0), context.Value("q", 0), context.Value("d", 0.0), context.Value("d", 0.0),
        barrier,
    )  # fmt: skip
    packed = msgspec.msgpack.encode(task)
    children: list[tuple[typing.Any, typing.Any]] = []
    try:
        for part in range(processes):
            ours, theirs = context.Pipe(duplex=False)
            child = context.Process(target=worker.main, args=(packed, shared, part, processes, theirs), daemon=True)
            child.start()
            theirs.close()
            children.append((child, ours))
        _start(shared, children)
        records = _gather(shared, children, progress)
    finally:
        for child, pipe in children:
            pipe.close()
            if child.is_alive():
                child.terminate()
            child.join(5)
    return sorted(records, key=lambda r: r.sent)


def _start(shared: Shared, children: list[tuple[typing.Any, typing.Any]]) -> None:
    """Waits until every process is ready, then starts them at the same time."""
    deadline = time.monotonic() + 60
    while shared.barrier.n_waiting < len(children):
        if any(child.exitcode is not None for child, _ in children) or time.monotonic() > deadline:
            shared.barrier.abort()
            raise ClientFailed("a process of the load generator did not start")
        time.sleep(0.002)
    shared.start_at.value = time.monotonic()
    shared.barrier.wait(60)


def _gather(
    shared: Shared, children: list[tuple[typing.Any, typing.Any]], progress: typing.Callable[[int], None] | None
) -> list[Record]:
    records: list[Record] = []
    waiting = {pipe: child for child, pipe in children}
    while waiting:
        for pipe in multiprocessing.connection.wait(list(waiting), 0.2):
            child = waiting.pop(pipe)
            try:
                records += msgspec.msgpack.decode(pipe.recv_bytes(), type=list[Record])  # type: ignore[attr-defined]
            except EOFError:
                child.join(5)
                raise ClientFailed(f"a process of the load generator ended with status {child.exitcode}") from None
        if progress:
            progress(shared.done.value)
    return records
