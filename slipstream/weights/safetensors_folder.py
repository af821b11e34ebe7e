"""A Hugging Face folder: config.json and safetensors. Reads only files of that folder."""

import functools
import pathlib

import torch

from slipstream.errors import ModelError
from slipstream.weights.packed import DENSE, Packed
from slipstream.weights.parts import check_shape, cut, first_architecture, read_config, read_json


class SafetensorsCheckpoint:
    """A folder with config.json and either model.safetensors or several files behind model.safetensors.index.json."""

    def __init__(self, folder: pathlib.Path):
        self.path = self.folder = folder
        self._read: set[str] = set()
        self.config = read_config(folder)
        if self.config.get("quantization_config"):
            method = self.config["quantization_config"].get("quant_method", "unknown")
            if method != "mxfp4":  # which only gpt-oss has; another model's tensors are not found
                raise ModelError(
                    f"{folder}: weights quantized with {method} cannot be read; use the unquantized model or a GGUF"
                )
        self._open = functools.lru_cache(maxsize=None)(self._open_file)
        self._files = self._index()

    def _index(self) -> dict[str, str]:
        index = self.folder / "model.safetensors.index.json"
        if index.is_file():
            table = read_json(index).get("weight_map")
            if not isinstance(table, dict) or not all(isinstance(f, str) and f == pathlib.Path(f).name for f in table.values()):
                raise ModelError(f"{index}: weight_map must name files of the same folder")
            return table
        found = sorted(self.folder.glob("*.safetensors"))
        single = self.folder / "model.safetensors"
        found = [single] if single in found else found
        if not found:
            pickled = any(self.folder.glob("*.bin")) or any(self.folder.glob("*.pt"))
            hint = "pickled weights are never read; convert them" if pickled else "--load-format dummy needs no weights"
            raise ModelError(f"{self.folder} holds no *.safetensors ({hint})")
        return {name: file.name for file in found for name in list(self._open(file.name).keys())}

    def _open_file(self, file: str):
        from safetensors import SafetensorError, safe_open

        try:
            return safe_open(self.folder / file, framework="pt", device="cpu")
        except (OSError, SafetensorError) as e:
            raise ModelError(f"{self.folder / file}: {e}") from None

    def _slice(self, name: str):
        if name not in self._files:
            raise ModelError(f"{self.folder}: there is no tensor {name}")
        from safetensors import SafetensorError

        try:
            return self._open(self._files[name]).get_slice(name)
        except SafetensorError as e:
            raise ModelError(f"{self.folder / self._files[name]}: {e}") from None

    @property
    def architecture(self) -> str:
        return first_architecture(self.config)

    def names(self) -> list[str]:
        return list(self._files)

    def unread(self) -> list[str]:
        return [name for name in self._files if name not in self._read]

    def has(self, name: str) -> bool:
        return name in self._files

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._slice(name).get_shape())

    def tensor(
        self, name, shape=None, *, rows=None, cols=None, inner=None, dtype=None, device: torch.device | str = "cpu"
    ) -> torch.Tensor:
        part = self._slice(name)
        stored = tuple(part.get_shape())
        check_shape(name, stored, shape, self.config)
        self._read.add(name)
        if not stored:
            return part[...].to(device=device, dtype=dtype)
        across, along, within = cut(stored, rows, cols, name, inner)
        if len(stored) == 1:
            value = part[across.start : across.stop]
        elif len(stored) == 2:
            value = part[across.start : across.stop, along.start : along.stop]
        else:
            value = part[across.start : across.stop, along.start : along.stop, within.start : within.stop]
        return value.to(device=device, dtype=dtype).contiguous()

    def linear(self, name, shape, *, rows=None, cols=None, **options) -> Packed:
        return DENSE.read(self.tensor, name, shape, rows, cols, **options)
