"""MXFP4 as gpt-oss stores it: blocks of 32 four-bit floats with one power of two (OCP Microscaling Formats 1.0, E2M1 and E8M0).

A weight [..., inputs] is stored as bytes [..., inputs / 32, 16], the even input of a pair in the low half of its byte, and as
exponents [..., inputs / 32], to which 127 was added.
"""

import torch
from torch import Tensor

BLOCK = 32
_BIAS = 127
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_VALUES = torch.tensor([*_MAGNITUDES, *(-m for m in _MAGNITUDES)])
_PAIRS = torch.stack([_VALUES.repeat(16), _VALUES.repeat_interleave(16)], 1)  # of each byte


def dequantize(blocks: Tensor, exponents: Tensor, dtype: torch.dtype) -> Tensor:
    """uint8 [..., n, 16] and [..., n] to [..., 32 n]; exact in bfloat16 and float32 but for exponents at their ends."""
    values = _PAIRS.to(blocks.device)[blocks.int()].view(*exponents.shape, BLOCK)
    scaled = torch.ldexp(values, exponents.int()[..., None] - _BIAS)
    return scaled.to(dtype).flatten(-2)
