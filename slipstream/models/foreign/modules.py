"""Modules that stand in a transformers model for its linear layers, its embedding and its output layer.

They compute by the device's operations on prepared weights, and hold a rank's part of them.
"""

from typing import Any

import torch
from torch import Tensor, nn

from slipstream.models.foreign.attention import Run
from slipstream.models.foreign.plan import Cut


class Linear(nn.Module):
    """A linear layer, or a rank's rows or columns of it."""

    def __init__(self, run: Run, weight: Any, cut: Cut, in_features: int, out_features: int):
        super().__init__()
        self.run, self.prepared, self.cut = run, weight, cut
        self.in_features, self.out_features = in_features, out_features  # of all ranks: modelling code reads them

    def forward(self, x: Tensor) -> Tensor:
        run, cut = self.run, self.cut
        if cut.splits_input:
            assert cut.cols
            x = x[..., cut.cols[0] : cut.cols[1]]
        y = run.ops.linear(x.reshape(-1, x.shape[-1]), self.prepared, run.step)
        y = y.view(*x.shape[:-1], y.shape[-1])
        if cut.cols is not None:
            return run.all_reduce(y)
        if cut.gathers:
            assert cut.rows
            whole = y.new_zeros(*y.shape[:-1], self.out_features)
            whole[..., cut.rows[0] : cut.rows[1]] = y
            return run.all_reduce(whole)
        return y


class Embedding(nn.Module):
    """The embedding of token ids, of which a rank holds a part. `original` may do more with a row than look it up."""

    def __init__(self, run: Run, original: nn.Embedding, table: Tensor, first: int, dtype: torch.dtype):
        super().__init__()
        self.run, self.weight, self.first, self.dtype = run, table, first, dtype
        self.plain = type(original) is nn.Embedding
        original.padding_idx = None
        self.original = original
        self.num_embeddings, self.embedding_dim = original.num_embeddings, original.embedding_dim

    def forward(self, ids: Tensor) -> Tensor:
        """The step's own ids are looked up: they are the same as `ids` [1, T]."""
        run = self.run
        if run.probing:
            rows = self.weight.index_select(0, ids[0] % len(self.weight)).to(self.dtype)
        else:
            rows = run.ops.embed(self.weight, self.first, run.step).to(self.dtype)
        if self.plain:
            return rows[None]
        # the original's own code over a table of just these rows: whatever it does with a row, it does here
        self.original.weight = nn.Parameter(rows, requires_grad=False)
        return self.original(torch.arange(len(rows), device=rows.device)[None])


class Head(nn.Module):
    """The output layer: this rank's part of the vocabulary, in float32."""

    def __init__(self, run: Run, weight: Any, bias: Tensor | None):
        super().__init__()
        self.run, self.prepared, self.bias = run, weight, bias

    def forward(self, x: Tensor) -> Tensor:
        y = self.run.ops.logits(x[0], self.prepared, self.run.step)
        return (y if self.bias is None else y + self.bias)[None]


class Hidden(nn.Module):
    """Stands for a model without its output layer: gives the hidden states that were put here.

    So transformers' own code between these and the logits (scales, soft caps) runs as it is.
    """

    def __init__(self) -> None:
        super().__init__()
        self.states: Tensor  # [1, n, hidden]

    def forward(self, *_: Any, **__: Any) -> "HiddenOutput":
        return HiddenOutput(self.states)


class HiddenOutput:
    """What modelling code reads of a model's output: the hidden states by name or as the first item; all else is None."""

    def __init__(self, states: Tensor):
        self.last_hidden_state = states

    def __getitem__(self, i: Any) -> Any:
        return (self.last_hidden_state,)[i]

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)
