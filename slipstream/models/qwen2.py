"""Qwen2 and Qwen2.5: Llama with biases on queries, keys and values, and windows on some layers."""

from dataclasses import replace

from slipstream.errors import ModelError
from slipstream.models.llama import DenseConfig, Llama
from slipstream.models.windows import layer_windows


class Qwen2(Llama):
    """arXiv:2407.10671."""

    def read_config(self, config: dict) -> DenseConfig:
        windows = qwen_windows(config)
        return replace(DenseConfig.read(config), windows=windows, attention_bias=True, output_bias=False)


def qwen_windows(config: dict) -> tuple[int, ...]:
    """`use_sliding_window` switches windows on, for the layers from `max_window_layers` on."""
    first, used = config.get("max_window_layers", 28), bool(config.get("use_sliding_window"))
    windows = layer_windows(config, lambda i: used and i >= first)
    if any(windows) and not used:
        raise ModelError("layer_types names windows, and use_sliding_window is not true")
    return windows
