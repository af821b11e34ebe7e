"""A rank's GPU: its choice, number type, and the memory for caches."""

import torch
from torch import Tensor

from slipstream.config import EngineConfig
from slipstream.device.memory import DTYPES, CacheNeeds
from slipstream.errors import ConfigError
from slipstream.log.caches import CacheLayout, Latent, Paged, Window

GIB = 1 << 30
_RESERVED_BYTES = GIB  # for captured graphs, library workspaces and memory that the allocator cannot reuse


def resolve_dtype(name: str) -> torch.dtype:
    return DTYPES["bfloat16" if name == "auto" else name]


def choose_device(rank: int, size: int) -> torch.device:
    """Rank r takes the r-th visible GPU. Raises ConfigError, before anything is loaded, where there are fewer than ranks."""
    if not torch.cuda.is_available():
        raise ConfigError("--device cuda: no usable GPU (no card is visible, or its driver is older than this PyTorch needs)")
    count = torch.cuda.device_count()
    if size > count:
        raise ConfigError(f"--tensor-parallel-size {size} needs {size} GPUs, one for each rank; {count} visible")
    device = torch.device("cuda", rank)
    major, minor = torch.cuda.get_device_capability(device)
    if major < 8:
        name = torch.cuda.get_device_name(device)
        raise ConfigError(f"--device cuda: {name} has compute capability {major}.{minor}; 8.0 is needed")
    return device


def page_arrays(
    layout: CacheLayout, pages: int, page_size: int, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, ...]:
    """Zeros for `pages` pages of a layer; nothing for a layer without pages.

    Keys and values, [pages, heads, page_size, head_dim] each, or [pages, page_size, width].
    """
    if isinstance(layout, Paged | Window):
        shape = (pages, layout.heads, page_size, layout.head_dim)
        return tuple(torch.zeros(shape, dtype=dtype, device=device) for _ in range(2))
    if isinstance(layout, Latent):
        return (torch.zeros((pages, page_size, layout.width), dtype=dtype, device=device),)
    return ()


def cache_memory(config: EngineConfig, needs: CacheNeeds, weights: int, step: int, device: torch.device) -> int:
    """Bytes for the caches of a rank that holds `weights` bytes already and whose largest step takes `step` bytes more.

    Raises ConfigError with the arithmetic where the state of all slots and one page do not fit.
    """
    free, total = torch.cuda.mem_get_info(device)
    others = total - free - weights
    target = int(total * config.gpu_memory_utilization)
    room = target - (total - free) - 2 * step - _RESERVED_BYTES
    if config.kv_cache_memory_bytes is not None:
        room = min(config.kv_cache_memory_bytes, free - 2 * step - _RESERVED_BYTES)
    if room < needs.least_bytes:
        state = f"; the state of {needs.slots} slots takes {needs.state_bytes / GIB:.1f}" if needs.state_bytes else ""
        raise ConfigError(
            f"the model does not fit on {device}: {total / GIB:.1f} GiB × --gpu-memory-utilization "
            f"{config.gpu_memory_utilization} = {target / GIB:.1f}, less {weights / GIB:.1f} for weights, "
            f"{others / GIB:.1f} for others and this process's context, {2 * step / GIB:.1f} for steps and "
            f"{_RESERVED_BYTES / GIB:.1f} for graphs leaves {room / GIB:.1f} GiB for the KV cache{state}"
        )
    return room
