"""What this machine's CPU and memory offer a rank: number type, threads, pages."""

import os

import numpy as np
import torch
from torch import Tensor

from slipstream.models.llama import CacheShape

_SHARE = 0.25  # of the free memory that the KV caches of all ranks take at most when nothing is said
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


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


def page_bytes(cache: CacheShape, block: int, dtype: torch.dtype) -> int:
    """Keys and values of one page in all layers; 0 for a rank without heads."""
    return cache.layers * block * 2 * cache.heads * cache.head_dim * dtype.itemsize


def allocate_caches(cache: CacheShape, pages: int, block: int, dtype: torch.dtype) -> list[Tensor]:
    """Per layer [pages + 1, block, 2 * heads, head_dim] of zeros.

    From calloc: pages that were never written take no memory.
    """
    shape = (pages + 1, block, 2 * cache.heads, cache.head_dim)
    size = int(np.prod(shape)) * dtype.itemsize
    if not size:
        return [torch.empty(shape, dtype=dtype)] * cache.layers
    return [torch.from_numpy(np.zeros(size, np.uint8)).view(dtype).view(shape) for _ in range(cache.layers)]


def default_pages(each: int, wanted: int, ranks: int) -> int:
    """As many pages as are wanted, within a share of the memory that is free."""
    return min(wanted, int(_available_bytes() * _SHARE / ranks) // each) if each else wanted


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
