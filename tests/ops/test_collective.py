"""Sums and gathers through shared memory, with more ranks than cores, in pieces, and with a peer that never comes."""

import os
import subprocess
import sys
import threading
import time

import pytest
import torch

from slipstream.ops.collective import Abandoned, SharedMemory, Solo
from tests.device.groups import collectives


def together(size: int, work, max_bytes: int = 1 << 12) -> list:
    """Runs work(collective) on `size` ranks in threads; their results."""
    sums, out = collectives(size, max_bytes), [None] * size
    threads = [threading.Thread(target=lambda r=r: out.__setitem__(r, work(sums[r])), daemon=True) for r in range(size)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(60)
    return out


@pytest.mark.parametrize("size", [2, 3, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_are_right_and_bit_for_bit_the_same_on_all_ranks(size, dtype):
    """Shapes change from call to call, and some are larger than the shared buffer."""
    shapes = [(1, 576), (16, 576), (3, 7), (40, 100), (0, 5)] * 8
    parts = [
        [torch.randn(s, generator=torch.Generator().manual_seed(100 * r + i)).to(dtype) for i, s in enumerate(shapes)]
        for r in range(size)
    ]
    got = together(size, lambda c: [c.all_reduce_sum(p.clone()) for p in parts[c.rank]])
    for i in range(len(shapes)):
        expected = sum(parts[r][i].double() for r in range(size))
        assert torch.allclose(got[0][i].double(), expected, atol=1e-5 if dtype == torch.float32 else 0.1)
        assert all(torch.equal(got[0][i], got[r][i]) for r in range(1, size))


def test_gathers_keep_rank_order_and_any_length():
    def work(c):
        rows = c.all_gather(torch.arange(2000) + 10000 * c.rank)
        return rows[:, -1].tolist(), c.all_gather_bytes(bytes([c.rank]) * (5000 * c.rank)), c.all_gather_bytes(b"")

    for rows, data, empty in together(3, work):
        assert rows == [1999, 11999, 21999]
        assert [len(d) for d in data] == [0, 5000, 10000] and data[2] == b"\2" * 10000
        assert empty == [b""] * 3


def test_a_group_of_one_is_itself():
    c = Solo()
    assert c.all_gather_bytes(b"x") == [b"x"] and c.all_gather(torch.ones(2)).shape == (1, 2)


def test_a_wait_tells_whom_it_is_for_and_can_be_left():
    waiting, left = collectives(2)[0], []
    waiting.on_wait = left.append

    def work():
        try:
            waiting.all_reduce_sum(torch.ones(4))
        except Abandoned as e:
            left.append(str(e))

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    deadline = time.monotonic() + 30
    while not left and time.monotonic() < deadline:
        time.sleep(0.01)
    assert left == [1]
    waiting.close()
    thread.join(30)
    assert "waiting for rank 1" in left[-1]


def test_a_rank_that_waits_says_so_every_two_seconds_and_leaves_the_core(tmp_path):
    """A peer that never comes: lines on standard error, and little processor time."""
    code = """
import os, resource, threading, time, torch
from slipstream.ops.collective import SharedMemory
fd = os.memfd_create("x"); os.ftruncate(fd, SharedMemory.required_bytes(2, 4096))
threading.Thread(target=SharedMemory(fd, 0, 2, 4096).all_reduce_sum, args=(torch.ones(4),), daemon=True).start()
time.sleep(0.5); before = time.process_time(); time.sleep(4); print(time.process_time() - before); os._exit(0)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, cwd=os.getcwd())
    lines = done.stderr.strip().splitlines()
    assert len(lines) >= 1 and all("rank 0 waits for rank 1 in collective 1" in line for line in lines)
    assert float(done.stdout) < 1.0


def test_too_little_memory_is_refused():
    fd = os.memfd_create("x")
    os.ftruncate(fd, 100)
    with pytest.raises(ValueError, match="has 100 bytes"):
        SharedMemory(fd, 0, 2, 4096)
    os.close(fd)
