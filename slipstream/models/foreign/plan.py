"""How a transformers model is split over ranks, by its own tensor-parallel plan.

Attention is split by heads, as evenly as they go, everything else by equal parts. A kind of split that is not carried out here
is refused by name.
"""

import re
from dataclasses import dataclass
from typing import Any

from torch import nn

from slipstream.errors import ModelError
from slipstream.shard import Shard, split_heads
from slipstream.weights.parts import Part

_REPLICATED = ("replicated_with_grad_allreduce", "replicate")  # these differ in training alone
_EXPERTS = "moe_tp_experts"
_COLUMNS, _ROWS = ("colwise", "colwise_gather_output", "colwise_rep"), ("rowwise", "rowwise_split_input", "rowwise_rep")


@dataclass(frozen=True)
class Cut:
    """A rank's part of a linear layer: outputs `rows` or inputs `cols`, None for all of them."""

    rows: Part | None = None
    cols: Part | None = None
    gathers: bool = False  # the outputs of all ranks are put together
    splits_input: bool = False  # the input is whole on every rank


WHOLE = Cut()


class Plan:
    """The splits of a model's modules, for one rank. Raises ModelError for a model that cannot be split over its ranks."""

    def __init__(self, model: Any, shard: Shard):
        self.shard, self.model = shard, model
        self.styles: dict[str, str] = {}  # by name of a module or parameter
        if shard.size == 1:
            return
        config = model.config.get_text_config()
        self.num_q_heads: int = config.num_attention_heads
        self.num_kv_heads: int = getattr(config, "num_key_value_heads", None) or self.num_q_heads
        patterns = {re.escape(name).replace(r"\*", r"\d+"): style for name, style in (model.tp_plan or {}).items()}
        own = (model.get_input_embeddings(), model.get_output_embeddings())  # split by tokens, whatever the plan says
        targets = {name: module for name, module in model.named_modules() if module not in own} | dict(model.named_parameters())
        for name in targets:
            self.styles.update((name, style) for pattern, style in patterns.items() if re.fullmatch(pattern, name))
        if not any(style in (*_COLUMNS, *_ROWS, _EXPERTS) for style in self.styles.values()):
            raise ModelError("it has no tensor-parallel plan in transformers; run it on one rank")
        for name, style in self.styles.items():
            self._check(name, style, targets[name])

    def _check(self, name: str, style: str, target: Any) -> None:
        """Raises ModelError for a split that is not carried out."""
        of_experts = style == _EXPERTS or self.styles.get(name.rpartition(".")[0]) == _EXPERTS
        of_layer = style in (*_COLUMNS, *_ROWS) and type(target) is nn.Linear
        if not (style in _REPLICATED or of_experts or of_layer):
            raise ModelError(f"its tensor-parallel plan has {style!r} for {name}, which is not supported; run it on one rank")

    def linear(self, name: str, module: nn.Linear) -> Cut:
        """The part of a linear layer."""
        style = self.styles.get(name)
        if style is None or style in _REPLICATED:
            return WHOLE
        alone = style not in ("colwise", "rowwise")  # the layer before and the one behind see whole rows
        if style in _COLUMNS:
            return Cut(rows=self._columns(name, module, alone), gathers=alone)
        return Cut(cols=self._rows(name, module, alone), splits_input=alone)

    def experts(self, name: str, module: nn.Module) -> Part | None:
        """The inner columns of every expert that are this rank's, or None for a module that has no experts."""
        if self.styles.get(name) != _EXPERTS:
            return None
        shapes = {key: tuple(value.shape) for key, value in module.named_parameters()}
        styles = {key: self.styles.get(f"{name}.{key}") for key in shapes}
        experts, hidden, inner = shapes.get("down_proj", (0, 0, 0))
        fits = shapes == {"gate_up_proj": (experts, 2 * inner, hidden), "down_proj": (experts, hidden, inner)}
        if not fits or styles != {"gate_up_proj": "packed_colwise", "down_proj": "rowwise"}:
            raise ModelError("its experts cannot be split over ranks; run it on one rank")
        return self.shard.even(inner)

    def _columns(self, name: str, module: nn.Linear, alone: bool) -> Part:
        attention = None if alone else self._attention(name)
        if attention is None:
            return self.shard.even(module.out_features)
        width, dim = module.out_features, self._head_dim(attention)
        heads = self._heads()
        if width == self.num_q_heads * dim:
            return heads.q_start * dim, heads.q_stop * dim
        if width == self.num_kv_heads * dim:
            return heads.kv_start * dim, heads.kv_stop * dim
        if self.num_q_heads == self.num_kv_heads and not width % self.num_q_heads:  # queries, keys and values head by head
            unit = width // self.num_q_heads
            return heads.q_start * unit, heads.q_stop * unit
        raise ModelError(f"{name} has {width} outputs, which are no heads; run it on one rank")

    def _rows(self, name: str, module: nn.Linear, alone: bool) -> Part:
        attention = None if alone else self._attention(name)
        if attention is None:
            return self.shard.even(module.in_features)
        dim = self._head_dim(attention)
        if module.in_features != self.num_q_heads * dim:
            raise ModelError(f"{name} has {module.in_features} inputs, which are no heads; run it on one rank")
        heads = self._heads()
        return heads.q_start * dim, heads.q_stop * dim

    def _attention(self, name: str) -> nn.Module | None:
        """The attention module that a layer is part of."""
        parent = self.model.get_submodule(name.rpartition(".")[0])
        return parent if "Attention" in type(parent).__name__ else None

    def _head_dim(self, attention: nn.Module) -> int:
        config = self.model.config.get_text_config()
        return getattr(attention, "head_dim", None) or getattr(attention, "head_size", config.hidden_size // self.num_q_heads)

    def _heads(self):
        shares = split_heads(self.num_q_heads, self.num_kv_heads, self.shard.size)
        if any(not share.num_q_heads for share in shares):
            raise ModelError(f"{self.shard.size} ranks are too many for the {self.num_q_heads} attention heads")
        return shares[self.shard.rank]
