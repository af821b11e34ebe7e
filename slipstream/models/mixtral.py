"""Mixtral: Mistral with experts in every layer."""

from slipstream.models.experts import mixture, read_count, read_router, read_top_k
from slipstream.models.llama import DenseConfig, Mixer
from slipstream.models.mistral import Mistral
from slipstream.models.strict import with_defaults
from slipstream.ops.layers import Routing


class Mixtral(Mistral):
    """arXiv:2401.04088."""

    def read_config(self, config: dict) -> DenseConfig:
        self.experts = read_count(config, "num_experts", 8)
        self.top_k = read_top_k(config, self.experts, 2)
        return super().read_config(with_defaults(config, {"rms_norm_eps": 1e-5}))

    def feed_forward(self, i: int, prefix: str) -> Mixer:
        prefix = prefix.removesuffix("mlp.") + "block_sparse_moe."
        routing = Routing(read_router(self, prefix + "gate", self.experts), self.top_k, "softmax", normed=True)
        return mixture(self, prefix + "experts.", routing, self.experts, self.config.intermediate, ("w1", "w3", "w2"))
