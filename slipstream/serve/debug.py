"""The routes of --enable-debug: where each rank stands, and the ranks' last seconds as a trace that Perfetto opens."""

import math
from collections.abc import Iterator

import numpy as np
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from slipstream.errors import BadRequest
from slipstream.process.board import PHASE_ID, PHASES, Board
from slipstream.serve.delivery import LongResponse
from slipstream.serve.engine.exclusive import run_sliced
from slipstream.serve.front import Front
from slipstream.serve.info import as_json
from slipstream.serve.openai.writers import HOLE, encode, filled, listed

MAX_SECONDS = 600.0
TOGETHER = 256  # events written at a time, which takes about 1 ms
LOOP, DEVICE = 1, 2  # thread ids in the trace


async def ranks(http: HttpRequest) -> Response:
    """GET /debug/ranks: a list of {group, rank, pid, weight_bytes, launched, settled, state, ...}."""
    front: Front = http.app.state.front
    out = []
    for s in front.board.ranks() if front.board else []:
        out.append(
            {
                "group": s.group,
                "rank": s.rank,
                "pid": s.pid,
                "weight_bytes": s.weight_bytes,
                "launched": s.launched,
                "settled": s.settled,
                "state": s.state,
                "incarnation": s.incarnation,
                "applied": s.applied,
                "arrived": s.arrived,
                "phase": s.phase,
                "waits_for": s.waits_for,
                "digest": f"{s.digest:016x}",
            }
        )
    return as_json(out)


async def timeline(http: HttpRequest) -> Response:
    """GET /debug/timeline?seconds=S: Chrome trace JSON; one process per rank with the threads `loop` and `device`."""
    front: Front = http.app.state.front
    text = http.query_params.get("seconds", "5")
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds <= MAX_SECONDS:
        raise BadRequest(f"seconds: a number above 0 and at most {MAX_SECONDS:.0f}", "seconds")
    board = front.board
    some = trace(board, seconds) if board else iter(())
    pieces = filled({"traceEvents": HOLE, "displayTimeUnit": "ms"}, [listed([encode(events)[1:-1]] for events in some)])
    return LongResponse(await run_sliced(pieces))


def trace(board: Board, seconds: float) -> Iterator[list[dict]]:
    """Complete ("X") events in microseconds of the monotonic clock, preceded by the names of processes and threads.

    They come in short lists, none of which is empty: all ranks' last minutes may be 100,000 events.
    """
    for block in range(board.blocks):
        state = board.state(block)
        spans = board.spans(block, seconds)
        if not state.pid and not len(spans):
            continue
        meta = {"ph": "M", "pid": block, "ts": 0}
        yield [
            {**meta, "tid": 0, "name": "process_name", "args": {"name": f"group {state.group} rank {state.rank}"}},
            {**meta, "tid": LOOP, "name": "thread_name", "args": {"name": "loop"}},
            {**meta, "tid": DEVICE, "name": "thread_name", "args": {"name": "device"}},
        ]
        for at in range(0, len(spans), TOGETHER):
            if events := _events(block, spans[at : at + TOGETHER]):
                yield events


def _events(block: int, spans: np.ndarray) -> list[dict]:
    device = PHASE_ID["device"]
    out = []
    for start, end, entry, phase, collective, _ in spans.tolist():
        if not 0 <= phase < len(PHASES):
            continue  # torn by its writer
        args = {"entry": entry, "collectives": collective} if phase == device else {"entry": entry}
        thread = DEVICE if phase == device else LOOP
        name = PHASES[phase]
        event = {"name": name, "cat": name, "ph": "X", "ts": start / 1e3, "dur": (end - start) / 1e3}
        out.append({**event, "pid": block, "tid": thread, "args": args})
    return out
