"""The weights of one GGUF file under Hugging Face's names and in Hugging Face's order of rows.

The experts of a layer are one tensor [experts, out, in] (`...experts.gate_proj.weight`). Each of them can be read by a name of
its own as well (`...experts.7.gate_proj.weight`).
"""

import math
import pathlib
import re

import numpy as np
import torch

from slipstream.errors import ModelError
from slipstream.weights import dequant
from slipstream.weights.gguf_config import hf_config, hf_names, norms_hold_one
from slipstream.weights.gguf_file import GGUFFile, GGUFTensor
from slipstream.weights.packed import DENSE, Packed
from slipstream.weights.parts import check_shape, cut, first_architecture, normalize_config


class GGUFCheckpoint:
    """A GGUF file of a family that `gguf_config` knows. Blocks outside the asked rows and columns are not touched."""

    def __init__(self, path: pathlib.Path):
        self.path, self.file = path, GGUFFile(path)
        self.config = normalize_config(hf_config(self.file))
        self._stored = {hf: self.file.tensors[name] for hf, name in hf_names(self.file).items()}
        self._read: set[str] = set()
        self._one_more = norms_hold_one(self.file)
        self._permuted = self.file.metadata.get("general.architecture") == "llama"

    @property
    def architecture(self) -> str:
        return first_architecture(self.config)

    def names(self) -> list[str]:
        return list(self._stored)

    def unread(self) -> list[str]:
        return [name for name in self._stored if name not in self._read]

    def has(self, name: str) -> bool:
        return name in self._stored or _all_experts(name)[0] in self._stored

    def shape(self, name: str) -> tuple[int, ...]:
        _, info, expert = self._find(name)
        return info.shape if expert is None else info.shape[1:]

    def _find(self, name: str) -> tuple[str, GGUFTensor, int | None]:
        """The name under which a tensor is stored, the tensor, and which of its experts is meant, if one is."""
        if name in self._stored:
            return name, self._stored[name], None
        whole, expert = _all_experts(name)
        if whole not in self._stored or expert >= self._stored[whole].shape[0]:
            raise ModelError(f"{self.file.path}: there is no tensor {name}")
        return whole, self._stored[whole], expert

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

    def tensor(
        self, name, shape=None, *, rows=None, cols=None, inner=None, dtype=None, device: torch.device | str = "cpu"
    ) -> torch.Tensor:
        whole, info, expert = self._find(name)
        stored = self.shape(name)
        check_shape(name, stored, shape, self.config)
        self._read.add(whole)
        across, along, within = cut(stored, rows, cols, name, inner)
        raw = self.file.raw(info.name)
        if expert is not None:
            raw = raw[expert]
        if len(stored) == 3:
            part = raw[across.start : across.stop, along.start : along.stop]
            value = dequant.dequantize(part.reshape(-1, info.row_bytes), info.qtype).view(*part.shape[:2], stored[2])
            value = value[:, :, within.start : within.stop]
        elif len(stored) == 1:
            value = dequant.dequantize(raw, info.qtype)[0]
            part = self._source_rows(name, across)
            value = value[part if isinstance(part, slice) else torch.from_numpy(part)]
            if self._one_more and name.endswith("norm.weight"):
                value -= 1
        else:
            block, size = dequant.block_size(info.qtype)
            first, last = along.start // block, math.ceil(along.stop / block)
            raw = raw[:, first * size : last * size][self._source_rows(name, across)]
            value = dequant.dequantize(raw, info.qtype)[:, along.start - first * block : along.stop - first * block]
        return value.to(device=device, dtype=dtype).contiguous()

    def linear(self, name, shape, *, rows=None, cols=None, **options) -> Packed:
        return DENSE.read(self.tensor, name, shape, rows, cols, **options)


def _all_experts(name: str) -> tuple[str, int]:
    """`...experts.7.gate_proj.weight` -> `...experts.gate_proj.weight` and 7; "" and 0 for a name that is not one expert's."""
    match = re.fullmatch(r"(.*\.experts)\.(\d+)\.(.*)", name)
    return (f"{match[1]}.{match[3]}", int(match[2])) if match else ("", 0)
