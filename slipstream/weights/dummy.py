"""Random weights from a shape, a name and a seed: for measuring models whose weights are not at hand.

Every element is a hash of (seed, tensor name, row, column), so a rank's slice equals that part of the whole tensor, and CPU and
GPU make the same values. Touches nothing but the device that is asked for.
"""

import hashlib
import math
import pathlib

import torch

from slipstream.errors import ModelError
from slipstream.weights.packed import DENSE, Packed
from slipstream.weights.parts import cut, first_architecture

_CHUNK = {"cpu": 1 << 20, "cuda": 1 << 26}  # elements at a time: inside a CPU's cache, or enough to fill a GPU
_IRWIN_HALL_STD = math.sqrt(4 * (256**2 - 1) / 12)  # of the sum of four uniform bytes, whose mean is 510


def _wrap32(value: int) -> int:
    """An unsigned 32-bit constant as the int32 that has its bits."""
    return value - (1 << 32) if value >= 1 << 31 else value


_M1, _M2, _COLUMN = _wrap32(0x7FEB352D), _wrap32(0x846CA68B), _wrap32(0x9E3779B1)


def _mix(x: torch.Tensor) -> torch.Tensor:
    """A 32-bit finalizer (xorshift and multiply, after C. Wellons' "lowbias32") in place on int32, whose products wrap."""
    x ^= (x >> 16) & 0xFFFF
    x *= _M1
    x ^= (x >> 15) & 0x1FFFF
    x *= _M2
    x ^= (x >> 16) & 0xFFFF
    return x


def _bytes_sum(x: torch.Tensor) -> torch.Tensor:
    """The sum of the four bytes of each int32: nearly normal, 0..1020."""
    pairs = (x & 0x00FF00FF) + ((x >> 8) & 0x00FF00FF)
    return (pairs & 0xFFFF) + (pairs >> 16)


def _key(seed: int, name: str) -> tuple[int, int]:
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    return tuple(_wrap32(int.from_bytes(digest[i : i + 4], "little")) for i in (0, 4))  # type: ignore[return-value]


def _fan_in(name: str, shape: tuple[int, ...]) -> int:
    if len(shape) < 2:
        return shape[0] if shape else 1
    return shape[-1] if len(shape) == 2 or "expert" in name else math.prod(shape[1:])


def dummy_tensor(
    seed: int,
    name: str,
    shape: tuple[int, ...],
    rows: range,
    cols: range,
    inner: range,
    dtype: torch.dtype,
    device: torch.device,
) -> torch.Tensor:
    """[len(rows), len(cols), len(inner), *shape[3:]] of normal values with standard deviation 1.2 / sqrt(fan in).

    Norms' weights are ones. `rows`, `cols` and `inner` cut the first three dimensions of `shape`, those that it has. float32
    arithmetic, then one rounding to `dtype`.
    """
    part = (len(rows), len(cols), len(inner), *shape[3:])[: max(len(shape), 1)]
    if "norm" in name and name.endswith("weight"):
        return torch.ones(part, dtype=dtype, device=device)
    depth, width = math.prod(shape[2:]), math.prod(shape[3:])
    key_row, key_all = _key(seed, name)
    columns = torch.arange(cols.start, cols.stop, dtype=torch.int32, device=device)[:, None] * depth
    columns = columns + torch.arange(inner.start * width, inner.stop * width, dtype=torch.int32, device=device)
    columns = columns.view(-1) * _COLUMN + key_all
    lines = torch.arange(rows.start, rows.stop, dtype=torch.int32, device=device)
    lines = _mix(_mix(lines ^ key_row) + key_row)
    scale = 1.2 / math.sqrt(_fan_in(name, shape)) / _IRWIN_HALL_STD
    out = torch.empty((len(rows), len(columns)), dtype=dtype, device=device)
    step = max(1, _CHUNK.get(device.type, 1 << 24) // max(1, len(columns)))
    for at in range(0, len(rows), step):
        hashed = _mix(lines[at : at + step, None] + columns)
        out[at : at + step] = (_bytes_sum(hashed) - 510).float() * scale
    return out.view(part)


class DummyCheckpoint:
    """Random weights, the same for the same seed, name and shape on any rank and device."""

    def __init__(self, path: pathlib.Path, config: dict, seed: int):
        self.path = path
        self.config = config
        self.seed = seed

    @property
    def architecture(self) -> str:
        return first_architecture(self.config)

    def names(self) -> list[str]:
        return []

    def unread(self) -> list[str]:
        return []

    def has(self, name: str) -> bool:
        return True

    def shape(self, name: str) -> tuple[int, ...]:
        raise ModelError(f"{name}: random weights have the shape that is asked for, none of their own")

    def tensor(
        self, name, shape=None, *, rows=None, cols=None, inner=None, dtype=None, device: torch.device | str = "cpu"
    ) -> torch.Tensor:
        shape = tuple(self.shape(name) if shape is None else shape)
        parts = cut(shape, rows, cols, name, inner)
        return dummy_tensor(self.seed, name, shape, *parts, dtype or torch.float32, torch.device(device))

    def linear(self, name, shape, *, rows=None, cols=None, **options) -> Packed:
        return DENSE.read(self.tensor, name, shape, rows, cols, **options)
