"""Qwen3.5, text: of four layers, three have a gated delta net and one has attention with a gate on its output."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from slipstream.errors import ModelError
from slipstream.log.caches import CacheLayout, PerSlot, StateArray
from slipstream.models.composite import text_of
from slipstream.models.llama import DenseConfig, Llama, Mixer, SelfAttention, Sublayer
from slipstream.models.rotary import rotary_table
from slipstream.models.strict import with_defaults
from slipstream.ops.interface import ForwardStep, Ops
from slipstream.ops.layers import GatedDelta
from slipstream.weights.parts import Part

LINEAR, FULL = "linear_attention", "full_attention"
_ROTATED = 0.25  # of a head, where a config does not say


@dataclass(frozen=True)
class DeltaConfig:
    """The numbers of the gated delta nets, with the values that a config.json without them means."""

    layers: tuple[bool, ...]  # whether layer i has one
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    kernel: int

    @classmethod
    def read(cls, config: dict) -> "DeltaConfig":
        count, every = config["num_hidden_layers"], config.get("full_attention_interval") or 4
        types = config.get("layer_types") or [FULL if (i + 1) % every == 0 else LINEAR for i in range(count)]
        if len(types) != count:
            raise ModelError(f"layer_types names {len(types)} layers, and num_hidden_layers is {count}")
        for i, kind in enumerate(types):
            if kind not in (LINEAR, FULL):
                raise ModelError(f"layer_types: {kind!r} of layer {i} is not supported; {LINEAR} and {FULL} are")
        keys, values = config.get("linear_num_key_heads") or 16, config.get("linear_num_value_heads") or 32
        if values % keys:
            raise ModelError(f"linear_num_value_heads {values} is not a multiple of linear_num_key_heads {keys}")
        return cls(
            layers=tuple(kind == LINEAR for kind in types),
            key_heads=keys,
            value_heads=values,
            key_dim=config.get("linear_key_head_dim") or 128,
            value_dim=config.get("linear_value_head_dim") or 128,
            kernel=config.get("linear_conv_kernel_dim") or 4,
        )


@dataclass(frozen=True, eq=False, slots=True)
class DeltaNet:
    """Queries, keys, values, gates, b and a as one product, the gated delta net, and the output's product."""

    ops: Ops
    inputs: Any
    spec: GatedDelta
    out: Any

    def __call__(self, x: Tensor, step: ForwardStep) -> Tensor:
        mixed = self.ops.linear(x, self.inputs, step)
        if self.spec.heads.num_q_heads:  # a rank may have none
            mixed = self.ops.gated_delta(mixed, self.spec, step)
        return self.ops.partial(mixed, self.out, step)


