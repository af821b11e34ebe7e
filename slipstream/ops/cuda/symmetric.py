"""Memory that every rank of a group can read and write directly, cut into the regions that sums and sampling use.

One allocation through PyTorch's symmetric memory; the ranks find each other once, through a file that the parent names (no
port, so two servers never collide). NVLink multicast stays off, because it needs permissions that shared hosts do not give.
"""

import os
from dataclasses import dataclass
from datetime import timedelta

import torch
from torch import Tensor

PROGRAMS = 1024  # programs of one kernel that can wait for their peers
BUFFERS = 3  # two that a model's sums take in turn, one for the embedding's (an odd count of sums a step would break the turns)
FAULT_NS = 20_000_000_000  # a wait inside a kernel ends after 20 s, below --step-timeout's default


def _aligned(size: int) -> int:
    return (size + 4095) // 4096 * 4096


@dataclass(frozen=True, eq=False)
class Region:
    """A part of the symmetric allocation: this rank's tensor and, as int64 on the device, its address on every rank."""

    local: Tensor
    addresses: Tensor


class Symmetric:
    """This rank's view of the group's shared memory; with one rank there is none and `size` is 1."""

    def __init__(self, device: torch.device, rank: int, size: int):
        self.device, self.rank, self.size = device, rank, size
        self.fault = torch.zeros(1, dtype=torch.int32, device=device)
        self.counts = torch.zeros(PROGRAMS, dtype=torch.int32, device=device)

    def connect(self, file: str, timeout: float) -> None:
        """Joins the group through a file that all ranks name; raises when a rank is missing after `timeout` seconds."""
        import torch.distributed as dist
        from torch.distributed import FileStore  # pyright: ignore[reportPrivateImportUsage]

        os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        store = FileStore(file, self.size)
        dist.init_process_group("gloo", store=store, rank=self.rank, world_size=self.size, timeout=timedelta(seconds=timeout))

    def allocate(self, rows: int, width: int, dtype: torch.dtype, samples: int, vocab_part: int) -> None:
        """Cuts the regions: sums of [rows, width], (value, id) of `samples` rows from each rank, their parts of the logits."""
        import torch.distributed as dist
        import torch.distributed._symmetric_memory as symmetric

        data = _aligned(rows * width * dtype.itemsize)
        flags = _aligned(self.size * PROGRAMS * 4)
        pairs = _aligned(self.size * samples * 8)
        logits = _aligned(samples * vocab_part * 4)
        memory = symmetric.empty(BUFFERS * data + flags + pairs + logits, dtype=torch.uint8, device=self.device)
        memory.zero_()
        torch.cuda.synchronize(self.device)
        world = dist.group.WORLD
        assert world is not None
        handle = symmetric.rendezvous(memory, world)
        dist.barrier()  # no rank writes into a peer before that has written its zeros
        self._memory, self._handle = memory, handle
        base = [int(p) for p in handle.buffer_ptrs]
        at = 0

        def region(size: int, kind: torch.dtype, shape: tuple[int, ...]) -> Region:
            nonlocal at
            count = torch.Size(shape).numel()
            local = memory[at : at + count * kind.itemsize].view(kind).view(shape)
            addresses = torch.tensor([p + at for p in base], dtype=torch.int64, device=self.device)
            at += size
            return Region(local, addresses)

        self.sums = [region(data, dtype, (rows, width)) for _ in range(BUFFERS)]
        self.flags = region(flags, torch.int32, (self.size, PROGRAMS))
        self.pairs = region(pairs, torch.int32, (self.size, samples, 2))
        at_logits = at
        self.logits = region(logits, torch.float32, (samples, vocab_part))
        self.peer_logits = [
            handle.get_buffer(r, (samples, vocab_part), torch.float32, at_logits // 4) for r in range(self.size)
        ]  # fmt: skip

    def region_of(self, partial: Tensor) -> Region:
        """The buffer of sums in which a tensor lies, from its beginning on."""
        return next(one for one in self.sums if one.local.data_ptr() == partial.data_ptr())

    def close(self) -> None:
        import torch.distributed as dist

        if dist.is_initialized():
            dist.destroy_process_group()
