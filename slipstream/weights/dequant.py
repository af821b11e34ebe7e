"""Stored blocks of a GGUF tensor to float32. Pure functions over bytes.

Q4_0, Q4_1 and Q8_0 are written here over whole arrays, since the `gguf` package's own take several times as long; every other
type goes through that package. NumPy, not PyTorch: its one thread never waits for others where ranks share the cores.
Formats: ggml's `ggml-common.h` (blocks of 32 values with a float16 scale).
"""

import numpy as np
import torch

from slipstream.errors import ModelError

BLOCK = 32
# gguf.GGMLQuantizationType, spelled out so that the tables below read alone.
F32, F16, Q4_0, Q4_1, Q8_0, BF16 = 0, 1, 2, 3, 8, 30


def _head(blocks: np.ndarray, size: int) -> np.ndarray:
    """The float16 numbers in front of each block, as float32 [N, size / 2]."""
    return np.ascontiguousarray(blocks[:, :size]).view(np.float16).astype(np.float32)


def _scaled_nibbles(packed: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """uint8 [N, 16] times scale [N, 1] -> float32 [N, 32]: low halves first, then high halves, as ggml orders a block."""
    out = np.empty((len(packed), BLOCK), np.float32)
    np.multiply(packed & 15, scale, out=out[:, :16])
    np.multiply(packed >> 4, scale, out=out[:, 16:])
    return out


def _q4_1(blocks: np.ndarray) -> np.ndarray:
    """[scale f16, minimum f16, 16 bytes]"""
    head = _head(blocks, 4)
    out = _scaled_nibbles(blocks[:, 4:], head[:, :1])
    out += head[:, 1:]
    return out


def _q4_0(blocks: np.ndarray) -> np.ndarray:
    """[scale f16, 16 bytes], values minus 8"""
    scale = _head(blocks, 2)
    out = _scaled_nibbles(blocks[:, 2:], scale)
    out -= scale * 8
    return out


def _q8_0(blocks: np.ndarray) -> np.ndarray:
    """[scale f16, 32 int8]"""
    return blocks[:, 2:].view(np.int8) * _head(blocks, 2)


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
        blocks = raw.shape[1] // size
        return torch.from_numpy(convert(raw.reshape(rows * blocks, size)).reshape(rows, blocks * BLOCK))
    return torch.from_numpy(_by_package(raw, qtype))


def _by_package(raw: np.ndarray, qtype: int) -> np.ndarray:
    from gguf.constants import GGMLQuantizationType
    from gguf.quants import dequantize as package_dequantize

    kind = GGMLQuantizationType(qtype)
    try:
        return np.ascontiguousarray(package_dequantize(raw, kind), dtype=np.float32)
    except NotImplementedError:
        raise ModelError(f"GGUF tensors of type {kind.name} cannot be read; requantize the file, for example to Q8_0") from None
