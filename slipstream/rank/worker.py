"""A rank's process: `python -m slipstream.rank.worker FD PARENT`; FD is its control socket, PARENT the supervisor's pid."""

import hashlib
import json
import os
import platform
import sys
import time
import traceback

from slipstream import __version__, config
from slipstream.device.select import build_executor, resolve_device
from slipstream.errors import ConfigError, ModelError
from slipstream.log.caches import Limits
from slipstream.log.replica import Replica
from slipstream.process.board import Board
from slipstream.process.channel import FollowerEnd, LeaderEnd, Ring
from slipstream.process.control import MAX_REASON_CHARS, Control, begin_member, report_ready
from slipstream.process.protocol import Begin, Fault, Loaded, Setup
from slipstream.rank.driver import Driver, FollowerDriver, Parts, spare_cores
from slipstream.rank.leader import Leader
from slipstream.rank.leader_driver import LeaderDriver
from slipstream.rank.loop import Rank
from slipstream.rank.preparer import Makers, Preparer
from slipstream.schedule.budget import Budget
from slipstream.schedule.planner import Planner
from slipstream.schedule.speculation import AutoWidth


def main() -> int:
    begun = begin_member(int(sys.argv[1]), int(sys.argv[2]))
    if begun is None:
        return 0
    control, setup, fds = begun
    try:
        return run(control, setup, fds)
    except (ConfigError, ModelError, MemoryError) as e:
        control.send(Fault(setup.rank, -1, str(e)[:MAX_REASON_CHARS] or "out of memory", refusal=True))
    except Exception as e:
        traceback.print_exc()
        control.send(Fault(setup.rank, -1, f"rank {setup.rank} could not start: {type(e).__name__}: {e}"[:MAX_REASON_CHARS]))
    return 1


def run(control: Control, setup: Setup, fds: list[int]) -> int:
    engine = config.from_json(config.EngineConfig, setup.engine)
    board = Board(fds[0]).writer(setup.block)
    board.begin(setup.group, setup.rank, setup.incarnation)
    executor, model = build_executor(engine, setup.model_path, setup.rank, setup.size, fds[1], board)
    c = executor.capacity()
    board.set("weight_bytes", c.weight_bytes)
    control.send(Loaded(c.limits, c.weight_bytes, stamp(setup.engine, model)))
    got = control.receive()
    if got is None:
        return 0
    begin, _ = got
    assert isinstance(begin, Begin)
    preparer = Preparer(lambda: open_makers(engine, setup.model_path))
    preparer.open()
    executor.start(begin.limits)
    preparer.wait_open()
    board.set("beat_ns", time.monotonic_ns())
    parts = Parts(executor, control, board, preparer, spare_cores(setup.size))
    driver = build_driver(engine, setup, begin.limits, parts, fds[2:])
    report_ready(control, board)
    code = driver.run()
    os._exit(code)  # device threads may hang in a sum that a dead peer will never finish


def open_makers(engine: config.EngineConfig, model_path: str) -> Makers:
    """The makers of resources for this model's requests."""
    from slipstream.grammar.matcher import open_maker  # on the preparer's thread: it loads a tokenizer

    return {"grammar": open_maker(engine, model_path)}


def stamp(engine: str, model: dict) -> str:
    """A text that must be equal on all ranks. It covers code, libraries, configuration and the model's config."""
    torch = sys.modules.get("torch")
    libraries = f"{__version__} {platform.python_version()} {getattr(torch, '__version__', '-')}"
    text = engine + json.dumps(model, sort_keys=True, default=str)
    return f"{libraries} {hashlib.blake2b(text.encode(), digest_size=8).hexdigest()}"


def build_driver(engine: config.EngineConfig, setup: Setup, limits: Limits, parts: Parts, channel_fds: list[int]) -> Driver:
    """This rank's machine in its driver."""
    replica = Replica(limits)
    rings = [Ring(memory, event) for memory, event in zip(channel_fds[0::2], channel_fds[1::2], strict=True)]
    if setup.rank:
        return FollowerDriver(Rank(setup.rank, replica), parts, FollowerEnd(rings[0], rings[1]))
    target = default_target_itl_ms(engine.device) if engine.target_itl_ms is None else engine.target_itl_ms
    budget = Budget(engine.max_num_batched_tokens, target * 1e-3)
    auto = AutoWidth(replica.limits.width) if engine.speculative_tokens == "auto" else None
    planner = Planner(replica, budget, engine.max_queue, parts.executor.copy_seconds, auto)
    leader = Leader(replica, planner, setup.size, engine.scheduling == "async")
    return LeaderDriver(leader, parts, LeaderEnd(rings[0::2], rings[1::2], engine.step_timeout), engine.queue_memory_bytes)


def default_target_itl_ms(device: str) -> float:
    """16 ms on a GPU and on the simulated device, 100 ms on a CPU."""
    return 100.0 if resolve_device(device) == "cpu" else 16.0


if __name__ == "__main__":
    sys.exit(main())
