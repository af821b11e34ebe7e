"""Nemotron-H: each layer is one sublayer, a Mamba-2 mixer, attention without rotation, or an MLP without a gate."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from slipstream.errors import ModelError
from slipstream.log.caches import CacheLayout, Paged, PerSlot, StateArray
from slipstream.models.llama import DenseConfig, Llama, Mixer, Sublayer
from slipstream.models.strict import with_defaults
from slipstream.ops.interface import ForwardStep, Ops
from slipstream.ops.layers import Mamba2

MAMBA, ATTENTION, MLP = "linear_attention", "full_attention", "mlp"
_PATTERN = {"M": MAMBA, "*": ATTENTION, "-": MLP, "E": "moe"}
_OLDER_NAMES = {"mamba": MAMBA, "attention": ATTENTION}
# how states are stored and computed elsewhere, how weights were made, and experts, which a layer that has them is refused for
_WITHOUT_EFFECT = (
    "chunk_size", "expand", "mamba_ssm_cache_dtype", "num_logits_to_keep", "rescale_prenorm_residual", "residual_in_fp32",
    "time_step_max", "time_step_floor", "time_step_limit", "use_mamba_kernels", "mamba_proj_bias", "n_routed_experts",
    "num_local_experts", "n_shared_experts", "moe_intermediate_size", "moe_shared_expert_intermediate_size",
    "moe_shared_expert_overlap", "moe_latent_size", "num_experts_per_tok", "routed_scaling_factor", "n_group", "topk_group",
    "norm_topk_prob", "num_nextn_predict_layers", "mtp_layers_block_type", "mtp_hybrid_override_pattern", "rope_theta",
    "rope_parameters", "sliding_window", "partial_rotary_factor",
)  # fmt: skip
# what a config.json may leave out, and then means
_DEFAULTS = {
    "head_dim": 128,
    "max_position_embeddings": 4096,
    "hidden_act": "silu",  # of nothing: no MLP has a gate
    "mlp_hidden_act": "relu2",
    "mamba_hidden_act": "silu",
    "n_groups": 8,
    "conv_kernel": 4,
    "use_conv_bias": True,
    "time_step_min": 0.001,
    "layer_norm_epsilon": 1e-5,
}


@dataclass(frozen=True, eq=False, slots=True)
class MambaMixer:
    """Gates, x, B, C and dt as one product, the mixer, and the output's product."""

    ops: Ops
    inputs: Any
    spec: Mamba2
    out: Any

    def __call__(self, x: Tensor, step: ForwardStep) -> Tensor:
        found = self.ops.mamba2(self.ops.linear(x, self.inputs, step), self.spec, step)
        return self.ops.partial(found, self.out, step)


@dataclass(frozen=True, eq=False, slots=True)
class PlainMLP:
    """down(relu(up(x))^2)."""

    ops: Ops
    up: Any
    down: Any

    def __call__(self, x: Tensor, step: ForwardStep) -> Tensor:
        return self.ops.partial(self.ops.activated(x, self.up, "relu2", step), self.down, step)


def layer_kinds(config: dict) -> tuple[str, ...]:
    """What each layer is: `layers_block_type`, or the pattern string of older files. Raises ModelError for another kind."""
    pattern = config.get("hybrid_override_pattern")
    kinds = config.get("layers_block_type") or config.get("layer_types") or [_PATTERN.get(c, c) for c in pattern or ""]
    count = config.get("num_hidden_layers")
    if not kinds or count not in (None, len(kinds)):
        raise ModelError(f"layers_block_type names {len(kinds)} layers, and num_hidden_layers is {count}")
    kinds = tuple(_OLDER_NAMES.get(kind, kind) for kind in kinds)
    for i, kind in enumerate(kinds):
        if kind not in (MAMBA, ATTENTION, MLP):
            raise ModelError(f"layers_block_type: {kind!r} of layer {i} is not supported; {MAMBA}, {ATTENTION} and {MLP} are")
    return kinds


