"""The source of weights: one interface over safetensors folders, GGUF files and random weights.

Names, shapes and config are always Hugging Face's. A tensor-parallel rank asks for its rows or columns, and only
those are read. This module reads the named files and downloads nothing (`pull.py` does).
"""

import pathlib
from typing import Protocol

import torch

from slipstream.errors import ModelError
from slipstream.weights.config import load_config
from slipstream.weights.dummy import DummyCheckpoint
from slipstream.weights.gguf_checkpoint import GGUFCheckpoint
from slipstream.weights.packed import Packed
from slipstream.weights.safetensors_folder import SafetensorsCheckpoint


class Checkpoint(Protocol):
    """Weights and the config that belongs to them.

    `config` is config.json's content, with `rope_theta` and a flat `rope_parameters` always filled in where either is given.
    """

    config: dict
    path: pathlib.Path  # what errors name

    @property
    def architecture(self) -> str:
        """The first of `config["architectures"]`, or "" where the config names none."""
        ...

    def names(self) -> list[str]:
        """The names of all stored tensors; empty for random weights, which can make any tensor."""
        ...

    def unread(self) -> list[str]:
        """The names of stored tensors of which no part has been read."""
        ...

    def has(self, name: str) -> bool: ...

    def shape(self, name: str) -> tuple[int, ...]:
        """The whole tensor's shape. Raises ModelError if there is no such tensor."""
        ...

    def tensor(
        self,
        name: str,
        shape: tuple[int, ...] | None = None,
        *,
        rows: tuple[int, int] | None = None,
        cols: tuple[int, int] | None = None,
        inner: tuple[int, int] | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str = "cpu",
    ) -> torch.Tensor:
        """A contiguous copy of a part of the tensor: [start, stop) of its first, second and third dimension.

        `shape` is the whole tensor's shape as the caller expects it: checked against the file, and needed for random weights.
        `dtype` None keeps what is stored (float32 for GGUF and random weights). Raises ModelError for a tensor that is missing
        or of another shape.
        """
        ...

    def linear(
        self,
        name: str,
        shape: tuple[int, int],
        *,
        rows: tuple[int, int] | None = None,
        cols: tuple[int, int] | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str = "cpu",
    ) -> Packed:
        """A linear layer's weight, as it is stored: outputs `rows` and inputs `cols` of the layer with this name."""
        ...


def open_checkpoint(path: str | pathlib.Path, load_format: str = "auto", seed: int = 0) -> Checkpoint:
    """Opens what `pull.resolve_model` found: a folder, a .gguf file, or (for `dummy`) a config.json.

    load_format: `auto` follows from the path; `dummy` reads only the config. Raises ModelError if the two do not fit.
    """
    path = pathlib.Path(path)
    if load_format == "dummy":
        return DummyCheckpoint(path, load_config(path), seed)
    is_gguf = path.suffix == ".gguf"
    if load_format not in ("auto", "gguf" if is_gguf else "safetensors"):
        raise ModelError(f"--load-format {load_format} does not fit {path}")
    if is_gguf:
        return GGUFCheckpoint(path)
    if not path.is_dir():
        raise ModelError(f"{path} is not a folder with config.json and safetensors")
    return SafetensorsCheckpoint(path)
