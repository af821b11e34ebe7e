"""A rank's share of this machine's CPU and memory: number type, threads, pages."""

import math
import mmap
import os

import numpy as np
import torch
from torch import Tensor

from slipstream.device.memory import DTYPES, CacheNeeds
from slipstream.errors import ConfigError
from slipstream.log.caches import CacheLayout, Latent, Paged, Window

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


def page_arrays(layout: CacheLayout, pages: int, page_size: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Zeros for `pages` pages of a layer; nothing for a layer without pages.

    [pages, page_size, 2 * heads, head_dim], keys and then values of a token side by side, or [pages, page_size, width].

    Pages that were never written take no memory. They come in the kernel's small pages: a huge one would be taken for every
    layer in the same step, whose streams would wait for it.
    """
    if isinstance(layout, Paged | Window):
        shape = (pages, page_size, 2 * layout.heads, layout.head_dim)
    elif isinstance(layout, Latent):
        shape = (pages, page_size, layout.width)
    else:
        return ()
    size = math.prod(shape) * dtype.itemsize
    if not size:
        return (torch.empty(shape, dtype=dtype),)
    memory = mmap.mmap(-1, size)
    memory.madvise(mmap.MADV_NOHUGEPAGE)
    return (torch.from_numpy(np.frombuffer(memory, np.uint8)).view(dtype).view(shape),)


def cache_memory(needs: CacheNeeds, ranks: int, given: int | None) -> int:
    """Bytes for the caches of one of `ranks` ranks: `given` (--kv-cache-memory-bytes), or a share of the memory that is free.

    ConfigError where that does not hold the state of all slots and one page, or is more than this machine has.
    """
    if not needs.least_bytes:
        return 0
    free = _available_bytes()
    if given is not None and given * ranks > free:
        text = f"{ranks} x {given} bytes" if ranks > 1 else f"{given} bytes"
        raise ConfigError(f"--kv-cache-memory-bytes: {text} are more than the {free} that are free on this machine")
    memory = int(free * _SHARE / ranks) if given is None else given
    if memory < needs.least_bytes:
        has = f"a quarter of the free memory is {int(free * _SHARE)}" if given is None else f"{given} were given"
        state = f"the state of {needs.slots} slots needs {needs.state_bytes} bytes and " if needs.state_bytes else ""
        page = f"one page of {needs.page_size} tokens needs {sum(needs.page_bytes)} bytes"
        raise ConfigError(f"--kv-cache-memory-bytes: {state}{page}; {has}")
    return memory


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
