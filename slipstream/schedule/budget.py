"""How many prompt tokens may join a step, so that no stream waits longer than its target.

The user states a target for the gap between two tokens (`--target-itl-ms`), not a chunk size. Step times are measured. A step
with p prompt tokens, each with c tokens of its request before it, is expected to take base_s + p * (token_s + c *
context_token_s). `base_s` is a moving average. The other two follow the error of each step by normalized least mean squares.
So tokens late in a prompt get their own price, and the first tokens of the next prompt get theirs.
"""

from bisect import bisect_right
from dataclasses import dataclass
from typing import NamedTuple

SMOOTHING = 0.2  # weight of the newest measurement ...
SMOOTHING_UP = 0.5  # ... and of one that took longer than expected
MAX_SURPRISE_FACTOR = 3.0  # a measurement counts as at most this multiple of the expected time: a hiccup changes little
MIN_CHUNK_TOKENS = 16  # the smallest chunk next to decoding rows
FIRST_PREFILL_TOKENS = 256  # prompt tokens of a step without decoding rows before anything was measured
MAX_PREFILL_STEP_S = 1.0  # longest step without decoding rows: new requests and aborts wait for its end
FAR_CONTEXT_TOKENS = 8192  # at this context, learning changes the cost of the context as much as that of the token itself
MAX_CONTEXT_COST_FACTOR = 4.0  # a context of FAR_CONTEXT_TOKENS costs at most this multiple of the token itself
BACKLOG_TARGETS = 30  # where the prompts under way need more than this many targets ...
BACKLOG_STRETCH_FACTOR = 1.08  # ... a step may take this multiple of the target: larger steps end them sooner
PROBE_STEPS = 128  # after so many steps with prompts and decoding rows, one has decoding rows only, to measure them ...
PROBE_SMALL_STEPS = 16  # ... and after so many with small chunks: the decoding rows may be what takes the time
MIN_CHUNK_SHARE = 0.25  # share of the target that a chunk may take where the decoding rows leave less


def sizes(cap: int) -> list[int]:
    """The quantized step sizes up to `cap`, in tokens: 16, 32, ... 128, then eight an octave, and `cap` itself.

    From 512 on they are multiples of 128. Matrix units take 128 rows at a time, so 576 tokens cost as much as 640.
    """
    out: list[int] = []
    size = MIN_CHUNK_TOKENS
    while size < cap:
        out.append(size)
        size += max(MIN_CHUNK_TOKENS if size < 512 else 128, 1 << (size.bit_length() - 4))
    return [*out, cap]


class StepLoad(NamedTuple):
    """The work of a step: decoding rows, prompt tokens, and the mean number of tokens before a prompt token."""

    decodes: int
    prompt_tokens: int = 0
    context: float = 0.0


