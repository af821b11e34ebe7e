"""What this machine's CPU and memory offer a rank: number type, threads, pages."""

import mmap
import os

import numpy as np
import torch
from torch import Tensor

from slipstream.device.memory import DTYPES
from slipstream.errors import ConfigError
from slipstream.models.llama import CacheShape

_SHARE = 0.25  # of the free memory that the KV caches of all ranks take at most when nothing is said


def resolve_dtype(name: str) -> torch.dtype:
    """`auto` is bfloat16 where the CPU multiplies it in hardware, else float32: emulated bfloat16 is slower."""
    if name == "auto":
        name = "bfloat16" if _cpu_flags() & {"avx512_bf16", "amx_bf16", "bf16", "svebf16"} else "float32"
    return DTYPES[name]


def _cpu_flags() -> set[str]:
    try:
        with open("/proc/cpuinfo") as f:
            for line in f:
                if line.startswith(("flags", "Features")):
                    return set(line.split(":", 1)[1].split())
    except OSError:
        pass
    return set()


def threads_per_rank(ranks: int) -> int:
    """The cores this process may use, shared by the ranks of its group; fewer where OMP_NUM_THREADS says so.

    On a machine that others use as well, threads that wait for each other at every layer are far slower than one.
    """
    cores = max(1, len(os.sched_getaffinity(0)) // ranks)
    asked = os.environ.get("OMP_NUM_THREADS", "")
    return min(cores, int(asked)) if asked.isdigit() and int(asked) else cores


def allocate_caches(cache: CacheShape, pages: int, page_size: int, dtype: torch.dtype) -> list[Tensor]:
    """Per layer [pages + 1, block, 2 * heads, head_dim] of zeros.

    Pages that were never written take no memory. They come in the kernel's small pages: a huge one would be taken for every
    layer in the same step, whose streams would wait for it.
    """
    shape = (pages + 1, page_size, 2 * cache.heads, cache.head_dim)
    size = int(np.prod(shape)) * dtype.itemsize
    if not size:
        return [torch.empty(shape, dtype=dtype)] * cache.layers
    out = []
    for _ in range(cache.layers):
        memory = mmap.mmap(-1, size)
        memory.madvise(mmap.MADV_NOHUGEPAGE)
        out.append(torch.from_numpy(np.frombuffer(memory, np.uint8)).view(dtype).view(shape))
    return out


def pages_for(each: int, wanted: int, ranks: int, given: int | None, page_size: int) -> int:
    """Pages of `each` bytes: what the `given` bytes (--kv-cache-memory-bytes) hold, or as many as are wanted within a share of
    the memory that is free. ConfigError where that is none, or more than this machine has.
    """
    if not each:
        return wanted
    free = _available_bytes()
    if given is not None and given * ranks > free:
        text = f"{ranks} x {given} bytes" if ranks > 1 else f"{given} bytes"
        raise ConfigError(f"--kv-cache-memory-bytes: {text} are more than the {free} that are free on this machine")
    pages = min(wanted, int(free * _SHARE / ranks) // each) if given is None else given // each
    if pages < 1:
        has = f"a quarter of the free memory is {int(free * _SHARE)}" if given is None else f"{given} were given"
        raise ConfigError(f"--kv-cache-memory-bytes: one page of {page_size} tokens needs {each} bytes; {has}")
    return pages


def _available_bytes() -> int:
    """Free memory by the kernel's own estimate, bounded by the control group's limit where one is set."""
    with open("/proc/meminfo") as f:
        free = next(int(line.split()[1]) * 1024 for line in f if line.startswith("MemAvailable"))
    try:
        with open("/sys/fs/cgroup/memory.max") as limit, open("/sys/fs/cgroup/memory.current") as used:
            free = min(free, int(limit.read()) - int(used.read()))
    except (OSError, ValueError):  # no control group, or "max"
        pass
    return free
