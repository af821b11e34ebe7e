"""Whether the ranks move: samples the board's counters and keeps the time when each rank's last changed."""

import time

from slipstream.process.board import Board

BEAT_SECONDS = 10.0  # a loop counts its turns even while it waits


class Progress:
    """Call `look` about once a second. A rank not yet seen since its start does not count as stalled.

    An idle leader writes an entry each second, so counters that stand still for `step_timeout` seconds mean a step that hangs.
    """

    def __init__(self, board: Board | None, step_timeout: float):
        self._board = board
        self._work_seconds = step_timeout
        self._beat_seconds = min(BEAT_SECONDS, step_timeout)
        self._seen: dict[tuple[int, int], tuple[tuple, float, int, float]] = {}

    def look(self) -> None:
        if self._board is None:
            return
        now, seen = time.monotonic(), {}
        for s in self._board.ranks():
            if s.state == "starting":
                continue  # the loop does not turn while the rank loads and compiles
            work = (s.incarnation, s.pid, s.applied, s.launched, s.arrived, s.settled)
            old = self._seen.get((s.group, s.rank))
            work_at = old[1] if old and old[0] == work else now
            beat_at = old[3] if old and old[2] == s.beat_ns and old[0][:2] == work[:2] else now
            seen[s.group, s.rank] = (work, work_at, s.beat_ns, beat_at)
        self._seen = seen

    def stalled(self) -> str | None:
        """A sentence that names the rank that has stood still for too long, or None."""
        now = time.monotonic()
        for (group, rank), (_, work_at, _, beat_at) in self._seen.items():
            if now - beat_at > self._beat_seconds:
                return f"rank {rank} of group {group} has not turned its loop for {now - beat_at:.0f} s"
            if now - work_at > self._work_seconds:
                return f"rank {rank} of group {group} has made no progress for {now - work_at:.0f} s"
        return None
