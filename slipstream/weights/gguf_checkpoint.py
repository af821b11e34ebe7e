"""The weights of one GGUF file under Hugging Face's names and in Hugging Face's order of rows."""

import math
import pathlib

import numpy as np
import torch

from slipstream.errors import ModelError
from slipstream.weights import dequant
from slipstream.weights.gguf_config import hf_config, hf_name
from slipstream.weights.gguf_file import GGUFFile
from slipstream.weights.packed import DENSE, Packed
from slipstream.weights.parts import check_shape, cut, first_architecture, normalize_config


class GGUFCheckpoint:
    """A GGUF file of the Llama family. Blocks outside the asked rows and columns are not touched."""

    def __init__(self, path: pathlib.Path):
        self.path, self.file = path, GGUFFile(path)
        self.config = normalize_config(hf_config(self.file))
        self._stored = {hf: t for t in self.file.tensors.values() if (hf := hf_name(t.name))}
        self._read: set[str] = set()
        self._permuted = self.file.metadata.get("general.architecture") == "llama"

    @property
    def architecture(self) -> str:
        return first_architecture(self.config)

    def names(self) -> list[str]:
        return list(self._stored)

    def unread(self) -> list[str]:
        return [name for name in self._stored if name not in self._read]

    def has(self, name: str) -> bool:
        return name in self._stored

    def shape(self, name: str) -> tuple[int, ...]:
        if name not in self._stored:
            raise ModelError(f"{self.file.path}: there is no tensor {name}")
        return self._stored[name].shape

    def _source_rows(self, name: str, rows: range) -> slice | np.ndarray:
        """Where the asked rows lie in the file.

        llama.cpp interleaves the two rotary halves of each head's query and key rows for `llama`: row 2i + half of a head
        there is row half * head_dim / 2 + i here.
        """
        for proj, heads in ((".q_proj.", "num_attention_heads"), (".k_proj.", "num_key_value_heads")):
            if self._permuted and proj in name:
                head_dim = self.shape(name)[0] // self.config[heads]
                head, within = np.divmod(np.arange(rows.start, rows.stop), head_dim)
                half, i = np.divmod(within, head_dim // 2)
                return head * head_dim + 2 * i + half
        return slice(rows.start, rows.stop)

    def tensor(self, name, shape=None, *, rows=None, cols=None, dtype=None, device: torch.device | str = "cpu") -> torch.Tensor:
        stored = self.shape(name)
        check_shape(name, stored, shape, self.config)
        self._read.add(name)
        if len(stored) > 2:
            raise ModelError(f"{name}: GGUF tensors of {len(stored)} dimensions cannot be read yet")
        across, along = cut(stored, rows, cols, name)
        info = self._stored[name]
        raw = self.file.raw(info.name)
        if len(stored) == 1:
            value = dequant.dequantize(raw, info.qtype)[0]
            part = self._source_rows(name, across)
            value = value[part if isinstance(part, slice) else torch.from_numpy(part)]
        else:
            block, size = dequant.block_size(info.qtype)
            first, last = along.start // block, math.ceil(along.stop / block)
            raw = raw[:, first * size : last * size][self._source_rows(name, across)]
            value = dequant.dequantize(raw, info.qtype)[:, along.start - first * block : along.stop - first * block]
        return value.to(device=device, dtype=dtype).contiguous()

    def linear(self, name, shape, *, rows=None, cols=None, **options) -> Packed:
        return DENSE.read(self.tensor, name, shape, rows, cols, **options)
