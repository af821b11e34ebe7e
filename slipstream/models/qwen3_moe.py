"""Qwen3-MoE: Qwen3 whose layers have experts in place of one gated MLP."""

from dataclasses import dataclass

from slipstream.errors import ModelError
from slipstream.models.experts import mixture, read_count, read_router, read_top_k
from slipstream.models.llama import DenseConfig, Mixer
from slipstream.models.qwen3 import Qwen3
from slipstream.ops.layers import Routing


@dataclass(frozen=True)
class ExpertsConfig:
    """The numbers of the experts, with the values that a config.json without them means."""

    count: int
    top_k: int
    inner: int
    normed: bool
    layers: frozenset[int]  # those that have experts; the others have one gated MLP

    @classmethod
    def read(cls, config: dict) -> "ExpertsConfig":
        count, every = read_count(config, "num_experts", 128), config.get("decoder_sparse_step", 1)
        if every < 1:
            raise ModelError(f"decoder_sparse_step is {every}; 1 or more layers stand from one layer with experts to the next")
        plain = config.get("mlp_only_layers") or []
        return cls(
            count=count,
            top_k=read_top_k(config, count, 8),
            inner=config.get("moe_intermediate_size", 768),
            normed=bool(config.get("norm_topk_prob", False)),
            layers=frozenset(i for i in range(config["num_hidden_layers"]) if i not in plain and (i + 1) % every == 0),
        )


class Qwen3Moe(Qwen3):
    """arXiv:2505.09388."""

    def read_config(self, config: dict) -> DenseConfig:
        self.experts = ExpertsConfig.read(config)
        return super().read_config(config)

    def feed_forward(self, i: int, prefix: str) -> Mixer:
        e = self.experts
        if i not in e.layers:
            return super().feed_forward(i, prefix)
        routing = Routing(read_router(self, prefix + "gate", e.count), e.top_k, "softmax", normed=e.normed)
        return mixture(self, prefix + "experts.", routing, e.count, e.inner)
