"""The share of wall time that the device idled between steps, from the server's `/debug/timeline`."""

import typing

from slipstream.client.http import Client

GAP_US = 5.0


async def fetch(base_url: str, key: str | None, seconds: float) -> typing.Any:
    """The last `seconds` of every rank's phases as Chrome trace JSON. The server needs `--enable-debug`."""
    async with Client(base_url, key, timeout=60) as client:
        return await client.request("GET", f"/debug/timeline?seconds={seconds:.1f}")


def idle_share(trace: typing.Any) -> dict[str, float]:
    """For each rank the share of wall time in gaps over 5 µs between device spans, in percent.

    `trace` is a list of events or an object with `traceEvents`; device spans are the complete events with the name or
    category "device", their times are in µs, and each process of the trace is a rank.
    """
    events = trace.get("traceEvents", []) if isinstance(trace, dict) else trace
    ranks: dict[str, list[tuple[float, float]]] = {}
    for e in events:
        if e.get("ph") == "X" and "device" in (e.get("name"), e.get("cat")):
            ranks.setdefault(str(e.get("pid")), []).append((float(e["ts"]), float(e["ts"]) + float(e.get("dur", 0))))
    return {f"device_idle_percent_rank_{rank}": share for rank, spans in ranks.items() if (share := _share(spans)) is not None}


def _share(spans: list[tuple[float, float]]) -> float | None:
    spans.sort()
    start, end = spans[0][0], max(e for _, e in spans)
    if end <= start:
        return None
    idle, reached = 0.0, spans[0][1]
    for begin, stop in spans[1:]:
        if begin - reached > GAP_US:
            idle += begin - reached
        reached = max(reached, stop)
    return idle / (end - start) * 100
