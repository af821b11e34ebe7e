"""Pages of preempted requests in pinned host memory: copied whole, all layers of a table together, in the stream's order."""

from collections.abc import Iterator

import torch
from torch import Tensor

_PIECE_PAGES = 16  # pages that pass through device memory at a time


class HostPages:
    """Room for `count` pages of one table, whose layers keep `arrays` [pages + 1, ...] of one dtype.

    A host page holds the page's values in all arrays, one array after another.
    """

    def __init__(self, count: int, arrays: list[Tensor], device: torch.device):
        self.count = count if arrays else 0
        self.arrays: list[tuple[Tensor, slice]] = []  # each with its part of a host page
        width = 0
        for array in arrays:
            size = array[0].numel()
            self.arrays.append((array, slice(width, width + size)))
            width += size
        dtype = arrays[0].dtype if arrays else torch.float32
        self.memory = torch.empty((self.count, width), dtype=dtype, pin_memory=True)
        self._staged = torch.empty((_PIECE_PAGES if self.count else 0, width), dtype=dtype, device=device)

    def save(self, pages: tuple[int, ...], host: tuple[int, ...]) -> None:
        """Queues the copy of device pages to host pages."""
        for ids, to in self._pieces(pages, host):
            staged = self._staged[: len(to)]
            for array, part in self.arrays:
                staged[:, part] = array.index_select(0, ids).flatten(1)
            for k, page in enumerate(to):
                self.memory[page].copy_(staged[k], non_blocking=True)

    def load(self, host: tuple[int, ...], pages: tuple[int, ...]) -> None:
        """Queues the copy of host pages to device pages."""
        for ids, origin in self._pieces(pages, host):
            staged = self._staged[: len(origin)]
            for k, page in enumerate(origin):
                staged[k].copy_(self.memory[page], non_blocking=True)
            for array, part in self.arrays:
                array.index_copy_(0, ids, staged[:, part].view(-1, *array.shape[1:]))

    def _pieces(self, pages: tuple[int, ...], host: tuple[int, ...]) -> Iterator[tuple[Tensor, tuple[int, ...]]]:
        for at in range(0, len(pages), _PIECE_PAGES):
            ids = torch.tensor(pages[at : at + _PIECE_PAGES], dtype=torch.int64).pin_memory()
            yield ids.to(self._staged.device, non_blocking=True), host[at : at + _PIECE_PAGES]

    def seconds(self) -> float:
        """How long a page takes to the host and back, measured on null pages; 0 where there is no room for any."""
        if not self.count:
            return 0.0
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        n = min(_PIECE_PAGES, self.count)
        for _ in range(2):  # the first one warms up
            start.record()
            self.save((0,) * n, tuple(range(n)))
            self.load(tuple(range(n)), (0,) * n)
            end.record()
            end.synchronize()
        return start.elapsed_time(end) * 1e-3 / n
