"""How many prompt tokens may join a step, so that no stream waits longer than it should.

The user states a wish (`--target-itl-ms`), not a chunk size. Step times are measured: a step of d decoding rows and p prompt
tokens is taken to last base + p * per_token, both learned as moving averages.
"""

from bisect import bisect_right
from dataclasses import dataclass

SMOOTH = 0.2  # weight of the newest measurement ...
SMOOTH_UP = 0.5  # ... and of one that took longer than thought
BELIEVED = 3.0  # a measurement counts as at most so many times what was thought: one hiccup of the machine is no rule
SMALLEST = 16  # the smallest chunk beside decoding rows
FIRST = 256  # prompt tokens of a step of which nothing was measured and beside which nothing decodes
LONGEST = 1.0  # seconds that a step without decoding rows should not exceed: newcomers wait for it, and what is aborted too
LEAST_SHARE = 0.25  # of the target that a chunk may take where the decoding rows alone leave less of it


def sizes(cap: int) -> list[int]:
    """The quantized step sizes up to `cap`, in tokens: 16, 32, ... 128, then eight an octave, and `cap` itself."""
    out: list[int] = []
    size = SMALLEST
    while size < cap:
        out.append(size)
        size += max(SMALLEST, 1 << (size.bit_length() - 4))
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
                self.base += SMOOTH * (min(seconds, BELIEVED * self.base) - self.base) if self.base else seconds
            return
        if prompt_tokens < SMALLEST:
            return  # too little to tell the tokens' share
        share = max(seconds - self.base, 1e-9) / prompt_tokens
        if not self.per_token:
            self.per_token = share
        else:  # a step that took long is believed sooner than one that was short
            weight = SMOOTH_UP if share > self.per_token else SMOOTH
            self.per_token += weight * (min(share, BELIEVED * self.per_token) - self.per_token)
        if decodes:
            self.largest = max(self.largest, prompt_tokens)

    def prompt_tokens(self, decodes: int) -> int:
        """Prompt tokens that may join a step of `decodes` decoding rows, which then has a quantized size.

        Beside decoding rows the chunk at most doubles from one measurement to the next.
        """
        room = self.cap - decodes
        if not decodes:
            return min(room, max(int(LONGEST / self.per_token), SMALLEST) if self.per_token else FIRST)
        if self.target is None or room <= 0:
            return max(room, 0)
        most = max(2 * self.largest, SMALLEST)
        if not self.per_token:
            return min(most, room)
        wish = max(self.target - self.base, LEAST_SHARE * self.target) / self.per_token
        if most < wish:
            return min(most, room)
        at = bisect_right(self._sizes, decodes + wish)
        return min(max(self._sizes[at - 1] - decodes if at else 0, SMALLEST), room)

    def expected(self, decodes: int, prompt_tokens: int) -> float:
        """Seconds that such a step should take; 0 when nothing is known."""
        return self.base + self.per_token * prompt_tokens if decodes or prompt_tokens else 0.0
