"""Mistral: Llama with a window on all layers, or on none; Ministral has it on some."""

from dataclasses import replace

from slipstream.errors import ModelError
from slipstream.models.llama import DenseConfig, Llama
from slipstream.models.windows import layer_windows


class Mistral(Llama):
    """arXiv:2310.06825."""

    def read_config(self, config: dict) -> DenseConfig:
        window = config.get("sliding_window")
        windows = layer_windows(config, lambda i: bool(window))
        if any(size != (window or 0) for size in windows):
            raise ModelError("layer_types: the layers of MistralForCausalLM are all alike; Ministral's may differ")
        return replace(DenseConfig.read(config), windows=windows)


class Ministral(Llama):
    """Mistral with windows on the layers that `layer_types` names."""

    def read_config(self, config: dict) -> DenseConfig:
        window = config.get("sliding_window")
        return replace(DenseConfig.read(config), windows=layer_windows(config, lambda i: bool(window)))
