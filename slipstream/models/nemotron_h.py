"""Nemotron-H: each layer is one sublayer, a Mamba-2 mixer, attention without rotation, an MLP without a gate, or experts."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from slipstream.errors import ModelError
from slipstream.log.caches import CacheLayout, Paged
from slipstream.models.experts import Mixture, read_count, read_groups, read_router, read_top_k
from slipstream.models.llama import DenseConfig, Llama, Mixer, Sublayer
from slipstream.models.mamba import MambaConfig, mamba_mixer, read_heads, state_layout
from slipstream.models.strict import with_defaults
from slipstream.ops.interface import ForwardStep, Ops
from slipstream.ops.layers import Experts, Routing
from slipstream.weights.experts import ExpertShape, read_plain_experts

MAMBA, ATTENTION, MLP, MOE = "linear_attention", "full_attention", "mlp", "moe"
_PATTERN = {"M": MAMBA, "*": ATTENTION, "-": MLP, "E": MOE}
_OLDER_NAMES = {"mamba": MAMBA, "attention": ATTENTION}
# how states are stored and computed elsewhere, how weights were made, and experts, which may be named where no layer has some
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
    "moe_intermediate_size": 7688,
    "moe_shared_expert_intermediate_size": 7688,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
    "conv_kernel": 4,
    "use_conv_bias": True,
    "time_step_min": 0.001,
    "layer_norm_epsilon": 1e-5,
}


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
        if kind not in _PATTERN.values():
            known = ", ".join(_PATTERN.values())
            raise ModelError(f"layers_block_type: {kind!r} of layer {i} is not supported; known: {known}")
    return kinds


@dataclass(frozen=True)
class ExpertsConfig:
    """The numbers of the experts, with the values that a config.json without them means."""

    count: int
    top_k: int
    inner: int
    shared_inner: int  # of the expert that every token takes
    groups: int
    top_groups: int
    normed: bool
    scale: float

    @classmethod
    def read(cls, config: dict) -> "ExpertsConfig":
        """Raises ModelError for what no layer computes."""
        count = read_count(config, "n_routed_experts", 8)
        groups, best = read_groups(config, count, 2)
        return cls(
            count=count,
            top_k=read_top_k(config, count // groups * best, 2),
            inner=config["moe_intermediate_size"],
            shared_inner=config["moe_shared_expert_intermediate_size"],
            groups=groups,
            top_groups=best,
            normed=bool(config["norm_topk_prob"]),
            scale=float(config["routed_scaling_factor"]),
        )


class NemotronH(Llama):
    """arXiv:2504.03624, and Nemotron 3 with experts."""

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
        if MOE in self.kinds and config.get("moe_latent_size"):
            raise ModelError(
                f"moe_latent_size is {config['moe_latent_size']}; experts of a width of their own are not supported"
            )
        heads, groups = read_heads(config, "mamba_num_heads", "n_groups")
        self.mixers = MambaConfig(
            num_heads=heads,
            head_dim=config["mamba_head_dim"],
            groups=groups,
            state_dim=config["ssm_state_size"],
            kernel=config["conv_kernel"],
            conv_bias=bool(config["use_conv_bias"]),
            bias=bool(config.get("use_bias")),
            dt_limits=(float(config["time_step_min"]), float("inf")),
            eps=config["layer_norm_epsilon"],
        )
        if MOE in self.kinds:
            self.experts = ExpertsConfig.read(config)
        read = with_defaults(config, {"num_hidden_layers": len(self.kinds), "rms_norm_eps": config["layer_norm_epsilon"]})
        return DenseConfig.read(read)

    def cache_layouts(self) -> tuple[CacheLayout, ...]:
        heads = Paged(self.heads.num_kv_heads, self.config.head_dim)
        layouts = {MAMBA: state_layout(self.ops, self.mixers), ATTENTION: heads}
        return tuple(layouts.get(kind) for kind in self.kinds)

    def rotary_tables(self, config: dict) -> tuple[Tensor | None, ...]:
        return (None,) * self.config.layers

    def layer(self, i: int, prefix: str) -> list[Sublayer]:
        make = {MAMBA: self.mamba, ATTENTION: self.attend, MLP: self.feed_forward, MOE: self.mixture}[self.kinds[i]]
        return [Sublayer(self.norm_weight(prefix + "norm.weight", self.config.hidden), make(i, prefix + "mixer."))]

    def mamba(self, i: int, prefix: str) -> Mixer:
        return mamba_mixer(self, i, prefix, self.mixers)

    def feed_forward(self, i: int, prefix: str) -> Mixer:
        return self.plain_mlp(prefix, self.config.intermediate)

    def plain_mlp(self, prefix: str, inner: int) -> PlainMLP:
        part, bias = self.ops.shard.even(inner), self.config.mlp_bias
        up = self.column_parallel(prefix, {"up_proj": (inner, part)}, bias)
        return PlainMLP(self.ops, up, self.row_parallel(prefix + "down_proj", inner, part, bias))

    def mixture(self, i: int, prefix: str) -> Mixer:
        ops, e = self.ops, self.experts
        choice_bias = self.checkpoint.tensor(prefix + "gate.e_score_correction_bias", (e.count,), dtype=torch.float32)
        routing = Routing(
            read_router(self, prefix + "gate", e.count), e.top_k, "sigmoid", choice_bias=ops.tensor(choice_bias),
            normed=e.normed, scale=e.scale, groups=e.groups, top_groups=e.top_groups,
        )  # fmt: skip
        shape = ExpertShape(e.count, e.inner, self.config.hidden, ops.shard.even(e.inner))
        up, down = read_plain_experts(self.checkpoint, prefix + "experts.", shape, ops.dtype)
        shared = self.plain_mlp(prefix + "shared_experts.", e.shared_inner)
        weights = ops.expert_weight(up), ops.expert_weight(down)
        return Mixture(ops, Experts(routing, *weights, "relu2", shared=(shared.up, shared.down)))
