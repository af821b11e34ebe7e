"""The axes of the equality matrix, and a small set of settings in which every pair of values meets."""

import itertools
from typing import NamedTuple

PAGE_BYTES = 8192  # of `tiny_llama` in float32, on one rank
SCARCE = 19  # pages; the longest request takes 14


class Setting(NamedTuple):
    """One server. Its names are the test's id."""

    ranks: int
    chunk: str  # "16", "64" or "whole"
    cache: str
    pages: str
    mode: str
    page_size: int = 16
    drafts: str = "0"

    def __str__(self) -> str:
        usual = {"page_size": 16, "drafts": "0"}
        return "-".join(f"{name}={value}" for name, value in self._asdict().items() if usual.get(name) != value)

    def flags(self) -> list[str]:
        flags = ["--device", "cpu", "--dtype", "float32", "--max-num-seqs", "16", "-tp", str(self.ranks)]
        flags += ["--scheduling", self.mode, "--block-size", str(self.page_size)]
        flags += ["--speculative-tokens", self.drafts]
        flags += ["--enable-prefix-caching" if self.cache == "cached" else "--no-enable-prefix-caching"]
        flags += ["--max-num-batched-tokens", "2048" if self.chunk == "whole" else self.chunk]
        if self.chunk == "whole":
            flags += ["--target-itl-ms", "100000"]
        if self.pages == "scarce":
            flags += ["--kv-cache-memory-bytes", str(SCARCE * PAGE_BYTES // self.ranks)]
        return flags


PLAINEST = Setting(1, "whole", "uncached", "plenty", "serial")
AXES = ((1, 2), ("16", "64", "whole"), ("cached", "uncached"), ("plenty", "scarce"), ("serial", "async"))
ALL = [Setting(*values) for values in itertools.product(*AXES)]
DRAFTED = [
    Setting(2, "16", "cached", "scarce", "async", drafts="3"),
    Setting(1, "whole", "cached", "plenty", "serial", drafts="1"),
]
ODD = Setting(1, "64", "cached", "scarce", "async", page_size=7)  # pages that no chunk size is a multiple of


def pairwise(settings: list[Setting]) -> list[Setting]:
    """A few of the settings that hold every pair of values of two axes; greedily, hardest first, always the same ones."""

    def pairs(s: Setting) -> set[tuple]:
        return set(itertools.combinations(enumerate(s[:5]), 2))

    missing = set().union(*(pairs(s) for s in settings))
    chosen: list[Setting] = []
    ordered = sorted(settings, key=lambda s: (s.mode != "async", s.pages != "scarce", s.cache != "cached", -s.ranks))
    while missing:
        best = max(ordered, key=lambda s: len(pairs(s) & missing))
        chosen.append(best)
        missing -= pairs(best)
    return chosen
