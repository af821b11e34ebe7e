"""Reading a GGUF file: its metadata, its table of tensors, and a memory map of their bytes.

Torch-free, so that the tokenizer can read metadata without it. The `gguf` package's own reader builds a view per element and
needs seconds for a vocabulary; this one walks the header once (about 0.1 s for 49,152 tokens) and trusts no length it has read.
Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md (versions 2 and 3, little endian).
"""

import math
import mmap
import pathlib
import struct
from dataclasses import dataclass

import numpy as np

from slipstream.errors import ModelError

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_MAX_DEPTH = 4


@dataclass(frozen=True)
class GGUFTensor:
    """Where a tensor's bytes are. `shape` is in row-major order (the last dimension runs fastest), as PyTorch's."""

    name: str
    shape: tuple[int, ...]
    qtype: int  # a gguf.GGMLQuantizationType
    offset: int  # from the start of the file
    row_bytes: int  # of one run along the last dimension


class _Cursor:
    """Walks the header; every read is checked against the file's end."""

    def __init__(self, data: mmap.mmap):
        self.data = data
        self.at = 0

    def scalar(self, code: str):
        layout = "<" + code
        size = struct.calcsize(layout)
        value = struct.unpack_from(layout, self.data, self.at)[0]
        self.at += size
        return value

    def string(self) -> str:
        size = self.scalar("Q")
        end = self.at + size
        if end > len(self.data):
            raise ValueError("a string runs past the end of the file")
        raw = self.data[self.at : end]
        self.at = end
        return raw.decode("utf-8", errors="surrogateescape")

    def value(self, kind: int, depth: int = 0):
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            return self.array(depth + 1)
        if kind not in _SCALARS:
            raise ValueError(f"unknown metadata type {kind}")
        return self.scalar(_SCALARS[kind])

    def array(self, depth: int) -> list:
        if depth > _MAX_DEPTH:
            raise ValueError("metadata nests too deeply")
        kind = self.scalar("I")
        count = self.scalar("Q")
        if kind in _SCALARS:
            layout = np.dtype(_SCALARS[kind]).newbyteorder("<")
            if self.at + count * layout.itemsize > len(self.data):
                raise ValueError("an array runs past the end of the file")
            values = np.frombuffer(self.data, layout, count, self.at).tolist()
            self.at += count * layout.itemsize
            return values
        if count > len(self.data) - self.at:
            raise ValueError("an array runs past the end of the file")
        return [self.value(kind, depth) for _ in range(count)]


class GGUFFile:
    """An open GGUF file.

    `metadata`: key to value (numbers, strings, lists). `tensors`: name to `GGUFTensor`. Raises ModelError for a file that is
    not GGUF, is cut short, or is one of several parts.
    """

    def __init__(self, path: str | pathlib.Path):
        self.path = pathlib.Path(path)
        try:
            with open(self.path, "rb") as file:
                self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            self.metadata, self.tensors = _read_header(_Cursor(self._data))
        except OSError as e:
            raise ModelError(f"{self.path}: {e.strerror or e}") from None
        except (ValueError, struct.error, OverflowError, KeyError, MemoryError) as e:
            raise ModelError(f"{self.path} is not a GGUF file that can be read: {e}") from None
        if self.metadata.get("split.count", 1) > 1:
            raise ModelError(f"{self.path} is one of several parts; join them with llama-gguf-split --merge first")

    def raw(self, name: str) -> np.ndarray:
        """The tensor's stored bytes, a read-only view of the map: uint8 [every dimension but the last..., row_bytes]."""
        t = self.tensors[name]
        lines = t.shape[:-1] or (1,)
        flat = np.frombuffer(self._data, np.uint8, math.prod(lines) * t.row_bytes, t.offset)
        return flat.reshape(*lines, t.row_bytes)


def _read_header(cursor: _Cursor) -> tuple[dict, dict[str, GGUFTensor]]:
    if cursor.data[:4] != b"GGUF":
        raise ValueError("it does not begin with GGUF")
    cursor.at = 4
    version = cursor.scalar("I")
    if version not in (2, 3):
        raise ValueError(f"version {version} (2 and 3 are known, little endian)")
    tensors, pairs = cursor.scalar("Q"), cursor.scalar("Q")
    metadata = {}
    for _ in range(pairs):
        key = cursor.string()
        metadata[key] = cursor.value(cursor.scalar("I"))
    table = []
    for _ in range(tensors):
        name, rank = cursor.string(), cursor.scalar("I")
        if not 1 <= rank <= 4:
            raise ValueError(f"tensor {name} has {rank} dimensions")
        shape = tuple(cursor.scalar("Q") for _ in range(rank))[::-1]
        table.append((name, shape, cursor.scalar("I"), cursor.scalar("Q")))
    align = metadata.get("general.alignment", 32)
    start = -(-cursor.at // align) * align
    return metadata, {row[0]: _locate(row, start, len(cursor.data)) for row in table}


def _locate(row: tuple[str, tuple[int, ...], int, int], start: int, size: int) -> GGUFTensor:
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    name, shape, qtype, offset = row
    block, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(qtype)]
    if shape[-1] % block:
        raise ValueError(f"tensor {name}: {shape[-1]} columns are not whole blocks of {block}")
    row_bytes = shape[-1] // block * block_bytes
    if start + offset + math.prod(shape[:-1]) * row_bytes > size:
        raise ValueError(f"tensor {name} runs past the end of the file")
    return GGUFTensor(name, shape, qtype, start + offset, row_bytes)