class Qwen35(Llama):
    """Follows the `qwen3_5` code of transformers; the gated delta net is arXiv:2412.06464."""

    def __init__(self, config: dict, checkpoint: Any, ops: Ops, max_len: int | None = None):
        config, composite = text_of(config)
        if composite:
            self.prefix = "model.language_model."
        super().__init__(config, checkpoint, ops, max_len)

    def read_config(self, config: dict) -> DenseConfig:
        self.delta = d = DeltaConfig.read(config)
        self.delta_heads = self.ops.shard.heads(d.value_heads, d.key_heads)
        return DenseConfig.read(with_defaults(config, {"head_dim": 256}))

    def cache_layouts(self) -> tuple[CacheLayout, ...]:
        d, heads = self.delta, self.delta_heads
        channels = 2 * heads.num_kv_heads * d.key_dim + heads.num_q_heads * d.value_dim
        state = PerSlot(
            (
                StateArray((d.kernel - 1, channels), str(self.ops.dtype).removeprefix("torch.")),
                StateArray((heads.num_q_heads, d.key_dim, d.value_dim), "float32"),
            )
        )
        return tuple(state if has else full for has, full in zip(d.layers, super().cache_layouts(), strict=True))

    def rotary_tables(self, config: dict) -> tuple[Tensor | None, ...]:
        config = with_defaults(config, {"partial_rotary_factor": _ROTATED})
        return (self.ops.tensor(rotary_table(config, self.config.head_dim, self.max_len)),) * self.config.layers

    def norm_weight(self, name: str, size: int) -> Any:
        """Norms are stored as 1 less."""
        return self.ops.norm_weight(1 + self.checkpoint.tensor(name, (size,)).float(), self.config.eps)

    def qk_norms(self, prefix: str) -> tuple[Any, Any]:
        d = self.config.head_dim
        return self.norm_weight(prefix + "q_norm.weight", d), self.norm_weight(prefix + "k_norm.weight", d)

    def layer(self, i: int, prefix: str) -> list[Sublayer]:
        if not self.delta.layers[i]:
            return super().layer(i, prefix)
        hidden = self.config.hidden
        return [
            Sublayer(self.norm_weight(prefix + "input_layernorm.weight", hidden), self.delta_net(i, prefix + "linear_attn.")),
            Sublayer(
                self.norm_weight(prefix + "post_attention_layernorm.weight", hidden), self.feed_forward(i, prefix + "mlp.")
            ),
        ]

    def attend(self, i: int, prefix: str) -> Mixer:
        """The rows of `q_proj` are a head's queries, then its gates, head by head."""
        c, heads, d = self.config, self.heads, self.config.head_dim
        kv, width = (heads.kv_start * d, heads.kv_stop * d), 2 * c.num_q_heads * d
        own = range(heads.q_start, heads.q_stop)
        queries = [("q_proj", width, (2 * h * d, (2 * h + 1) * d)) for h in own]
        gates = [("q_proj", width, ((2 * h + 1) * d, (2 * h + 2) * d)) for h in own]
        keys = [(name, c.num_kv_heads * d, kv) for name in ("k_proj", "v_proj")]
        return SelfAttention(
            self.ops,
            self.joined(prefix, [*queries, *keys, *gates], c.attention_bias),
            self.attention(i, prefix),
            self.row_parallel(prefix + "o_proj", c.num_q_heads * d, (heads.q_start * d, heads.q_stop * d), c.output_bias),
            gated=True,
        )

    def delta_net(self, i: int, prefix: str) -> Mixer:
        d, heads, read = self.delta, self.delta_heads, self.checkpoint.tensor
        width = 2 * d.key_heads * d.key_dim + d.value_heads * d.value_dim
        value = (heads.q_start * d.value_dim, heads.q_stop * d.value_dim)
        own, channels = (heads.q_start, heads.q_stop), self._channels()

        def of_heads(name: str) -> Tensor:
            return read(prefix + name, (d.value_heads,), rows=own, dtype=torch.float32)

        shape = (width, 1, d.kernel)
        conv = [read(prefix + "conv1d.weight", shape, rows=part, dtype=torch.float32)[:, 0] for part in channels]
        spec = GatedDelta(
            cache=i,
            heads=heads,
            key_dim=d.key_dim,
            value_dim=d.value_dim,
            conv=self.ops.tensor(torch.cat(conv).t().contiguous()),
            rate=self.ops.tensor(of_heads("A_log").exp()),
            dt_bias=self.ops.tensor(of_heads("dt_bias")),
            norm=super().norm_weight(prefix + "norm.weight", d.value_dim),
        )
        out = self.row_parallel(prefix + "out_proj", d.value_heads * d.value_dim, value, False)
        return DeltaNet(self.ops, self.joined(prefix, self.delta_rows(), False), spec, out)

    def delta_rows(self) -> list[tuple[str, int, Part]]:
        """Where the input of the gated delta net is among the rows of layers that the file has (see `joined`)."""
        d, heads = self.delta, self.delta_heads
        width, values = 2 * d.key_heads * d.key_dim + d.value_heads * d.value_dim, d.value_heads * d.value_dim
        rows = [("in_proj_qkv", width, part) for part in self._channels()]
        rows += [("in_proj_z", values, (heads.q_start * d.value_dim, heads.q_stop * d.value_dim))]
        return rows + [(name, d.value_heads, (heads.q_start, heads.q_stop)) for name in ("in_proj_b", "in_proj_a")]

    def _channels(self) -> list[Part]:
        """This rank's queries, keys and values among those of all heads, which follow one another."""
        d, heads = self.delta, self.delta_heads
        key, keys = d.key_dim, d.key_heads * d.key_dim
        queries = (heads.kv_start * key, heads.kv_stop * key)
        values = (2 * keys + heads.q_start * d.value_dim, 2 * keys + heads.q_stop * d.value_dim)
        return [queries, (keys + queries[0], keys + queries[1]), values]
