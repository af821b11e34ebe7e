"""Dense Qwen3: Llama with an RMSNorm on every query and key head."""

from dataclasses import replace
from typing import Any

from slipstream.models.llama import DenseConfig, Llama
from slipstream.models.qwen2 import qwen_windows
from slipstream.models.strict import with_defaults


class Qwen3(Llama):
    """arXiv:2505.09388."""

    def read_config(self, config: dict) -> DenseConfig:
        read = DenseConfig.read(with_defaults(config, {"head_dim": 128}))
        return replace(read, windows=qwen_windows(config))

    def qk_norms(self, prefix: str) -> tuple[Any, Any]:
        d = self.config.head_dim
        return self.norm_weight(prefix + "q_norm.weight", d), self.norm_weight(prefix + "k_norm.weight", d)
