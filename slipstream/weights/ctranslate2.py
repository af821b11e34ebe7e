"""Reads a CTranslate2 `model.bin`: named variables, aliases between them, and int8 weights with their scales.

Format (all little-endian): u32 version, string specification, u32 revision, u32 count, then per variable: string name, u8 rank,
u32 per dimension, u8 type, u32 bytes, data; then u32 count of aliases: string alias, string name. A string is u16 bytes, the
closing NUL among them. Imports numpy only; torch users take views of what it returns.
"""

import mmap
import pathlib
import struct

import numpy as np

from slipstream.errors import ModelError

VERSIONS = (5, 6)
_TYPES = {0: "<f4", 1: "<i1", 2: "<i2", 3: "<i4", 4: "<f2"}  # 5 is bfloat16, kept as its bits
_BFLOAT16 = 5


class CTranslate2File:
    """The variables of one file, memory-mapped. `names` are theirs and the aliases'."""

    def __init__(self, path: str | pathlib.Path):
        self.path = pathlib.Path(path)
        try:
            with open(self.path, "rb") as f:
                self._map = mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as e:
            raise ModelError(f"{self.path}: {e}") from None
        self._at = 0
        self._variables: dict[str, tuple[int, tuple[int, ...], int, int]] = {}  # name -> (type, shape, offset, bytes)
        try:
            self._read()
        except (struct.error, UnicodeDecodeError):
            raise ModelError(f"{self.path}: cut short or not a CTranslate2 model") from None

    def _unpack(self, kind: str) -> int:
        (value,) = struct.unpack_from("<" + kind, self._map, self._at)
        self._at += struct.calcsize("<" + kind)
        return value

    def _string(self) -> str:
        n = self._unpack("H")
        text = self._map[self._at : self._at + n]
        if len(text) < n:
            raise struct.error
        self._at += n
        return text.rstrip(b"\0").decode()

    def _read(self) -> None:
        version = self._unpack("I")
        if version not in VERSIONS:
            raise ModelError(f"{self.path}: version {version} of the format is not supported; {VERSIONS} are")
        self.specification = self._string()
        self.revision = self._unpack("I")
        for _ in range(self._unpack("I")):
            name = self._string()
            shape = tuple(self._unpack("I") for _ in range(self._unpack("B")))
            kind, nbytes = self._unpack("B"), self._unpack("I")
            if kind not in _TYPES and kind != _BFLOAT16:
                raise ModelError(f"{self.path}: {name} has the unknown type {kind}")
            if self._at + nbytes > len(self._map):
                raise ModelError(f"{self.path}: cut short within {name}")
            self._variables[name] = (kind, shape, self._at, nbytes)
            self._at += nbytes
        for _ in range(self._unpack("I")):
            alias = self._string()
            self._variables[alias] = self._find(self._string())

    def _find(self, name: str) -> tuple[int, tuple[int, ...], int, int]:
        if name not in self._variables:
            raise ModelError(f"{self.path}: there is no variable {name}")
        return self._variables[name]

    @property
    def names(self) -> list[str]:
        return list(self._variables)

    def raw(self, name: str) -> np.ndarray:
        """The variable as stored, read-only; bfloat16 as uint16 bits."""
        kind, shape, offset, nbytes = self._find(name)
        dtype = np.dtype("<u2" if kind == _BFLOAT16 else _TYPES[kind])
        return np.frombuffer(self._map, dtype, nbytes // dtype.itemsize, offset).reshape(shape)

    def float32(self, name: str) -> np.ndarray:
        """The variable as float32. Quantized weights are divided by their scale (one for the matrix, or one per row)."""
        kind, _, _, _ = self._find(name)
        raw = self.raw(name)
        if kind == _BFLOAT16:
            return (raw.astype(np.uint32) << 16).view(np.float32)
        out = raw.astype(np.float32)
        if kind in (1, 2) and name + "_scale" in self._variables:
            scale = self.float32(name + "_scale")
            out /= scale.reshape(-1, *[1] * (out.ndim - 1)) if scale.size > 1 else scale
        return out
