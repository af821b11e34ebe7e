"""Pages of preempted requests in pinned host memory: copied whole, all layers together, in the stream's order."""

import torch
from torch import Tensor

Caches = list[tuple[Tensor, Tensor]]
_PIECE = 16  # pages that pass through device memory at a time


class HostPages:
    """Room for `count` pages. A page is [2 * layers, heads, block, head_dim]: keys and values of each layer."""

    def __init__(self, count: int, caches: Caches):
        self.caches = caches
        shape = (2 * len(caches), *caches[0][0].shape[1:]) if caches else (0,)
        kind = caches[0][0].dtype if caches else torch.float32
        self.memory = torch.empty((count, *shape), dtype=kind, pin_memory=True)
        self._staged = torch.empty(
            (_PIECE if count else 0, *shape), dtype=kind, device=caches[0][0].device if caches else "cpu"
        )

    def save(self, pages: tuple[int, ...], host: tuple[int, ...]) -> None:
        """Queues the copy of device pages to host pages."""
        for ids, to in self._pieces(pages, host):
            staged = self._staged[: len(to)]
            for i, tensor in enumerate(t for pair in self.caches for t in pair):
                staged[:, i] = tensor.index_select(0, ids)
            for k, page in enumerate(to):
                self.memory[page].copy_(staged[k], non_blocking=True)

    def load(self, host: tuple[int, ...], pages: tuple[int, ...]) -> None:
        """Queues the copy of host pages to device pages."""
        for ids, origin in self._pieces(pages, host):
            staged = self._staged[: len(origin)]
            for k, page in enumerate(origin):
                staged[k].copy_(self.memory[page], non_blocking=True)
            for i, tensor in enumerate(t for pair in self.caches for t in pair):
                tensor.index_copy_(0, ids, staged[:, i])

    def _pieces(self, pages: tuple[int, ...], host: tuple[int, ...]):
        for at in range(0, len(pages), _PIECE):
            ids = torch.tensor(pages[at : at + _PIECE], dtype=torch.int64).pin_memory()
            yield ids.to(self._staged.device, non_blocking=True), host[at : at + _PIECE]

    def seconds(self) -> float:
        """How long a page takes to the host and back, measured on null pages; 0 where there is no room for any."""
        if not len(self.memory):
            return 0.0
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        n = min(_PIECE, len(self.memory))
        for _ in range(2):  # the first one warms up
            start.record()
            self.save((0,) * n, tuple(range(n)))
            self.load(tuple(range(n)), (0,) * n)
            end.record()
            end.synchronize()
        return start.elapsed_time(end) * 1e-3 / n
