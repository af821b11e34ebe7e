"""The classes that build the architectures of Hugging Face configs."""

from collections.abc import Callable
from typing import Any

from slipstream.errors import ModelError
from slipstream.models.decoder import Decoder
from slipstream.models.gemma import Gemma2, Gemma3
from slipstream.models.llama import Llama
from slipstream.models.mistral import Ministral, Mistral
from slipstream.models.nemotron_h import NemotronH
from slipstream.models.qwen2 import Qwen2
from slipstream.models.qwen3 import Qwen3
from slipstream.models.qwen3_5 import Qwen35
from slipstream.models.strict import ReadConfig, refuse_unread_keys, refuse_unread_tensors
from slipstream.ops.interface import Ops

Build = Callable[[dict, Any, Ops, int | None], Decoder]  # (config, checkpoint, ops, longest request)

ARCHITECTURES: dict[str, Build] = {
    "LlamaForCausalLM": Llama,
    "MistralForCausalLM": Mistral,
    "MinistralForCausalLM": Ministral,
    "Gemma2ForCausalLM": Gemma2,
    "Gemma3ForCausalLM": Gemma3,
    "NemotronHForCausalLM": NemotronH,
    "Qwen2ForCausalLM": Qwen2,
    "Qwen3ForCausalLM": Qwen3,
    "Qwen3_5ForCausalLM": Qwen35,
    "Qwen3_5ForConditionalGeneration": Qwen35,
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
    """Builds this rank's part of the checkpoint's model.

    Raises ModelError naming the file where a setting is not known, a tensor is missing or of another size, or anything is left
    that the model did not read. Rank 0 reads a part of every tensor, so it looks for tensors that are left.
    """
    config = ReadConfig(checkpoint.config)
    try:
        model = architecture(config)(config, checkpoint, ops, max_len)
        refuse_unread_keys(config, checkpoint.architecture)
        if ops.shard.rank == 0:
            refuse_unread_tensors(checkpoint.unread(), getattr(model, "unused_weights", ()))
    except ModelError as e:
        if str(checkpoint.path) in str(e):
            raise
        raise ModelError(f"{checkpoint.path}: {e}") from None
    return model
