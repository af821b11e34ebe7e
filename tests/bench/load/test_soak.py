"""When the soak says that a process grows, and what it reads of processes."""

import os

import pytest

from slipstream.bench.load.soak import GROWTH_BYTES, growth, module, status

MB = 1 << 20


@pytest.mark.parametrize(
    ("samples", "grows"),
    [
        ([300 + 600 * min(i, 40) / 40 for i in range(100)], False),  # up to two fifths, then level
        ([800] * 50 + [800 + 20 * (i % 2) for i in range(50)], False),  # it comes and goes
        ([800] * 99 + [1200], False),  # once
        ([773 + 18 * i for i in range(100)], True),  # as fast as oneDNN's kernels made it
        ([2000] * 50 + [2000 + 4 * i for i in range(50)], True),
    ],
)
def test_only_what_still_rises_after_half_time_is_growth(samples, grows):
    assert growth([int(s * MB) for s in samples])[2] is grows


def test_few_samples_are_enough():
    assert not growth([5 * GROWTH_BYTES])[2]
    assert growth([0, 0, GROWTH_BYTES + 1])[2]


def test_memory_and_module_are_read_from_the_system():
    assert status(os.getpid(), "PPid") == os.getppid() and status(os.getpid(), "RssAnon") > 1000
    assert "python" in module(os.getpid()) or module(os.getpid()).startswith("slipstream.")
