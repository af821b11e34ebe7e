import os
import subprocess
import sys
import textwrap
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.transport.arena import ENTRIES, Arena
from slipstream.transport.base import TransportError, TransportFull
from slipstream.transport.buddy import Buddy

MB = 1 << 20


@pytest.fixture
def pair():
    fd = Arena.create(2, MB)
    yield Arena(fd, 0), Arena(fd, 1)
    os.close(fd)


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 70_000)), max_size=60))
@settings(max_examples=50, deadline=None)
def test_buddy_blocks_never_overlap_and_all_come_back(moves):
    buddy, held = Buddy(256 * 1024), {}
    for take, size in moves:
        if take:
            at = buddy.alloc(size)
            if at is None:
                assert buddy.free_bytes < 256 * 1024
                continue
            assert all(at + size <= o or o + n <= at for o, n in held.items())
            held[at] = size
        elif held:
            buddy.free(held.popitem()[0])
        # what is held is never handed out again
    for at in held:
        buddy.free(at)
    assert buddy.free_bytes == buddy.size and buddy.alloc(buddy.size) == 0


@pytest.mark.parametrize("dtype", ["float32", "float16", "int64", "uint8", "bool", "complex64"])
def test_what_is_put_is_what_the_reader_gets(pair, dtype):
    a, b = pair
    arrays = [
        np.arange(24).reshape(2, 3, 4).astype(dtype),
        np.arange(10).astype(dtype)[::2],
        np.array(3, dtype),
        np.empty((0, 5), dtype),
    ]
    for want, got in zip(arrays, b.get(a.put(arrays, [1])), strict=True):
        assert got.dtype == want.dtype and got.shape == want.shape and (got == want).all()
        with pytest.raises(ValueError, match="read-only"):
            got[...] = 0


def test_memory_returns_when_the_last_reader_has_released(pair):
    a, b = pair
    (id,) = a.put([np.zeros(5000, np.uint8)], [0, 1])
    b.retain([id])
    b.release([id])
    assert a.live == 1 and b.get([id])
    b.release([id])
    with pytest.raises(TransportError, match="released"):
        b.release([id])
    assert a.live == 1
    a.release([id])
    assert a.live == 0 and a.free_bytes == MB


def test_a_stale_id_is_refused_after_its_place_was_used_again(pair):
    a, b = pair
    (old,) = a.put([np.zeros(8)], [1])
    b.release([old])
    assert a.live == 0
    (new,) = a.put([np.ones(8)], [1])
    assert new != old and (b.get([new])[0] == 1).all()
    for id in (old, 0, 77 << 48 | 1):
        with pytest.raises(TransportError):
            b.get([id])


def test_ff67_a_raise_in_mid_batch_leaves_nothing(pair):
    a, b = pair
    good = np.zeros(100_000, np.uint8)
    for bad, error in (
        (np.array([object()]), TransportError),
        (np.zeros(2 * MB, np.uint8), TransportError),
        (np.zeros(MB - 1, np.uint8), TransportFull),
    ):
        with pytest.raises(error):
            a.put([good, good, bad], [1])
        assert a.live == 0 and a.free_bytes == MB
    ids = a.put([good], [1])
    with pytest.raises(TransportError):
        b.release([*ids, 5])
    assert a.live == 1, "a batch that raises releases none"
    with pytest.raises(TransportError):
        a.put([good], [])
    with pytest.raises(TransportError):
        a.put([good], [2])


def test_a_full_arena_refuses_visibly_or_waits(pair):
    a, b = pair
    ids = a.put([np.zeros(MB // 2, np.uint8)] * 2, [1])
    with pytest.raises(TransportFull, match="2 tensors are unread, 0 bytes free"):
        a.put([np.zeros(1)], [1])
    t0 = time.monotonic()
    with pytest.raises(TransportFull):
        a.put([np.zeros(1)], [1], wait=0.02)
    assert time.monotonic() - t0 >= 0.02
    b.release(ids[:1])
    assert a.put([np.zeros(1)], [1], wait=1.0)
    for _ in range(3):
        many = a.put([np.zeros(1)] * 100, [1])
        b.release(many)
    assert a.live == 2


def test_ff66_a_dead_readers_references_are_released(pair):
    a, _ = pair
    a.put([np.zeros(10)] * 50, [1])
    kept = a.put([np.zeros(10)], [0, 1])
    a.forget(1)
    assert a.live == 1
    a.release(kept)
    assert a.live == 0


def test_leftovers_of_a_killed_owner_are_swept_when_its_successor_joins(pair):
    a, b = pair
    (old,) = a.put([np.zeros(10)], [1])
    again = Arena(a.fd, 0)
    assert again.live == 0 and again.free_bytes == MB
    with pytest.raises(TransportError):
        b.get([old])
    (new,) = again.put([np.ones(10)], [1])
    assert new != old and (b.get([new])[0] == 1).all()


def test_ff68_registration_costs_the_same_per_tensor(pair):
    """Counted in steps of the allocator's and the table's own work, not in time."""
    calls = 0

    def count(frame, event, arg):
        nonlocal calls
        calls += event == "line"
        return count

    fd = Arena.create(2, 32 * MB)
    cost = {}
    for n in (200, 800, 3200):
        a, x, calls = Arena(fd, 0), np.zeros(4, np.uint8), 0
        sys.settrace(count)
        a.put([x] * n, [1])
        sys.settrace(None)
        cost[n] = calls / n
    os.close(fd)
    assert cost[3200] < 1.2 * cost[200] and ENTRIES >= 3200


def test_two_processes_share_by_inheritance_and_leave_no_name():
    before = set(os.listdir("/dev/shm"))
    fd = Arena.create(2, 4 * MB)
    arena = Arena(fd, 0)
    ids = arena.put([np.arange(1000), np.full((3, 5), 2.5, np.float32)], [1])
    code = textwrap.dedent(f"""
        from slipstream.transport.arena import Arena
        a = Arena({fd}, 1)
        x, y = a.get({ids})
        print(x.sum() + y.sum())
        a.release({ids[:1]})
    """)
    out = subprocess.run([sys.executable, "-c", code], pass_fds=[fd], capture_output=True, text=True, timeout=60)
    assert float(out.stdout) == 499500 + 37.5, out.stderr
    assert arena.live == 1
    arena.forget(1)
    assert arena.live == 0 and set(os.listdir("/dev/shm")) <= before
    os.close(fd)
