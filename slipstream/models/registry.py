"""The classes that build the architectures of Hugging Face configs."""

from collections.abc import Callable
from typing import Any

from slipstream.errors import ModelError
from slipstream.models.decoder import Decoder
from slipstream.models.llama import Llama
from slipstream.models.qwen2 import Qwen2
from slipstream.models.qwen3 import Qwen3
from slipstream.ops.interface import Ops

Build = Callable[[dict, Any, Ops, int | None], Decoder]  # (config, checkpoint, ops, longest request)

ARCHITECTURES: dict[str, Build] = {
    "LlamaForCausalLM": Llama,
    "MistralForCausalLM": Llama,
    "Qwen2ForCausalLM": Qwen2,
    "Qwen3ForCausalLM": Qwen3,
}


def architecture(config: dict) -> Build:
    """The class for config["architectures"]; raises ModelError with the known names where there is none."""
    names = config.get("architectures") or []
    for name in names:
        if name in ARCHITECTURES:
            return ARCHITECTURES[name]
    what = f"architecture {', '.join(names)} is" if names else "config.json names no architecture; it is"
    raise ModelError(f"{what} not supported; known: {', '.join(sorted(ARCHITECTURES))}")


def build(checkpoint: Any, ops: Ops, max_len: int | None = None) -> Decoder:
    """Builds this rank's part of the checkpoint's model."""
    return architecture(checkpoint.config)(checkpoint.config, checkpoint, ops, max_len)
