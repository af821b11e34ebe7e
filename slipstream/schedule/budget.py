"""How many prompt tokens may join a step, so that no stream waits longer than it should.

The user states a wish (`--target-itl-ms`), not a chunk size. Step times are measured: a step of d decoding rows and p prompt
tokens is taken to last base + p * per_token, both learned as moving averages.
"""

from dataclasses import dataclass

SMOOTH = 0.2  # weight of the newest measurement ...
SMOOTH_UP = 0.5  # ... and of one that took longer than thought
SMALLEST = 16  # the smallest chunk beside decoding rows


def sizes(cap: int) -> list[int]:
    """The quantized chunk sizes up to `cap`: 16, 32, 48, 64, 96, 128, 192, ... and `cap` itself."""
    out: list[int] = []
    size = SMALLEST
    while size < cap:
        out.append(size)
        if size >= 32 and size + size // 2 < cap:
            out.append(size + size // 2)
        size *= 2
    return [*out, cap]


@dataclass
class Budget:
    """`cap`: tokens a step at most (--max-num-batched-tokens). `target`: seconds a step beside decoding rows, or None."""

    cap: int
    target: float | None = None
    base: float = 0.0  # seconds of a step without prompt tokens
    per_token: float = 0.0  # seconds more per prompt token
    largest: int = 0  # most prompt tokens measured beside decoding rows

    def __post_init__(self) -> None:
        self._sizes = sizes(self.cap)

    def observe(self, decodes: int, prompt_tokens: int, seconds: float) -> None:
        """Learns from one step, which had the device for itself for `seconds`."""
        if not prompt_tokens:
            if decodes:
                self.base = seconds if not self.base else self.base + SMOOTH * (seconds - self.base)
            return
        if prompt_tokens < SMALLEST:
            return  # too little to tell the tokens' share
        share = max(seconds - self.base, 1e-9) / prompt_tokens
        if not self.per_token:
            self.per_token = share
        else:  # a step that took long is believed sooner than one that was short
            weight = SMOOTH_UP if share > self.per_token else SMOOTH
            self.per_token += weight * (share - self.per_token)
        if decodes:
            self.largest = max(self.largest, prompt_tokens)

    def prompt_tokens(self, decodes: int) -> int:
        """Prompt tokens that may join a step of `decodes` decoding rows.

        Beside decoding rows the size at most doubles from one measurement to the next.
        """
        room = self.cap - decodes
        if not decodes or self.target is None or room <= 0:
            return max(room, 0)
        most = max(2 * self.largest, SMALLEST)
        wish = (self.target - self.base) / self.per_token if self.per_token else most
        best = self._sizes[0]
        for size in self._sizes:
            if size > wish or size > most:
                break
            best = size
        return min(best, room)

    def expected(self, decodes: int, prompt_tokens: int) -> float:
        """Seconds that such a step should take; 0 when nothing is known."""
        return self.base + self.per_token * prompt_tokens if decodes or prompt_tokens else 0.0
