"""How many prompt tokens may join a step, so that no stream waits longer than it should.

The user states a wish (`--target-itl-ms`), not a chunk size. Step times are measured: a step with p prompt tokens, each with c
tokens of its request before its row, is taken to last base + p * (per_token + c * per_seen). The base is a moving average; the
other two follow each step's error by normalized least mean squares, so that a prompt's end costs what ends cost and the next
prompt's beginning what beginnings do.
"""

from bisect import bisect_right
from dataclasses import dataclass
from typing import NamedTuple

SMOOTHING = 0.2  # weight of the newest measurement ...
SMOOTHING_UP = 0.5  # ... and of one that took longer than thought
MAX_SURPRISE_FACTOR = (
    3.0  # a measurement counts as at most so many times what was thought: one hiccup of the machine is no rule
)
MIN_CHUNK_TOKENS = 16  # the smallest chunk beside decoding rows
FIRST_PREFILL_TOKENS = 256  # prompt tokens of a step of which nothing was measured and beside which nothing decodes
MAX_PREFILL_STEP_S = (
    1.0  # seconds that a step without decoding rows should not exceed: newcomers wait for it, and what is aborted too
)
FAR_CONTEXT_TOKENS = 8192  # tokens before a row at which what it sees weighs as much in learning as what it is
MAX_CONTEXT_COST_FACTOR = 4.0  # what a token sees at FAR costs at most so many times what it costs by itself
BACKLOG_TARGETS = 30  # targets that the prompts under way must take for a step to be allowed ...
BACKLOG_STRETCH_FACTOR = 1.08  # ... so many times the target: larger steps end them sooner
PROBE_STEPS = 128  # steps with prompts beside decoding rows after which one goes without, to measure the rows again ...
PROBE_SMALL_STEPS = 16  # ... and steps whose chunk is so small that the rows may be what takes so long
MIN_CHUNK_SHARE = 0.25  # of the target that a chunk may take where the decoding rows alone leave less of it


def sizes(cap: int) -> list[int]:
    """The quantized step sizes up to `cap`, in tokens: 16, 32, ... 128, then eight an octave, and `cap` itself.

    From 512 on they are multiples of 128: matrix units take so many rows at a time, and 576 cost what 640 do.
    """
    out: list[int] = []
    size = MIN_CHUNK_TOKENS
    while size < cap:
        out.append(size)
        size += max(MIN_CHUNK_TOKENS if size < 512 else 128, 1 << (size.bit_length() - 4))
    return [*out, cap]


class StepLoad(NamedTuple):
    """What a step has to do: decoding rows, prompt tokens, and how many tokens a prompt's row has before it, on the average."""

    decodes: int
    prompt_tokens: int = 0
    context: float = 0.0


@dataclass
class Budget:
    """`cap`: tokens a step at most (--max-num-batched-tokens). `target`: seconds a step beside decoding rows, or None."""

    cap: int
    target: float | None = None
    base: float = 0.0  # seconds of a step without prompt tokens
    per_token: float = 0.0  # seconds more per prompt token ...
    largest: int = 0  # most prompt tokens measured beside decoding rows
    per_seen: float = 0.0  # ... and per token that it has before its row
    stale: float = 0.0  # how much of the time after which the base is measured anew has passed; 1 and more: it is due

    def __post_init__(self) -> None:
        self._sizes = sizes(self.cap)

    def cost(self, context: float) -> float:
        """Seconds more per prompt token that has `context` tokens before its row; 0 when nothing is known."""
        return self.per_token + context * self.per_seen

    def observe(self, load: StepLoad, seconds: float) -> None:
        """Learns from one step, which had the device for itself for `seconds`."""
        if not load.prompt_tokens:
            if load.decodes:
                weight = SMOOTHING if self.stale < 1 else SMOOTHING_UP
                self.base += weight * (min(seconds, MAX_SURPRISE_FACTOR * self.base) - self.base) if self.base else seconds
                self.stale = 0.0
            return
        if load.decodes and seconds < self.base:
            self.base = seconds  # the rows alone take no longer
        if load.prompt_tokens < MIN_CHUNK_TOKENS:
            return  # too little to tell the tokens' share
        share = max(seconds - self.base, 1e-9) / load.prompt_tokens
        thought = self.cost(load.context)
        if not thought:
            self.per_token = share
        else:  # a step that took long is believed sooner than one that was short
            weight = SMOOTHING_UP if share > thought else SMOOTHING
            if self.target is not None:  # a short prompt tells little about a full step: its tokens come almost for nothing
                weight *= min(1.0, load.prompt_tokens * max(thought / self._wish(), 1 / max(self.largest, 1)))
            believed = max(MAX_SURPRISE_FACTOR * thought, self._wish() / load.prompt_tokens)  # what fills the wish is no hiccup
            change = weight * (min(share, believed) - thought)
            self._move(thought + change, change, load.context / FAR_CONTEXT_TOKENS)
        if load.decodes:
            self.largest = max(self.largest, load.prompt_tokens)
            self.stale += 1 / (PROBE_STEPS if load.prompt_tokens > 4 * MIN_CHUNK_TOKENS else PROBE_SMALL_STEPS)

    def _move(self, cost: float, change: float, far: float) -> None:
        """Makes `cost`, which is `change` more than before, the cost at a context of far * FAR."""
        steep = self.per_seen * FAR_CONTEXT_TOKENS + change * far / (1 + far * far)
        steep = min(max(steep, 0.0), MAX_CONTEXT_COST_FACTOR * cost / (1 + MAX_CONTEXT_COST_FACTOR * far))
        self.per_seen = steep / FAR_CONTEXT_TOKENS
        self.per_token = cost - far * steep

    def _wish(self, waiting: float = 0.0) -> float:
        """Seconds that prompt tokens may add to a step beside decoding rows; prompts of `waiting` seconds are under way."""
        target = self.target or 0.0
        if waiting > BACKLOG_TARGETS * target:
            target *= BACKLOG_STRETCH_FACTOR
        return max(target - self.base, MIN_CHUNK_SHARE * target)

    def prompt_tokens(self, decodes: int, context: float = 0.0, waiting: int = 0) -> int:
        """Prompt tokens, each with `context` before its row, that may join a step of `decodes` decoding rows.

        `waiting`: tokens of the prompts under way that have had no row. The step then has a quantized size. Beside decoding
        rows the chunk at most doubles from one measurement to the next, and from time to time there is none: what the rows take
        by themselves is measured anew.
        """
        room = self.cap - decodes
        cost = self.cost(context)
        if not decodes:
            return min(room, max(int(MAX_PREFILL_STEP_S / cost), MIN_CHUNK_TOKENS) if cost else FIRST_PREFILL_TOKENS)
        if self.target is None or room <= 0:
            return max(room, 0)
        if self.stale >= 1:
            return 0
        most = max(2 * self.largest, MIN_CHUNK_TOKENS)
        if not cost:
            return min(most, room)
        wish = self._wish(waiting * cost) / cost
        if most < wish:
            return min(most, room)
        at = bisect_right(self._sizes, decodes + wish)
        return min(max(self._sizes[at - 1] - decodes if at else 0, MIN_CHUNK_TOKENS), room)

    def expected(self, load: StepLoad) -> float:
        """Seconds that such a step should take; 0 when nothing is known."""
        return self.base + self.cost(load.context) * load.prompt_tokens
