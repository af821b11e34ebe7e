"""A small decoder with every kind of cache that devices hold: state by slot, a window, and all keys and values.

Its first layer has no attention but a decaying sum of what it has read, so state, pages of two tables and their snapshots and
copies all decide which token comes next.
"""

import json
import pathlib
from dataclasses import dataclass

import torch
from torch import Tensor

from slipstream.log.caches import CacheLayout, Paged, PerSlot, StateArray, Window
from slipstream.models.llama import Llama, Mixer
from slipstream.ops.cpu.paged import PagedStep
from slipstream.shard import Shard

WINDOW = 20
CONFIG = {
    "architectures": ["ToyForCausalLM"], "vocab_size": 311, "hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 3,
    "num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 8, "max_position_embeddings": 256,
}  # fmt: skip


@dataclass(frozen=True, eq=False)
class DecayingSum:
    """sum = 0.9 * sum + x for each token; each rank has its part of the columns. Counts the tokens, too."""

    cache: int
    shard: Shard

    def __call__(self, x: Tensor, step: PagedStep) -> Tensor:
        sums, counts = step.caches[self.cache]
        first, last = self.shard.even(x.shape[1])
        out = torch.zeros_like(x)
        for slot, begin, end in step.rows:
            counts[slot] += end - begin
            for t in range(begin, end):
                sums[slot] = 0.9 * sums[slot] + x[t, first:last]
                out[t, first:last] = sums[slot]
        return out


class Toy(Llama):
    def cache_layouts(self) -> tuple[CacheLayout, ...]:
        first, last = self.ops.shard.even(self.config.hidden)
        state = PerSlot((StateArray((last - first,), "float32"), StateArray((1,), "int32")))
        heads, dim = self.heads.num_kv_heads, self.config.head_dim
        return (state, Window(heads, dim, WINDOW), Paged(heads, dim))

    def attend(self, i: int, prefix: str) -> Mixer:
        return DecayingSum(i, self.ops.shard) if isinstance(self.caches[i], PerSlot) else super().attend(i, prefix)


class Stateful(Toy):
    """No layer has pages."""

    def cache_layouts(self) -> tuple[CacheLayout, ...]:
        return (super().cache_layouts()[0],) * self.config.layers


def write_config(folder: pathlib.Path) -> pathlib.Path:
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder
