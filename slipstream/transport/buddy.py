"""A buddy allocator over one segment: offsets and sizes only, no memory. Imports nothing."""


class Buddy:
    """Hands out blocks of `unit * 2**k` bytes out of `size` bytes (`unit` times a power of two).

    Both calls cost O(log(size / unit)), whatever is allocated. The block freed last is handed out first, so its pages are warm.
    """

    def __init__(self, size: int, unit: int = 4096):
        self.unit = unit
        self.top = (size // unit).bit_length() - 1
        if size != unit << self.top:
            raise ValueError(f"size {size} must be {unit} times a power of two")
        self.size = size
        self.free_bytes = size
        self._free: list[dict[int, None]] = [{} for _ in range(self.top + 1)]  # by order: offsets, as an ordered set
        self._free[self.top][0] = None
        self._order: dict[int, int] = {}  # offset of an allocated block -> its order

    def order(self, nbytes: int) -> int:
        return max(0, (max(nbytes, 1) + self.unit - 1) // self.unit - 1).bit_length()

    def alloc(self, nbytes: int) -> int | None:
        """The offset of a block of at least `nbytes`, or None."""
        order = self.order(nbytes)
        have = next((k for k in range(order, self.top + 1) if self._free[k]), None)
        if have is None:
            return None
        offset, _ = self._free[have].popitem()
        while have > order:
            have -= 1
            self._free[have][offset + (self.unit << have)] = None
        self._order[offset] = order
        self.free_bytes -= self.unit << order
        return offset

    def free(self, offset: int) -> None:
        order = self._order.pop(offset)
        self.free_bytes += self.unit << order
        while order < self.top:
            buddy = offset ^ (self.unit << order)
            if buddy not in self._free[order]:
                break
            del self._free[order][buddy]
            offset = min(offset, buddy)
            order += 1
        self._free[order][offset] = None
