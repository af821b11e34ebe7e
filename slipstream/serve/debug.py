"""The routes of --enable-debug: where each rank stands, and the ranks' last seconds as a trace that Perfetto opens."""

import math

import numpy as np
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from slipstream.errors import BadRequest
from slipstream.process.board import PHASE_ID, PHASES, Board
from slipstream.serve.front import Front
from slipstream.serve.info import as_json
from slipstream.serve.text.prompts import prepare

MAX_SECONDS = 600.0
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
    events = await prepare(None, lambda: trace(board, seconds)) if board else []
    return as_json({"traceEvents": events, "displayTimeUnit": "ms"})


def trace(board: Board, seconds: float) -> list[dict]:
    """Complete ("X") events in microseconds of the monotonic clock, preceded by the names of processes and threads."""
    out: list[dict] = []
    for block in range(board.blocks):
        state = board.state(block)
        spans = board.spans(block, seconds)
        if not state.pid and not len(spans):
            continue
        meta = {"ph": "M", "pid": block, "ts": 0}
        out.append({**meta, "tid": 0, "name": "process_name", "args": {"name": f"group {state.group} rank {state.rank}"}})
        out.append({**meta, "tid": LOOP, "name": "thread_name", "args": {"name": "loop"}})
        out.append({**meta, "tid": DEVICE, "name": "thread_name", "args": {"name": "device"}})
        out.extend(_events(block, spans))
    return out


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
