"""DeepSeek-V3 and DeepSeek-V2: latent attention, and experts, one of them for every token, behind some dense layers."""

from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from slipstream.errors import ModelError
from slipstream.log.caches import CacheLayout, Latent
from slipstream.models.experts import mixture, read_count, read_groups, read_router, read_top_k
from slipstream.models.llama import DenseConfig, Llama, Mixer
from slipstream.models.rotary import rope_parameters, rotary_table, yarn_magnitude
from slipstream.models.strict import with_defaults
from slipstream.ops.interface import ForwardStep, Ops
from slipstream.ops.layers import LatentAttention, Routing
from slipstream.weights.packed import dense
from slipstream.weights.parts import Part

_LATENT_EPS = 1e-6  # of the norms between the two products of queries, and of keys and values, whatever rms_norm_eps says


@dataclass(frozen=True, eq=False, slots=True)
class LatentMixer:
    """Queries from one product, or from two with a norm between; keys and values from one vector a token."""

    ops: Ops
    q_down: Any  # None: queries are one product
    q_norm: Any
    q: Any
    kv: Any
    spec: LatentAttention
    out: Any

    def __call__(self, x: Tensor, step: ForwardStep) -> Tensor:
        ops = self.ops
        narrow = x if self.q_down is None else ops.norm(ops.linear(x, self.q_down, step), self.q_norm, step)
        q, kv = ops.linear(narrow, self.q, step), ops.linear(x, self.kv, step)
        return ops.partial(ops.latent_attention(q, kv, self.spec, step), self.out, step)


@dataclass(frozen=True)
class DeepseekConfig:
    """What a config has beside the numbers of a dense decoder."""

    q_rank: int  # 0: queries are one product
    latent_dim: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    interleaved: bool  # pairs of rotated values stand side by side
    first_dense: int  # layers with one MLP, before those with experts
    experts: int
    shared: int  # experts of `expert_inner` columns that are one that every token takes
    expert_inner: int
    top_k: int
    groups: int
    top_groups: int
    group_best: int
    score: Literal["softmax", "sigmoid"]
    choice_bias: bool
    normed: bool
    scale: float

    @property
    def query_dim(self) -> int:
        return self.nope_dim + self.rope_dim


