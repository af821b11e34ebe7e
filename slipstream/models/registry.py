"""The classes that build the architectures of Hugging Face configs."""

import sys
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
    """Builds this rank's part of the checkpoint's model. Rank 0 says on standard error whose code runs it."""
    config = checkpoint.config
    own = own_class(config, impl)
    name = (config.get("architectures") or [config.get("model_type")])[0]
    if own is not None:
        model = own(config, checkpoint, ops, max_len)
        said = "Slipstream's own code"
    else:
        from slipstream.models.foreign.decoder import TransformersDecoder  # transformers' models take a second to import

        model = TransformersDecoder(config, checkpoint, ops, max_len)
        said = model.describe()
    if ops.shard.rank == 0:
        print(f"slipstream: {name} runs by {said}", file=sys.stderr, flush=True)
    return model
