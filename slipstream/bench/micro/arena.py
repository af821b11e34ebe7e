"""The throughput of the shared-memory arena between two processes, compared with this machine's memcpy.

`python -m slipstream.bench.micro.arena` prints a table. A tensor is "moved" when the reader has a view of it and its
first and last bytes were compared; "copied out" adds the reader's own copy. Times are one way, by the clock that both
processes share.
"""

import os
import socket
import statistics
import struct
import subprocess
import sys
import time

import numpy as np

from slipstream.transport.arena import Arena

_ID = struct.Struct("<q")
_TIME = struct.Struct("<d")
SIZES = (4 << 10, 64 << 10, 1 << 20, 16 << 20)
SEGMENT_BYTES = 64 << 20


def memcpy_seconds(nbytes: int, turns: int) -> float:
    """The median time of one copy between two warm buffers of this process."""
    source, target = np.ones(nbytes, np.uint8), np.zeros(nbytes, np.uint8)
    times = []
    for _ in range(turns):
        t0 = time.perf_counter()
        np.copyto(target, source)
        times.append(time.perf_counter() - t0)
    return statistics.median(times)


def send(arena: Arena, sock: socket.socket, nbytes: int, turns: int) -> list[float]:
    """Sends `turns` tensors, the next one when the last was taken; seconds from before a put until the reader has it."""
    own, times = np.full(nbytes, 7, np.uint8), []
    for _ in range(turns):
        t0 = time.monotonic()
        sock.send(_ID.pack(arena.put([own], [1], wait=5.0)[0]))
        (t1,) = _TIME.unpack(sock.recv(_TIME.size))
        times.append(t1 - t0)
    return times


def take(arena: Arena, sock: socket.socket, nbytes: int, turns: int, copy: bool) -> None:
    target = np.zeros(nbytes, np.uint8)
    for _ in range(turns):
        (id,) = _ID.unpack(sock.recv(_ID.size))
        (got,) = arena.get([id])
        if copy:
            np.copyto(target, got)
        assert got[0] == got[-1] == 7
        t1 = time.monotonic()
        arena.release([id])
        sock.send(_TIME.pack(t1))


def _turns(nbytes: int) -> int:
    return 2000 if nbytes <= 64 << 10 else 60


def _answer(fd: int, sock_fd: int) -> None:
    arena, sock = Arena(fd, 1), socket.socket(fileno=sock_fd)
    for nbytes in SIZES:
        for copy in (False, True):
            take(arena, sock, nbytes, _turns(nbytes), copy)


def measure() -> list[dict]:
    """One row per size: bytes, seconds of memcpy, of a move, of a move with the copy out (medians)."""
    fd = Arena.create(2, SEGMENT_BYTES)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    child = subprocess.Popen(
        [sys.executable, "-m", "slipstream.bench.micro.arena", str(fd), str(theirs.fileno())], pass_fds=[fd, theirs.fileno()]
    )
    theirs.close()
    rows = []
    try:
        arena = Arena(fd, 0)
        for nbytes in SIZES:
            row = {"bytes": nbytes, "memcpy": memcpy_seconds(nbytes, _turns(nbytes))}
            for name in ("move", "copy_out"):
                times = send(arena, ours, nbytes, _turns(nbytes))
                row[name] = statistics.median(times[len(times) // 4 :])
            rows.append(row)
    finally:
        ours.close()
        if child.wait(30):
            raise RuntimeError(f"the other process ended with {child.returncode}")
        os.close(fd)
    return rows


def main() -> None:
    print(f"{'bytes':>10} {'memcpy':>12} {'move':>12} {'GB/s':>7} {'of memcpy':>10} {'copied out':>12}")
    for r in measure():
        rate = r["bytes"] / r["move"] / 1e9
        print(
            f"{r['bytes']:>10} {r['memcpy'] * 1e6:>9.1f} µs {r['move'] * 1e6:>9.1f} µs {rate:>7.2f} "
            f"{r['memcpy'] / r['move']:>9.0%} {r['copy_out'] * 1e6:>9.1f} µs"
        )


if __name__ == "__main__":
    if len(sys.argv) == 3:
        _answer(int(sys.argv[1]), int(sys.argv[2]))
    else:
        main()
