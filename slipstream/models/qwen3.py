"""Dense Qwen3: Llama with an RMSNorm on every query and key head and no bias on the attention's output."""

from torch import Tensor

from slipstream.models.llama import DenseConfig, Llama


class Qwen3(Llama):
    """arXiv:2505.09388."""

    def read_config(self, config: dict) -> DenseConfig:
        return DenseConfig.read({"head_dim": 128, **config})

    def qk_norms(self, prefix: str) -> tuple[Tensor | None, Tensor | None]:
        return self._vector(prefix + "q_norm.weight"), self._vector(prefix + "k_norm.weight")