class DeepseekV3(Llama):
    """arXiv:2412.19437. Experts score by a sigmoid, and a bias that balances their load takes part in the choice alone."""

    defaults = {
        "first_k_dense_replace": 3, "q_lora_rank": 1536, "n_group": 8, "topk_group": 4, "routed_scaling_factor": 2.5,
        "n_shared_experts": 1, "moe_intermediate_size": 2048, "norm_topk_prob": True, "num_experts_per_tok": 8,
        "rope_interleave": True, "scoring_func": "sigmoid", "topk_method": "noaux_tc", "max_position_embeddings": 4096,
    }  # fmt: skip
    experts = 256  # where a config does not say
    unused_weights: tuple[str, ...] = ()

    def read_config(self, config: dict) -> DenseConfig:
        config = with_defaults(
            config, {"moe_layer_freq": 1, "kv_lora_rank": 512, "qk_rope_head_dim": 64, **_HEADS, **self.defaults}
        )
        heads = config["num_attention_heads"]
        if (keys := config.get("num_key_value_heads") or heads) != heads:
            raise ModelError(f"num_key_value_heads is {keys}; with latent attention it is num_attention_heads, {heads}")
        rope, query = config["qk_rope_head_dim"], config["qk_nope_head_dim"] + config["qk_rope_head_dim"]
        for key, size in (("head_dim", rope), ("qk_head_dim", query)):
            if config.get(key, size) not in (size, None):
                raise ModelError(f"{key} is {config[key]}; the sizes of queries' parts make it {size}")
        read = DenseConfig.read(config)
        self.more = self.read_more(config)
        # layers behind the last are heads that draft tokens
        self.unused_weights = tuple(f"layers.{read.layers + i}." for i in range(config.get("num_nextn_predict_layers") or 0))
        return replace(read, attention_scale=_scale(config, self.more))

    def read_more(self, config: dict) -> DeepseekConfig:
        """Raises ModelError for a way of routing that this family does not have."""
        experts, method, score = (
            read_count(config, "n_routed_experts", self.experts),
            config["topk_method"],
            config["scoring_func"],
        )
        if score != self.defaults["scoring_func"]:
            raise ModelError(f"scoring_func {score!r} is not supported; {self.defaults['scoring_func']!r} is")
        if method not in _METHODS[score]:
            raise ModelError(f"topk_method {method!r} is not supported; known: {', '.join(_METHODS[score])}")
        if config["moe_layer_freq"] != 1:
            raise ModelError(f"moe_layer_freq is {config['moe_layer_freq']}; only 1, experts in every layer, is supported")
        if score == "softmax" and config["norm_topk_prob"]:
            raise ModelError("norm_topk_prob is true; the weights of DeepSeek-V2's experts are not normed, so it must be false")
        groups, best = read_groups(config, experts, group_best := 2 if method == "noaux_tc" else 1)
        if method == "greedy":
            groups = best = 1
        return DeepseekConfig(
            q_rank=config["q_lora_rank"] or 0,
            latent_dim=config["kv_lora_rank"],
            nope_dim=config["qk_nope_head_dim"],
            rope_dim=config["qk_rope_head_dim"],
            value_dim=config["v_head_dim"],
            interleaved=config["rope_interleave"],
            first_dense=config["first_k_dense_replace"],
            experts=experts,
            shared=config["n_shared_experts"] or 0,
            expert_inner=config["moe_intermediate_size"],
            top_k=read_top_k(config, experts // groups * best, 8),
            groups=groups,
            top_groups=best,
            group_best=group_best,
            score=score,
            choice_bias=method == "noaux_tc",
            normed=bool(config["norm_topk_prob"]),
            scale=float(config["routed_scaling_factor"]),
        )

    def cache_layouts(self) -> tuple[CacheLayout, ...]:
        return (Latent(self.more.latent_dim + self.more.rope_dim),) * self.config.layers

    def rotary_tables(self, config: dict) -> tuple[Tensor | None, ...]:
        return (self.ops.tensor(rotary_table(config, self.more.rope_dim, self.max_len)),) * self.config.layers

    def attend(self, i: int, prefix: str) -> Mixer:
        ops, c, m, heads = self.ops, self.config, self.more, self.heads
        own = (heads.q_start, heads.q_stop)
        q_down = q_norm = None
        source, narrow = "q_proj", c.hidden
        if m.q_rank:
            q_down = self.whole(prefix + "q_a_proj", m.q_rank, None)
            q_norm = ops.norm_weight(self._read(prefix + "q_a_layernorm.weight", (m.q_rank,)), _LATENT_EPS)
            source, narrow = "q_b_proj", m.q_rank
        rows = _scaled(own, m.query_dim)
        q = self._read(f"{prefix}{source}.weight", (c.num_q_heads * m.query_dim, narrow), rows)
        order = self.halves(m.nope_dim)
        q = q.view(heads.num_q_heads, m.query_dim, narrow)[:, order].reshape(len(q), narrow)
        return LatentMixer(
            ops, q_down, q_norm, ops.weight([dense(q)]),
            self.whole(prefix + "kv_a_proj_with_mqa", m.latent_dim + m.rope_dim, self.halves(m.latent_dim)),
            self.latent_attention(i, prefix, own),
            self.row_parallel(prefix + "o_proj", c.num_q_heads * m.value_dim, _scaled(own, m.value_dim), c.output_bias),
        )  # fmt: skip

    def latent_attention(self, i: int, prefix: str, own: Part) -> LatentAttention:
        c, m, ops, heads = self.config, self.more, self.ops, self.heads.num_q_heads
        key_up, value_up = self.heads_up(prefix, own)
        norm = ops.norm_weight(self._read(prefix + "kv_a_layernorm.weight", (m.latent_dim,)), _LATENT_EPS)
        rotary = self.rotary[i]
        assert rotary is not None, "every layer has positions"
        return LatentAttention(
            i, 0, heads, m.latent_dim, m.nope_dim, m.rope_dim, m.value_dim, c.attention_scale, rotary, norm,
            ops.tensor(key_up.contiguous()), ops.tensor(value_up.contiguous()),
        )  # fmt: skip

    def heads_up(self, prefix: str, own: Part) -> tuple[Tensor, Tensor]:
        """What makes keys and values of the latent vector: [heads, nope_dim, latent_dim] and [heads, value_dim, latent_dim]."""
        m, count, read = self.more, self.config.num_q_heads, self._read
        if prefix + "k_b_proj.weight" in self.checkpoint.names():  # of a GGUF file, keys the other way round
            keys = read(prefix + "k_b_proj.weight", (count, m.latent_dim, m.nope_dim), own).transpose(1, 2)
            return keys, read(prefix + "v_b_proj.weight", (count, m.value_dim, m.latent_dim), own)
        size = m.nope_dim + m.value_dim
        up = read(prefix + "kv_b_proj.weight", (count * size, m.latent_dim), _scaled(own, size))
        keys, values = up.view(-1, size, m.latent_dim).split([m.nope_dim, m.value_dim], 1)
        return keys, values

    def whole(self, name: str, out: int, order: Tensor | None) -> Any:
        """A layer that every rank holds whole. order: of its outputs, where it is not the file's."""
        weight = self._read(name + ".weight", (out, self.config.hidden))
        bias = self._read(name + ".bias", (out,)) if self.config.attention_bias else None
        if order is not None:
            weight, bias = weight[order], None if bias is None else bias[order]
        return self.ops.weight([dense(weight)], bias)

    def halves(self, first: int) -> Tensor:
        """The order of `first` outputs and then rotated ones in which the two of a pair stand half of the width apart."""
        rotated = torch.arange(self.more.rope_dim)
        if self.more.interleaved:
            rotated = rotated.view(-1, 2).T.reshape(-1)
        return torch.cat([torch.arange(first), first + rotated])

    def feed_forward(self, i: int, prefix: str) -> Mixer:
        m = self.more
        if i < m.first_dense:
            return super().feed_forward(i, prefix)
        router = read_router(self, prefix + "gate", m.experts)
        choice_bias = self.ops.tensor(self._float32(prefix + "gate.e_score_correction_bias")) if m.choice_bias else None
        routing = Routing(
            router, m.top_k, m.score, choice_bias=choice_bias, normed=m.normed, scale=m.scale, groups=m.groups,
            top_groups=m.top_groups, group_best=m.group_best,
        )  # fmt: skip
        shared = self.gated_mlp(prefix + "shared_experts.", m.shared * m.expert_inner) if m.shared else None
        return mixture(
            self, prefix + "experts.", routing, m.experts, m.expert_inner, shared=shared and (shared.gate_up, shared.down)
        )

    def _float32(self, name: str) -> Tensor:
        return self.checkpoint.tensor(name, (self.more.experts,), dtype=torch.float32)


class DeepseekV2(DeepseekV3):
    """arXiv:2405.04434. Experts score by a softmax; a group of them is as good as its best one."""

    defaults = {
        "first_k_dense_replace": 0, "q_lora_rank": 1536, "n_group": None, "topk_group": None, "routed_scaling_factor": 1.0,
        "n_shared_experts": 2, "moe_intermediate_size": 1407, "norm_topk_prob": False, "rope_interleave": True,
        "scoring_func": "softmax", "topk_method": "greedy", "max_position_embeddings": 2048,
    }  # fmt: skip
    experts = 64


_HEADS = {"qk_nope_head_dim": 128, "v_head_dim": 128}
_METHODS = {"sigmoid": ("noaux_tc",), "softmax": ("greedy", "group_limited_greedy")}


def _scaled(heads: Part, size: int) -> Part:
    return heads[0] * size, heads[1] * size


def _scale(config: dict, more: DeepseekConfig) -> float:
    """YaRN's magnitude multiplies whole scores here, also their part that is not rotated."""
    rope = rope_parameters(config)
    of_all = rope.get("mscale_all_dim")
    scale = more.query_dim**-0.5
    if rope["rope_type"] != "default" and of_all:
        scale *= yarn_magnitude(float(rope["factor"]), of_all) ** 2
    return scale
