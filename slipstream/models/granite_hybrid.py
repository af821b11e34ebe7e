"""Granite 4: Mamba-2 mixers or attention, each before an MLP or experts, with multipliers on most of what is added."""

from dataclasses import replace
from typing import Any

from torch import Tensor

from slipstream.errors import ModelError
from slipstream.log.caches import CacheLayout
from slipstream.models.experts import Mixture, read_router, read_top_k
from slipstream.models.llama import DenseConfig, GatedMLP, Llama, Mixer, Sublayer
from slipstream.models.mamba import MambaConfig, mamba_mixer, read_heads, state_layout
from slipstream.models.strict import with_defaults
from slipstream.ops.layers import Experts, Routing
from slipstream.weights.experts import ExpertShape, read_stacked_experts

MAMBA, ATTENTION = "linear_attention", "full_attention"
_OLDER_NAMES = {"mamba": MAMBA, "attention": ATTENTION}
_MULTIPLIERS = ("embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling")
# what a config.json may leave out, and then means
_DEFAULTS = {
    "max_position_embeddings": 2048, "num_local_experts": 8, "shared_intermediate_size": 1024, "mamba_n_heads": 128,
    "mamba_n_groups": 1, "mamba_d_state": 256, "mamba_d_head": "auto", "mamba_d_conv": 4, "mamba_expand": 2,
    "mamba_conv_bias": True, "mamba_proj_bias": False, "position_embedding_type": None, **dict.fromkeys(_MULTIPLIERS, 1.0),
}  # fmt: skip
_WITHOUT_EFFECT = ("mamba_chunk_size", "normalization_function", "init_method")


class GraniteHybrid(Llama):
    """Follows the `granitemoehybrid` code of transformers.

    What a sublayer gives is multiplied by `residual_multiplier` there. Here the residual is smaller by that factor instead, so
    the embedding is as well, and so is, squared, what norms add to the mean square: weights stay as they are stored.
    """

    def read_config(self, config: dict) -> DenseConfig:
        config = with_defaults(config, _DEFAULTS)
        for key in _WITHOUT_EFFECT:
            config.get(key)
        for key in _MULTIPLIERS:
            if not isinstance(config[key], int | float) or config[key] <= 0:
                raise ModelError(f"{key} is {config[key]!r}; it must be a number above 0")
        if config["position_embedding_type"] not in (None, "rope", "nope"):
            raise ModelError(
                f"position_embedding_type {config['position_embedding_type']!r} is not supported; 'rope' and null are"
            )
        self.rotates = config["position_embedding_type"] == "rope"
        self.kinds = layer_kinds(config)
        self.mixers = read_mamba(config)
        self.experts = config["num_local_experts"] or 0
        self.top_k = read_top_k(config, self.experts, 2) if self.experts else config.get("num_experts_per_tok") or 0
        self.shared_inner, self.logits_scaling = config["shared_intermediate_size"], config["logits_scaling"]
        read, part = DenseConfig.read(config), config["residual_multiplier"]
        return replace(
            read,
            eps=read.eps / part**2,
            embedding_scale=config["embedding_multiplier"] / part,
            attention_scale=float(config["attention_multiplier"]),
        )

    def cache_layouts(self) -> tuple[CacheLayout, ...]:
        full = super().cache_layouts()
        return tuple(state_layout(self.ops, self.mixers) if k == MAMBA else full[i] for i, k in enumerate(self.kinds))

    def rotary_tables(self, config: dict) -> tuple[Tensor | None, ...]:
        if self.rotates:
            return super().rotary_tables(config)
        for key in ("rope_theta", "rope_scaling", "rope_parameters"):
            config.get(key)
        return (None,) * self.config.layers

    def norm_weight(self, name: str, size: int) -> Any:
        """Logits are divided by `logits_scaling`, which is done to the last norm."""
        weight = self._read(name, (size,))
        last = name == self.prefix + self.last_norm
        return self.ops.norm_weight(weight.float() / self.logits_scaling if last else weight, self.config.eps)

    def layer(self, i: int, prefix: str) -> list[Sublayer]:
        def norm(name: str) -> Any:
            return self.norm_weight(f"{prefix}{name}_layernorm.weight", self.config.hidden)

        if self.kinds[i] == MAMBA:
            mixer: Mixer = mamba_mixer(self, i, prefix + "mamba.", self.mixers)
        else:
            mixer = self.attend(i, prefix + "self_attn.")
        return [Sublayer(norm("input"), mixer), Sublayer(norm("post_attention"), self.feed_forward(i, prefix))]

    def feed_forward(self, i: int, prefix: str) -> Mixer:
        shared = self.shared_mlp(prefix + "shared_mlp.")
        if not self.experts:
            return shared
        ops, c, name = self.ops, self.config, prefix + "block_sparse_moe."
        routing = Routing(read_router(self, name + "router.layer", self.experts), self.top_k, "softmax_of_chosen")
        shape = ExpertShape(self.experts, c.intermediate, c.hidden, ops.shard.even(c.intermediate))
        gate_up, down = read_stacked_experts(
            self.checkpoint, name + "input_linear.weight", name + "output_linear.weight", shape, ops.dtype
        )
        weights = ops.expert_weight(gate_up), ops.expert_weight(down)
        return Mixture(ops, Experts(routing, *weights, c.gate, shared=(shared.gate_up, shared.down)))

    def shared_mlp(self, prefix: str) -> GatedMLP:
        """The rows of `input_linear` are all gates, then what they multiply."""
        n, (start, stop) = self.shared_inner, self.ops.shard.even(self.shared_inner)
        rows = [("input_linear", 2 * n, (start + at, stop + at)) for at in (0, n)]
        down = self.row_parallel(prefix + "output_linear", n, (start, stop), False)
        return GatedMLP(self.ops, self.joined(prefix, rows, False), down, self.config.gate)


def layer_kinds(config: dict) -> tuple[str, ...]:
    """Whether each layer has a mixer or attention. Raises ModelError for another kind."""
    count = config["num_hidden_layers"]
    named: list[str] = config.get("layer_types") or config.get("layers_block_type") or [MAMBA] * count
    kinds = tuple(_OLDER_NAMES.get(kind, kind) for kind in named)
    if len(kinds) != count:
        raise ModelError(f"layer_types names {len(kinds)} layers, and num_hidden_layers is {count}")
    for i, kind in enumerate(kinds):
        if kind not in (MAMBA, ATTENTION):
            raise ModelError(f"layer_types: {kind!r} of layer {i} is not supported; {MAMBA} and {ATTENTION} are")
    return kinds


def read_mamba(config: dict) -> MambaConfig:
    heads, groups = read_heads(config, "mamba_n_heads", "mamba_n_groups")
    inner, dim = config["mamba_expand"] * config["hidden_size"], config["mamba_d_head"]
    dim = inner // heads if dim == "auto" else dim
    if heads * dim != inner:
        raise ModelError(f"mamba_n_heads {heads} heads of mamba_d_head {dim} are not mamba_expand times hidden_size, {inner}")
    low, high = config.get("time_step_limit") or (0.0, float("inf"))
    return MambaConfig(
        num_heads=heads,
        head_dim=dim,
        groups=groups,
        state_dim=config["mamba_d_state"],
        kernel=config["mamba_d_conv"],
        conv_bias=bool(config["mamba_conv_bias"]),
        bias=bool(config["mamba_proj_bias"]),
        dt_limits=(float(low), float(high)),
        eps=config.get("rms_norm_eps", 1e-6),
    )