class NemotronH(Llama):
    """arXiv:2504.03624. A rank has whole groups of Mamba heads, since each group has a norm of its own."""

    last_norm = "norm_f.weight"
    embedding_name = "embeddings.weight"

    def __init__(self, config: dict, checkpoint: Any, ops: Ops, max_len: int | None = None):
        older = checkpoint.has("backbone.embeddings.weight")
        self.prefix = "backbone." if older else "model."
        super().__init__(config, checkpoint, ops, max_len)

    def read_config(self, config: dict) -> DenseConfig:
        config = with_defaults(config, _DEFAULTS)
        for key in _WITHOUT_EFFECT:
            config.get(key)
        for key, value in (("mlp_hidden_act", "relu2"), ("mamba_hidden_act", "silu"), ("attention_bias", False)):
            if config.get(key, value) != value:
                raise ModelError(f"{key} {config[key]!r} is not supported; {value!r} is")
        self.kinds = layer_kinds(config)
        self.groups, self.heads_of_all = config["n_groups"], config["mamba_num_heads"]
        if self.heads_of_all % self.groups:
            raise ModelError(f"mamba_num_heads {self.heads_of_all} is not a multiple of n_groups {self.groups}")
        self.mamba_dim, self.state_dim = config["mamba_head_dim"], config["ssm_state_size"]
        self.kernel, self.conv_bias = config["conv_kernel"], bool(config["use_conv_bias"])
        self.mamba_bias, self.least_dt = bool(config.get("use_bias")), float(config["time_step_min"])
        read = with_defaults(config, {"num_hidden_layers": len(self.kinds), "rms_norm_eps": config["layer_norm_epsilon"]})
        return DenseConfig.read(read)

    def cache_layouts(self) -> tuple[CacheLayout, ...]:
        first, last = self.ops.shard.even(self.groups)
        self.own_groups = first, last
        share = self.heads_of_all // self.groups
        self.own_heads = first * share, last * share
        heads = (last - first) * share
        channels = heads * self.mamba_dim + 2 * (last - first) * self.state_dim
        state = PerSlot(
            (
                StateArray((self.kernel - 1, channels), str(self.ops.dtype).removeprefix("torch.")),
                StateArray((heads, self.mamba_dim, self.state_dim), "float32"),
            )
        )
        layouts = {MAMBA: state, ATTENTION: Paged(self.heads.num_kv_heads, self.config.head_dim), MLP: None}
        return tuple(layouts[kind] for kind in self.kinds)

    def rotary_tables(self, config: dict) -> tuple[Tensor | None, ...]:
        return (None,) * self.config.layers

    def layer(self, i: int, prefix: str) -> list[Sublayer]:
        make = {MAMBA: self.mamba, ATTENTION: self.attend, MLP: self.feed_forward}[self.kinds[i]]
        return [Sublayer(self.norm_weight(prefix + "norm.weight", self.config.hidden), make(i, prefix + "mixer."))]

    def feed_forward(self, i: int, prefix: str) -> Mixer:
        c, part = self.config, self.ops.shard.even(self.config.intermediate)
        up = self.column_parallel(prefix, {"up_proj": (c.intermediate, part)}, c.mlp_bias)
        return PlainMLP(self.ops, up, self.row_parallel(prefix + "down_proj", c.intermediate, part, c.mlp_bias))

    def mamba(self, i: int, prefix: str) -> Mixer:
        """The rows of `in_proj` are gates, x, B, C and dt of all heads, in this order."""
        ops, read = self.ops, self.checkpoint.tensor
        (first, last), (group, end), n = self.own_heads, self.own_groups, self.state_dim
        inner, all_groups = self.heads_of_all * self.mamba_dim, self.groups * n
        own = first * self.mamba_dim, last * self.mamba_dim

        def at(start: int, part: tuple[int, int]) -> tuple[int, int]:
            return start + part[0], start + part[1]

        channels = [own, at(inner, (group * n, end * n)), at(inner + all_groups, (group * n, end * n))]
        width = inner + 2 * all_groups
        rows = [own, *(at(inner, part) for part in channels), at(inner + width, (first, last))]
        total = inner + width + self.heads_of_all
        parts = [self.linear(prefix + "in_proj", (total, self.config.hidden), rows=part) for part in rows]
        biases = [self._read(prefix + "in_proj.bias", (total,), part) for part in rows] if self.mamba_bias else []

        def of_heads(name: str) -> Tensor:
            return read(prefix + name, (self.heads_of_all,), rows=(first, last), dtype=torch.float32)

        def of_channels(name: str, shape: tuple[int, ...]) -> Tensor:
            tensors = [read(prefix + name, (width, *shape), rows=part, dtype=torch.float32) for part in channels]
            joined = torch.cat(tensors)
            return ops.tensor(joined.flatten(1).t().contiguous() if shape else joined)

        norm = read(prefix + "norm.weight", (inner,), rows=own, dtype=ops.dtype)
        spec = Mamba2(
            cache=i,
            num_heads=last - first,
            head_dim=self.mamba_dim,
            groups=end - group,
            state_dim=n,
            conv=of_channels("conv1d.weight", (1, self.kernel)),
            conv_bias=of_channels("conv1d.bias", ()) if self.conv_bias else None,
            rate=ops.tensor(of_heads("A_log").exp()),
            dt_bias=ops.tensor(of_heads("dt_bias")),
            skip=ops.tensor(of_heads("D")),
            dt_limits=(self.least_dt, float("inf")),
            norm=ops.norm_weight(norm, self.config.eps),
        )
        inputs = ops.weight(parts, torch.cat(biases) if biases else None)
        return MambaMixer(ops, inputs, spec, self.row_parallel(prefix + "out_proj", inner, own, self.mamba_bias))
