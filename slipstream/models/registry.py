"""The classes that build the architectures of Hugging Face configs."""

import sys
from collections.abc import Callable
from typing import Any

from slipstream.errors import ModelError
from slipstream.models.decoder import Decoder
from slipstream.models.deepseek import DeepseekV2, DeepseekV3
from slipstream.models.gemma import Gemma2, Gemma3
from slipstream.models.gpt_oss import GptOss
from slipstream.models.granite_hybrid import GraniteHybrid
from slipstream.models.llama import Llama
from slipstream.models.mistral import Ministral, Mistral
from slipstream.models.mixtral import Mixtral
from slipstream.models.nemotron_h import NemotronH
from slipstream.models.qwen2 import Qwen2
from slipstream.models.qwen3 import Qwen3
from slipstream.models.qwen3_5 import Qwen35
from slipstream.models.qwen3_5_moe import Qwen35Moe
from slipstream.models.qwen3_moe import Qwen3Moe
from slipstream.models.qwen3_next import Qwen3Next
from slipstream.models.strict import ReadConfig, refuse_unread_keys, refuse_unread_tensors
from slipstream.ops.interface import Ops

Build = Callable[[dict, Any, Ops, int | None], Decoder]  # (config, checkpoint, ops, longest request)

ARCHITECTURES: dict[str, Build] = {
    "LlamaForCausalLM": Llama,
    "MistralForCausalLM": Mistral,
    "MinistralForCausalLM": Ministral,
    "Gemma2ForCausalLM": Gemma2,
    "Gemma3ForCausalLM": Gemma3,
    "Gemma3ForConditionalGeneration": Gemma3,
    "DeepseekV2ForCausalLM": DeepseekV2,
    "DeepseekV3ForCausalLM": DeepseekV3,
    "GptOssForCausalLM": GptOss,
    "GraniteMoeHybridForCausalLM": GraniteHybrid,
    "MixtralForCausalLM": Mixtral,
    "NemotronHForCausalLM": NemotronH,
    "Qwen2ForCausalLM": Qwen2,
    "Qwen3ForCausalLM": Qwen3,
    "Qwen3MoeForCausalLM": Qwen3Moe,
    "Qwen3_5ForCausalLM": Qwen35,
    "Qwen3_5ForConditionalGeneration": Qwen35,
    "Qwen3_5MoeForCausalLM": Qwen35Moe,
    "Qwen3_5MoeForConditionalGeneration": Qwen35Moe,
    "Qwen3NextForCausalLM": Qwen3Next,
}


def own_class(config: dict, impl: str = "auto") -> Build | None:
    """The class here that builds a config's architecture, or None where transformers' code runs it (--model-impl).

    Raises ModelError with the known names where `impl` is "slipstream" and there is no class.
    """
    names = config.get("architectures") or []
    own = next((ARCHITECTURES[name] for name in names if name in ARCHITECTURES), None)
    if own is None and impl == "slipstream":
        what = f"architecture {', '.join(names)} is" if names else "config.json names no architecture; it is"
        known = ", ".join(sorted(ARCHITECTURES))
        raise ModelError(f"{what} not supported by --model-impl slipstream (known: {known}); --model-impl auto may run it")
    return None if impl == "transformers" else own


def runs_own_code(config: dict, impl: str = "auto") -> bool:
    """Whether the forward is Slipstream's own code."""
    return own_class(config, impl) is not None


def build(checkpoint: Any, ops: Ops, max_len: int | None = None, impl: str = "auto") -> Decoder:
    """Builds this rank's part of the checkpoint's model. Rank 0 says on standard error whose code runs it.

    Raises ModelError naming the file where a setting is not known, a tensor is missing or of another size, or anything is left
    that the model did not read.
    """
    own = own_class(checkpoint.config, impl)
    try:
        if own is not None:
            model, said = _build_own(own, checkpoint, ops, max_len), "Slipstream's own code"
        else:
            from slipstream.models.foreign.decoder import TransformersDecoder  # transformers' models take a second to import

            model = TransformersDecoder(checkpoint.config, checkpoint, ops, max_len)
            said = model.describe()
    except ModelError as e:
        if str(checkpoint.path) in str(e):
            raise
        raise ModelError(f"{checkpoint.path}: {e}") from None
    if ops.shard.rank == 0:
        name = checkpoint.architecture or checkpoint.config.get("model_type")
        print(f"slipstream: {name} runs by {said}", file=sys.stderr, flush=True)
    return model


def _build_own(own: Build, checkpoint: Any, ops: Ops, max_len: int | None) -> Decoder:
    """Rank 0 reads a part of every tensor, so it looks for tensors that are left."""
    config = ReadConfig(checkpoint.config)
    model = own(config, checkpoint, ops, max_len)
    refuse_unread_keys(config, checkpoint.architecture)
    if ops.shard.rank == 0:
        refuse_unread_tensors(checkpoint.unread(), getattr(model, "unused_weights", ()))
    return model
