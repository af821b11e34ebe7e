# pyright: reportMissingImports=false
"""Triton, for the modules that launch kernels: present only where CUDA is, so nothing else may import this."""

from typing import Any

import triton
import triton.language as tl

jit: Any = triton.jit  # a kernel is subscripted with its grid, which a checker of types cannot know

__all__ = ["cdiv", "jit", "power", "tl"]


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


def power(n: int) -> int:
    """The next power of two at or above n."""
    return 1 << max(0, n - 1).bit_length()
