"""Captured CUDA graphs: padded sizes, and the capture of one function per size into one memory pool, the largest first."""

import bisect
import functools
from collections.abc import Callable

import torch

from slipstream.errors import ConfigError
from slipstream.schedule.budget import sizes

MAX_CAPTURED_TOKENS = 2048  # tokens of a mixed step up to which steps are captured
# why a step, or its sampling, runs outside captured graphs
ENFORCED, FOREIGN, LARGE = "enforce_eager", "model_code", "step_size"
PROMPT_LOGPROBS, SAMPLING, GRAMMAR = "prompt_logprobs", "sampling", "grammar"
EAGER_REASONS = (ENFORCED, FOREIGN, LARGE, PROMPT_LOGPROBS, SAMPLING, GRAMMAR)


def decode_buckets(most: int) -> list[int]:
    """1, 2, 4, 8, 16, 24, ... and `most` itself."""
    return sorted({n for n in (1, 2, 4, *range(8, most, 8)) if n < most} | {most})


def token_buckets(most: int) -> list[int]:
    """Padded token counts of mixed steps: the sizes that the planner gives its steps, to the usual chunk or `most`."""
    return sizes(min(most, MAX_CAPTURED_TOKENS))


def padded(buckets: list[int], n: int) -> int | None:
    """The smallest bucket that holds n, or None above the largest."""
    i = bisect.bisect_left(buckets, n)
    return buckets[i] if i < len(buckets) else None


class Graphs:
    """Graphs by (kind, size). With `eager`, the functions themselves run instead."""

    def __init__(self, stream: torch.cuda.Stream, eager: bool):
        self._stream, self._eager = stream, eager
        self._pool = torch.cuda.graph_pool_handle()
        self._runs: dict[tuple[str, int], Callable[[], object]] = {}

    def capture(self, kind: str, sizes: list[int], work: Callable[[int], object]) -> None:
        """Captures work(size) for each size. What it allocates lives in the shared pool: results go into tensors made before.

        Raises ConfigError with the size and the reason where a capture fails (nothing falls back to eager in silence, FF-18).
        """
        for size in sorted(sizes, reverse=True):
            if self._eager:
                self._runs[kind, size] = functools.partial(work, size)
                continue
            graph = torch.cuda.CUDAGraph()
            try:
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                try:
                    work(size)
                finally:
                    graph.capture_end()
            except Exception as e:
                raise ConfigError(
                    f"capturing the {kind} graph of size {size} failed: {e}; --enforce-eager runs without graphs"
                ) from e
            self._runs[kind, size] = graph.replay

    def run(self, kind: str, size: int) -> None:
        """Queues a captured step on the current stream, which must be the one of the capture."""
        self._runs[kind, size]()

    def clear(self) -> None:
        self._runs.clear()
