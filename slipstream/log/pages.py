"""Pages of the KV cache and the prefix index: which pages are held, and which contents can be found again.

A page is free (no content), held (referenced by requests), or idle (indexed content without a reference). The least recently
used idle page is evicted first. A request releases its last page first, so the pages at the end of a prefix are evicted before
the pages that they depend on. Page 0 is the null page and is never given out. The state depends only on the calls.
"""

from hashlib import blake2b

KEY_BYTES = 16


def page_keys(tokens: bytes, page_size: int, salt: bytes = b"", parent: bytes = b"", first: int = 0) -> list[bytes]:
    """Chained content keys of the full pages of packed int32 `tokens`, from page `first` on.

    A key covers the salt and all tokens up to the page's end. `parent` is the key of page first - 1.
    """
    size = 4 * page_size
    keys: list[bytes] = []
    key = parent or blake2b(salt, digest_size=KEY_BYTES, person=b"slipstream.page").digest()
    for at in range(first * size, len(tokens) - size + 1, size):
        key = blake2b(key + tokens[at : at + size], digest_size=KEY_BYTES).digest()
        keys.append(key)
    return keys


class Pages:
    """Reference counts, the free list and the index of `total` pages, numbered 1..total."""

    __slots__ = ("total", "free", "idle", "refs", "keys", "index")

    def __init__(self, total: int):
        self.total = total
        self.free: list[int] = list(range(total, 0, -1))  # popped from the end
        self.idle: dict[int, None] = {}  # insertion order is eviction order
        self.refs: list[int] = [0] * (total + 1)
        self.keys: dict[int, bytes] = {}  # page -> key of its indexed content
        self.index: dict[bytes, int] = {}

    @property
    def available(self) -> int:
        """Pages that `take` can give."""
        return len(self.free) + len(self.idle)

    @property
    def held(self) -> int:
        return self.total - self.available

    def take(self) -> int:
        """A page with one reference; evicts the oldest idle one when none is free. IndexError/StopIteration if none is left."""
        if self.free:
            page = self.free.pop()
        else:
            page = next(iter(self.idle))
            del self.idle[page]
            self.forget(page)
        self.refs[page] = 1
        return page

    def share(self, page: int) -> None:
        """One more reference to an indexed page."""
        if self.refs[page] == 0:
            del self.idle[page]
        self.refs[page] += 1

    def release(self, page: int) -> None:
        self.refs[page] -= 1
        assert self.refs[page] >= 0, f"page {page} released twice"
        if self.refs[page] == 0:
            if page in self.keys:
                self.idle[page] = None
            else:
                self.free.append(page)

    def find(self, keys: list[bytes]) -> list[int]:
        """Pages of the longest indexed prefix of `keys`."""
        found: list[int] = []
        for key in keys:
            page = self.index.get(key)
            if page is None:
                break
            found.append(page)
        return found

    def publish(self, page: int, key: bytes) -> None:
        """Makes a held page findable, unless equal content already is."""
        if key not in self.index:
            assert page not in self.keys, f"page {page} published twice"
            self.index[key] = page
            self.keys[page] = key

    def forget(self, page: int) -> None:
        """Takes a page out of the index; it keeps its references."""
        key = self.keys.pop(page, None)
        if key is not None:
            del self.index[key]

    def copy(self) -> "Pages":
        other = type(self).__new__(type(self))
        other.total = self.total
        other.free = self.free.copy()
        other.idle = self.idle.copy()
        other.refs = self.refs.copy()
        other.keys = self.keys.copy()
        other.index = self.index.copy()
        return other

    def state(self) -> tuple[object, ...]:
        """A hashable value that two equal allocators share."""
        return (tuple(self.free), tuple(self.idle), tuple(self.refs), tuple(self.keys.items()))
