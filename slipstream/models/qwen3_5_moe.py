"""Qwen3.5-MoE, text: Qwen3.5 with experts in every layer, beside one that every token takes, with a gate of its own."""

from slipstream.errors import ModelError
from slipstream.models.experts import mixture, read_router
from slipstream.models.llama import DenseConfig, Mixer
from slipstream.models.qwen3_5 import Qwen35
from slipstream.models.qwen3_moe import ExpertsConfig
from slipstream.models.strict import with_defaults
from slipstream.ops.layers import Routing


class Qwen35Moe(Qwen35):
    """Follows the `qwen3_5_moe` code of transformers."""

    defaults = {
        "num_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512,
        "norm_topk_prob": True, "intermediate_size": 0,
    }  # fmt: skip

    def read_config(self, config: dict) -> DenseConfig:
        config = with_defaults(config, self.defaults)
        if not config["norm_topk_prob"]:
            raise ModelError("norm_topk_prob is false; the weights of this family's experts are normed, so it must be true")
        self.experts = ExpertsConfig.read(config)
        self.shared_inner = config["shared_expert_intermediate_size"]
        return super().read_config(config)

    def feed_forward(self, i: int, prefix: str) -> Mixer:
        e = self.experts
        if i not in e.layers:
            return super().feed_forward(i, prefix)
        routing = Routing(read_router(self, prefix + "gate", e.count), e.top_k, "softmax", normed=e.normed)
        shared = self.gated_mlp(prefix + "shared_expert.", self.shared_inner)
        gate = self.ops.weight([self.linear(prefix + "shared_expert_gate", (1, self.config.hidden))])
        return mixture(
            self, prefix + "experts.", routing, e.count, e.inner, shared=(shared.gate_up, shared.down), shared_gate=gate
        )
