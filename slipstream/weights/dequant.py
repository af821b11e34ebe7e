"""Stored blocks of a GGUF tensor to float32. Pure functions over bytes.

Q4_0, Q4_1 and Q8_0 are written here over whole arrays, since the `gguf` package's own take several times as long; every other
type goes through that package. Formats: ggml's `ggml-common.h` (blocks of 32 values with a float16 scale).
"""

import numpy as np
import torch

from slipstream.errors import ModelError

BLOCK = 32
# gguf.GGMLQuantizationType, spelled out so that the tables below read alone.
F32, F16, Q4_0, Q4_1, Q8_0, BF16 = 0, 1, 2, 3, 8, 30


def _nibbles(packed: torch.Tensor) -> torch.Tensor:
    """uint8 [N, 16] -> uint8 [N, 32]: low halves first, then high halves, as ggml orders a block."""
    return torch.cat((packed & 15, packed >> 4), dim=1)


def _q4_1(blocks: torch.Tensor) -> torch.Tensor:
    """[scale f16, minimum f16, 16 bytes]"""
    head = blocks[:, :4].contiguous().view(torch.float16).float()
    return torch.addcmul(head[:, 1:2], _nibbles(blocks[:, 4:]).float(), head[:, :1])


def _q4_0(blocks: torch.Tensor) -> torch.Tensor:
    """[scale f16, 16 bytes], values minus 8"""
    scale = blocks[:, :2].contiguous().view(torch.float16).float()
    return (_nibbles(blocks[:, 2:]).float() - 8) * scale


def _q8_0(blocks: torch.Tensor) -> torch.Tensor:
    """[scale f16, 32 int8]"""
    scale = blocks[:, :2].contiguous().view(torch.float16).float()
    return blocks[:, 2:].view(torch.int8).float() * scale


_FAST = {Q4_0: (_q4_0, 18), Q4_1: (_q4_1, 20), Q8_0: (_q8_0, 34)}
_PLAIN = {F32: torch.float32, F16: torch.float16, BF16: torch.bfloat16}


def block_size(qtype: int) -> tuple[int, int]:
    """(values, bytes) of one block of this type."""
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    return GGML_QUANT_SIZES[GGMLQuantizationType(qtype)]


def dequantize(raw: np.ndarray, qtype: int) -> torch.Tensor:
    """uint8 [R, bytes] of whole blocks -> float32 [R, values], memory of its own. Raises ModelError for an unknown type."""
    raw = np.array(raw, copy=True)  # out of the map, contiguous and writable
    rows = raw.shape[0]
    if qtype in _PLAIN:
        return torch.from_numpy(raw).view(_PLAIN[qtype]).float()
    if qtype in _FAST:
        convert, size = _FAST[qtype]
        return convert(torch.from_numpy(raw).view(-1, size)).view(rows, -1)
    return torch.from_numpy(_by_package(raw, qtype))


def _by_package(raw: np.ndarray, qtype: int) -> np.ndarray:
    from gguf.constants import GGMLQuantizationType
    from gguf.quants import dequantize as package_dequantize

    kind = GGMLQuantizationType(qtype)
    try:
        return np.ascontiguousarray(package_dequantize(raw, kind), dtype=np.float32)
    except NotImplementedError:
        raise ModelError(f"GGUF tensors of type {kind.name} cannot be read; requantize the file, for example to Q8_0") from None
