"""Dense Qwen3: Llama with an RMSNorm on every query and key head."""

from typing import Any

from slipstream.models.llama import DenseConfig, Llama


class Qwen3(Llama):
    """arXiv:2505.09388."""

    def read_config(self, config: dict) -> DenseConfig:
        return DenseConfig.read({"head_dim": 128, **config})

    def qk_norms(self, prefix: str) -> tuple[Any, Any]:
        d = self.config.head_dim
        return self.norm_weight(prefix + "q_norm.weight", d), self.norm_weight(prefix + "k_norm.weight", d)