@dataclass
class Budget:
    """Limits of a step, and the costs that were learned."""

    cap_tokens: int  # tokens of a step at most (--max-num-batched-tokens)
    target_s: float | None = None  # longest step with decoding rows; None: no target
    base_s: float = 0.0  # a step without prompt tokens
    token_s: float = 0.0  # added per prompt token ...
    largest_chunk_tokens: int = 0  # most prompt tokens measured next to decoding rows
    context_token_s: float = 0.0  # ... and per token of context before it
    probe_progress: float = 0.0  # grows with each step with prompts; from 1 on, the decoding rows are measured again

    def __post_init__(self) -> None:
        self._sizes = sizes(self.cap_tokens)

    def cost(self, context: float) -> float:
        """Seconds added per prompt token with `context` tokens before it; 0 before anything was measured."""
        return self.token_s + context * self.context_token_s

    def observe(self, load: StepLoad, seconds: float) -> None:
        """Learns from one step that had the device to itself for `seconds`."""
        if not load.prompt_tokens:
            if load.decodes:
                weight = SMOOTHING if self.probe_progress < 1 else SMOOTHING_UP
                capped = min(seconds, MAX_SURPRISE_FACTOR * self.base_s)
                self.base_s += weight * (capped - self.base_s) if self.base_s else seconds
                self.probe_progress = 0.0
            return
        if load.decodes and seconds < self.base_s:
            self.base_s = seconds  # the decoding rows alone take no longer than with prompts
        if load.prompt_tokens < MIN_CHUNK_TOKENS:
            return  # too few to measure a token's share
        measured = max(seconds - self.base_s, 1e-9) / load.prompt_tokens
        estimated = self.cost(load.context)
        if not estimated:
            self.token_s = measured
        else:  # a step that took longer than expected counts more than one that was shorter
            weight = SMOOTHING_UP if measured > estimated else SMOOTHING
            if self.target_s is not None:  # tokens of a short prompt are almost free, which says little about a full step
                full = max(estimated / self._prefill_time_s(), 1 / max(self.largest_chunk_tokens, 1))
                weight *= min(1.0, load.prompt_tokens * full)
            # a chunk that fills the time for prefill is not a hiccup
            highest = max(MAX_SURPRISE_FACTOR * estimated, self._prefill_time_s() / load.prompt_tokens)
            change = weight * (min(measured, highest) - estimated)
            self._set_cost(estimated + change, change, load.context / FAR_CONTEXT_TOKENS)
        if load.decodes:
            self.largest_chunk_tokens = max(self.largest_chunk_tokens, load.prompt_tokens)
            small = load.prompt_tokens <= 4 * MIN_CHUNK_TOKENS
            self.probe_progress += 1 / (PROBE_SMALL_STEPS if small else PROBE_STEPS)

    def _set_cost(self, cost: float, change: float, distance: float) -> None:
        """Sets the cost of a token with distance * FAR_CONTEXT_TOKENS of context to `cost`, which has changed by `change`."""
        far_cost = self.context_token_s * FAR_CONTEXT_TOKENS + change * distance / (1 + distance * distance)
        far_cost = min(max(far_cost, 0.0), MAX_CONTEXT_COST_FACTOR * cost / (1 + MAX_CONTEXT_COST_FACTOR * distance))
        self.context_token_s = far_cost / FAR_CONTEXT_TOKENS
        self.token_s = cost - distance * far_cost

    def _prefill_time_s(self, backlog_s: float = 0.0) -> float:
        """Seconds that prompt tokens may add to a step with decoding rows; the prompts under way need `backlog_s`."""
        target = self.target_s or 0.0
        if backlog_s > BACKLOG_TARGETS * target:
            target *= BACKLOG_STRETCH_FACTOR
        return max(target - self.base_s, MIN_CHUNK_SHARE * target)

    def prompt_tokens(self, decodes: int, context: float = 0.0, waiting: int = 0) -> int:
        """Prompt tokens, each with `context` tokens before it, that may join a step of `decodes` decoding rows.

        `waiting`: tokens of the prompts under way that are not computed yet. The step gets a quantized size. Next to decoding
        rows, a chunk has at most twice as many tokens as the largest one measured. From time to time it has none, so that the
        decoding rows are measured alone again.
        """
        room = self.cap_tokens - decodes
        cost = self.cost(context)
        if not decodes:
            return min(room, max(int(MAX_PREFILL_STEP_S / cost), MIN_CHUNK_TOKENS) if cost else FIRST_PREFILL_TOKENS)
        if self.target_s is None or room <= 0:
            return max(room, 0)
        if self.probe_progress >= 1:
            return 0
        most = max(2 * self.largest_chunk_tokens, MIN_CHUNK_TOKENS)
        if not cost:
            return min(most, room)
        affordable = self._prefill_time_s(waiting * cost) / cost
        if most < affordable:
            return min(most, room)
        at = bisect_right(self._sizes, decodes + affordable)
        return min(max(self._sizes[at - 1] - decodes if at else 0, MIN_CHUNK_TOKENS), room)

    def expected(self, load: StepLoad) -> float:
        """Seconds that such a step is expected to take; 0 before anything was measured."""
        return self.base_s + self.cost(load.context) * load.prompt_tokens
