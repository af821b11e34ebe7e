"""Qwen2 and Qwen2.5: Llama with biases on queries, keys and values, and none on the attention's output."""

from dataclasses import replace

from slipstream.models.llama import DenseConfig, Llama


class Qwen2(Llama):
    """arXiv:2407.10671."""

    def read_config(self, config: dict) -> DenseConfig:
        return replace(DenseConfig.read(config), attention_bias=True, output_bias=False)
