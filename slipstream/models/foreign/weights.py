"""The tensors of a transformers model, found in a checkpoint by transformers' own rules for names.

Names on disk may be older than those in memory, and several tensors may become one (experts). transformers' tables say how.
What they turn into one is read whole, everything else by the part that is asked for.
"""

import copy
import re
from typing import Any

import torch
from torch import Tensor, nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

from slipstream.errors import ModelError
from slipstream.weights.packed import Packed, dense
from slipstream.weights.parts import Part

_OLD_BUFFERS = r"rotary_emb\.inv_freq$"  # in checkpoints of old; computed from the config today


class Weights:
    """The stored tensors of `model`, whose own are empty, by the names that they have in it."""

    def __init__(self, model: Any, checkpoint: Any, dtype: torch.dtype):
        """Raises ModelError naming the tensors of the checkpoint that the model does not have."""
        self.checkpoint, self.dtype = checkpoint, dtype
        self.random = not checkpoint.names()
        self._model = model
        self._targets: dict[str, Tensor] = model.state_dict()
        self._tied: dict[str, str] = dict(getattr(model, "all_tied_weights_keys", None) or {})
        self._layers = {name for name, module in model.named_modules() if isinstance(module, nn.Linear)}
        self._stored: dict[str, str] = {}  # name in the model -> name in the checkpoint
        self._layer_names: dict[str, str] = {}  # the same for linear layers, however they are stored
        self._converted: dict[str, list[tuple[str, str]]] = {}  # name -> (pattern, name in the checkpoint) of what becomes it
        self._converters: dict[str, Any] = {}  # by pattern
        self._ready: dict[str, Tensor] = {}  # what one conversion gave besides what was asked for
        self._find()
        strict = set(getattr(model, "_keep_in_fp32_modules_strict", None) or ())
        self._float32 = strict | (set(getattr(model, "_keep_in_fp32_modules", None) or ()) if dtype == torch.float16 else set())

    def _find(self) -> None:
        mapping = get_model_conversion_mapping(self._model)
        renamings = [one for one in mapping if isinstance(one, WeightRenaming)]
        converters = [one for one in mapping if isinstance(one, WeightConverter)]
        self._converters = {pattern: one for one in converters for pattern in one.source_patterns}
        prefix, left = self._model.base_model_prefix, []
        for stored in sorted(self.checkpoint.names(), key=_natural):
            name, pattern = rename_source_key(stored, renamings, converters, prefix, self._targets)
            if name not in self._targets and stored in self._targets:
                name, pattern = stored, None
            layer = name.rpartition(".")[0]
            if name not in self._targets and layer not in self._layers:
                left.append(stored)
            elif pattern is not None:
                self._converted.setdefault(name, []).append((pattern, stored))
            else:
                self._stored[name] = stored
                if layer in self._layers:
                    self._layer_names[layer] = stored.rpartition(".")[0]
        ignored = [*(getattr(self._model, "_keys_to_ignore_on_load_unexpected", None) or ()), _OLD_BUFFERS]
        left = [name for name in left if not any(re.search(pattern, name) for pattern in ignored)]
        if left:
            more = f" and {len(left) - 3} more" if len(left) > 3 else ""
            raise ModelError(f"the checkpoint has tensors that the model has not: {', '.join(left[:3])}{more}")

    def dtype_of(self, name: str) -> torch.dtype:
        """The dtype in which the model keeps a tensor."""
        kept = any(re.search(rf"(^|\.){re.escape(key)}(\.|$)", name) for key in self._float32)
        return torch.float32 if kept else self._targets[name].dtype

    def has(self, name: str) -> bool:
        """Whether the checkpoint gives this tensor itself (and not by a tie to another)."""
        if self.random:
            return name not in self._tied
        return name in self._stored or name in self._converted or name in self._ready

    def tied(self, name: str, other: str) -> bool:
        """Whether the model takes `other` for this tensor because the checkpoint does not have it."""
        return not self.has(name) and self._tied.get(name) == other

    def linear(self, name: str, shape: tuple[int, int], rows: Part | None, cols: Part | None) -> Packed:
        """The weight of a linear layer as it is stored."""
        weight = name + ".weight"
        stored = name if self.random else self._layer_names.get(name)
        if stored is None or weight in self._converted:
            return dense(self.tensor(weight, shape, rows, cols))
        return self.checkpoint.linear(stored, shape, rows=rows, cols=cols, dtype=self.dtype)

    def tensor(
        self, name: str, shape: tuple[int, ...], rows: Part | None = None, cols: Part | None = None
    ) -> Tensor:  # fmt: skip
        """A tensor of the model, or `rows` of its first dimension and `cols` of its second."""
        if not self.has(name) and name in self._tied:
            name = self._tied[name]
        dtype = self.dtype_of(name)
        stored = name if self.random else self._stored.get(name)
        if stored is not None:
            return self.checkpoint.tensor(stored, shape, rows=rows, cols=cols, dtype=dtype)
        whole = self._convert(name)
        if tuple(whole.shape) != shape:
            raise ModelError(
                f"the checkpoint's tensors give {name} of shape {list(whole.shape)}, and the config asks for {shape}"
            )
        part = whole if rows is None else whole[slice(*rows)]
        part = part if cols is None else part[:, slice(*cols)]
        return part.to(dtype).clone(memory_format=torch.contiguous_format)

    def _convert(self, name: str) -> Tensor:
        if name in self._ready:
            return self._ready.pop(name)
        sources = self._converted.pop(name, None)
        if sources is None:
            raise ModelError(f"the checkpoint has no tensor for {name}")
        converter = copy.deepcopy(self._converters[sources[0][0]])
        for pattern, stored in sources:
            converter.add_tensor(name, stored, pattern, self.checkpoint.tensor(stored))
        made = converter.convert(name, model=self._model, config=self._model.config)
        self._ready.update((key, value[0] if isinstance(value, list) else value) for key, value in made.items())
        if name not in self._ready:
            raise ModelError(f"{', '.join(stored for _, stored in sources)} do not give the model's {name}")
        return self._ready.pop(name)


def _natural(name: str) -> list[tuple[int, str]]:
    """Sorts layer 10 behind layer 9, as the stacking of experts needs it."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in name.split(".")]
