"""gpt-oss: sinks in attention, a window on every second layer, and experts with biases and a limited gate."""

from dataclasses import replace

import torch

from slipstream.errors import ModelError
from slipstream.models.experts import Mixture, read_count, read_router, read_top_k
from slipstream.models.llama import DenseConfig, Llama, Mixer
from slipstream.models.strict import with_defaults
from slipstream.models.windows import layer_windows
from slipstream.ops.layers import SWIGLU_ALPHA, SWIGLU_LIMIT, Attention, Experts, Routing
from slipstream.weights.experts import ExpertShape, read_interleaved_biases, read_interleaved_experts

_DEFAULTS = {
    "head_dim": 64,
    "rms_norm_eps": 1e-5,
    "attention_bias": True,
    "sliding_window": 128,
    "rope_theta": 150_000.0,
    "max_position_embeddings": 131_072,
    "swiglu_alpha": SWIGLU_ALPHA,
    "swiglu_limit": SWIGLU_LIMIT,
}


class GptOss(Llama):
    """arXiv:2508.10925."""

    def read_config(self, config: dict) -> DenseConfig:
        config = with_defaults(config, _DEFAULTS)
        for key, known in (("swiglu_alpha", SWIGLU_ALPHA), ("swiglu_limit", SWIGLU_LIMIT)):
            if config[key] != known:
                raise ModelError(f"{key} is {config[key]}; only {known} is supported")
        self.experts = read_count(config, "num_experts", 128)
        self.top_k = read_top_k(config, self.experts, 4)
        _refuse_another(config, "experts_per_token", "num_experts_per_tok", self.top_k)
        rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
        _refuse_another(
            config, "initial_context_length", "original_max_position_embeddings", rope.get("original_max_position_embeddings")
        )
        return replace(DenseConfig.read(config), windows=layer_windows(config, lambda i: i % 2 == 0), gate="swigluoai")

    def attention(self, i: int, prefix: str) -> Attention:
        heads = self.heads
        sinks = self.checkpoint.tensor(
            prefix + "sinks", (self.config.num_q_heads,), rows=(heads.q_start, heads.q_stop), dtype=torch.float32
        )
        return replace(super().attention(i, prefix), sinks=self.ops.tensor(sinks))

    def feed_forward(self, i: int, prefix: str) -> Mixer:
        ops, c, count = self.ops, self.config, self.experts
        shape = ExpertShape(count, c.intermediate, c.hidden, ops.shard.even(c.intermediate))
        gate_up, down = read_interleaved_experts(self.checkpoint, prefix + "experts.", shape, ops.dtype)
        gate_up_bias, down_bias = read_interleaved_biases(self.checkpoint, prefix + "experts.", shape, ops.dtype)
        routing = Routing(
            read_router(self, prefix + "router", count),
            self.top_k,
            "softmax_of_chosen",
            bias=ops.tensor(self.checkpoint.tensor(prefix + "router.bias", (count,), dtype=torch.float32)),
        )
        weights = ops.expert_weight(gate_up, gate_up_bias), ops.expert_weight(down, down_bias if ops.shard.rank == 0 else None)
        return Mixture(ops, Experts(routing, *weights, c.gate))


def _refuse_another(config: dict, key: str, known: str, value: object) -> None:
    """Released files have `key` beside `known`, with the same value."""
    if config.get(key) not in (None, value):
        raise ModelError(f"{key} is {config[key]} and {known} is {value}; they must be the same")
