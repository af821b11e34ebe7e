"""How many threads a step on the CPU gets: all that the rank has, or one while other programs want its cores.

PyTorch's threads wait for each other after every layer, some hundred times a step. Where one of them has lost its core to
another program, the others wait for a slice of the kernel's scheduler each time, and a step takes 20 to 40 times as long. A
single thread does not wait.
"""

import os
import time
from collections.abc import Callable

import torch

MIN_LEARNED_WORK_S = 0.005  # shorter work is not measured
MIN_RUNNING_SHARE = 0.75  # where the working thread runs a smaller share of its time, other programs want the cores
SMOOTHING = 0.3  # weight of the latest work in the average share: a hiccup of the machine changes little
HOLD_S = 0.5  # time with one thread before the machine is examined again ...
MAX_HOLD_S = 8.0  # ... which doubles up to this where all threads lose their cores again
MIN_FREE_CORE_SHARE = 0.7  # this much of a core must have been free for each further thread
_TICK = 1 / os.sysconf("SC_CLK_TCK")


def free_seconds() -> float:
    """Seconds that all cores together have been free since the machine started; if the system has no count, all its time.

    A core is free if it is idle, waits for a disk, or runs a program of low priority (`nice`).
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
        self._since = 0.0  # the time of the last look at the machine ...
        self._free_then = 0.0  # ... and its free seconds then
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
        """Learns from a piece of work that took `wall` seconds up to `now`, of which its thread ran for `ran`."""
        if self.count == 1 or wall < MIN_LEARNED_WORK_S:
            return
        self._kept += SMOOTHING * (ran / wall - self._kept)
        if self._kept < MIN_RUNNING_SHARE:
            self._set(1)
            self._hold = HOLD_S if now - self._well_since > MAX_HOLD_S else min(2 * self._hold, MAX_HOLD_S)
            self._since, self._free_then = now, self._free()

    def look(self, now: float) -> None:
        """Uses all threads again if the machine has had free cores for them since the last look."""
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
