"""How many threads a step on the CPU gets: all that the rank has, or one while other programs want its cores.

PyTorch's threads wait for each other after every layer, some hundred times a step. Where one of them has lost its core to
another program, the others wait for a slice of the kernel's scheduler each time, and a step takes 20 to 40 times as long. One
thread waits for no other.
"""

import os
import time
from collections.abc import Callable

import torch

MIN_LEARNED_WORK_S = 0.005  # of work, below which nothing is learned
MIN_RUNNING_SHARE = 0.75  # of its time that the working thread ran, on average, below which others are taken to want the cores
SMOOTHING = 0.3  # weight of the latest work in that average: a hiccup of the machine is no sign
HOLD_S = 0.5  # of one thread before the machine is looked at again ...
MAX_HOLD_S = 8.0  # ... which doubles up to so many where all threads turn out to lose their cores again
MIN_FREE_CORE_SHARE = 0.7  # of a core that must have been free for each further thread
_TICK = 1 / os.sysconf("SC_CLK_TCK")


def free_seconds() -> float:
    """Seconds that the machine's cores have been free, together, since it started; as if always where the system does not say.

    Free are idle cores, those that wait for a disk, and those with programs that stand back for everybody (`nice`).
    """
    try:
        with open("/proc/stat", "rb") as f:
            _, _, nice, _, idle, waiting, *_ = f.readline().split()
        return (int(nice) + int(idle) + int(waiting)) * _TICK
    except (OSError, ValueError):
        return time.monotonic() * (os.cpu_count() or 1)


class Crew:
    """Runs pieces of work on the calling thread, and sets how many threads PyTorch may use in them: 1 or `most`."""

    def __init__(self, most: int, free: Callable[[], float] = free_seconds):
        self.most = most
        self.count = most
        self._free = free
        self._hold = HOLD_S
        self._kept = 1.0
        self._since = 0.0  # when the last look at the machine was ...
        self._free_then = 0.0  # ... and what it said
        self._well_since = 0.0  # since when all threads have kept their cores
        torch.set_num_threads(most)

    def run(self, work: Callable[[], None]) -> None:
        if self.most == 1:
            work()
            return
        wall, ran = time.monotonic(), time.thread_time()
        if self.count == 1:
            self.look(wall)
        work()
        self.observe(time.monotonic(), time.monotonic() - wall, time.thread_time() - ran)

    def observe(self, now: float, wall: float, ran: float) -> None:
        """A piece of work took `wall` seconds up to `now`, of which its thread ran for `ran`."""
        if self.count == 1 or wall < MIN_LEARNED_WORK_S:
            return
        self._kept += SMOOTHING * (ran / wall - self._kept)
        if self._kept < MIN_RUNNING_SHARE:
            self._set(1)
            self._hold = HOLD_S if now - self._well_since > MAX_HOLD_S else min(2 * self._hold, MAX_HOLD_S)
            self._since, self._free_then = now, self._free()

    def look(self, now: float) -> None:
        """Takes all threads again once the machine has had cores free for them since the last look."""
        passed = now - self._since
        if passed < self._hold:
            return
        free = self._free()
        if free - self._free_then >= MIN_FREE_CORE_SHARE * passed * (self.most - 1):
            self._set(self.most)
            self._well_since = now
        self._since, self._free_then = now, free

    def _set(self, count: int) -> None:
        self.count, self._kept = count, 1.0
        torch.set_num_threads(count)
