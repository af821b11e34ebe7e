"""Our attention in place of transformers' own, through its attention interface.

`Run` is what all modules of one model share. The function that is registered here finds it at the module that calls it, so
several models, and several ranks in threads of one process, do not meet. Masks are made in the probe alone (`probe.py`), where
they say which positions a layer sees.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from slipstream.errors import ModelError
from slipstream.ops.interface import Ops
from slipstream.ops.layers import Attention

SERVE, PROBE = "slipstream", "slipstream_probe"  # names of the attention: without masks, and with masks that say their rule
NOT_CAUSAL, CHUNKED = -1, -2  # of a mask, in the place of its window
_RUN = "slipstream_run"

# Arguments of the interface that change nothing here: training's, or said by the mask (`sliding_window`).
_WITHOUT_EFFECT = (
    "dropout", "sliding_window", "is_causal", "position_ids", "cache_position", "use_cache", "cache", "past_key_values",
    "output_attentions", "output_hidden_states", "output_router_logits", "return_dict", "layer_idx",
)  # fmt: skip


@dataclass(frozen=True, eq=False)
class Call:
    """One call of the attention interface. query [heads, T, head_dim], key and value [key heads, T, head_dim]."""

    module: nn.Module
    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    scale: float
    softcap: float
    sinks: Tensor | None
    causal: bool


@dataclass(eq=False)
class Run:
    """The forward that runs now. `attend` gets each call of attention and returns [T, heads, width of a value]."""

    ops: Ops
    attend: Callable[[Call], Tensor]
    step: Any = None
    probing: bool = True  # sums over the ranks are left out: a device may not have the memory for them yet

    def join(self, model: nn.Module) -> None:
        """Makes this the run of all modules of a model."""
        for module in model.modules():
            module.__dict__[_RUN] = self

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum over the ranks of x [..., width]."""
        rows = x.reshape(-1, x.shape[-1])
        return x if self.probing else self.ops.all_reduce(rows, self.step).view(x.shape)


def register() -> None:
    """Makes both names known to transformers; may be called again."""
    for name in (SERVE, PROBE):
        AttentionInterface.register(name, _attention)
    AttentionMaskInterface.register(PROBE, _mask)


def _attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None = None,
    scaling: float | None = None, **more: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """transformers' attention interface: [1, heads, T, head_dim] each, to [1, T, heads, width of a value]."""
    softcap, sinks = more.pop("softcap", None), more.pop("s_aux", None)
    causal = more.get("is_causal") is not False and getattr(module, "is_causal", True)
    unknown = [name for name, value in more.items() if value is not None and name not in _WITHOUT_EFFECT]
    if unknown:
        raise ModelError(f"{type(module).__name__} gives attention {', '.join(unknown)}, which is not supported")
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    call = Call(module, query[0], key[0], value[0], attention_mask, scale, softcap or 0.0, sinks, causal)
    return getattr(module, _RUN).attend(call)[None], None


def serve(call: Call, spec: Attention, run: Run) -> Tensor:
    """One layer's attention over the pages of the step's rows. Values may be narrower than keys: zeros fill them up."""
    width = call.value.shape[-1]
    value = nn.functional.pad(call.value, (0, spec.head_dim - width)) if width < spec.head_dim else call.value
    qkv = torch.cat([call.query.to(value.dtype), call.key.to(value.dtype), value]).transpose(0, 1)
    out = run.ops.attention(qkv.reshape(qkv.shape[0], -1), spec, run.step)
    return out.view(len(out), -1, spec.head_dim)[..., :width].contiguous()


def _mask(
    batch_size: int, q_length: int, kv_length: int, mask_function: Callable[..., Tensor], local_size: int | None = None,
    **_: Any,
) -> Tensor:  # fmt: skip
    """transformers' mask interface: a mask of the right shape whose every element is `window_of_mask`.

    A model may make masks that none of its layers uses, so what cannot be served is refused where a layer attends.
    """
    return torch.full((batch_size, 1, q_length, kv_length), window_of_mask(mask_function, local_size))


def window_of_mask(mask_function: Callable[..., Tensor], local_size: int | None) -> int:
    """The tokens that a position sees at most, itself included; 0: all up to itself; NOT_CAUSAL or CHUNKED: something else."""
    found = set()
    for position in (2 * (local_size or 0) + 64, 2 * (local_size or 0) + 97):  # a chunked mask differs between the two
        keys = torch.arange(position + 8)
        zero = torch.zeros((), dtype=torch.int64)
        seen = torch.as_tensor(mask_function(zero, zero, torch.tensor(position), keys)).expand(keys.shape)
        first = int(seen.int().argmax())
        if not torch.equal(seen, (keys >= first) & (keys <= position)):
            return NOT_CAUSAL
        found.add(position + 1 - first if first else 0)
    return found.pop() if len(found) == 1 else CHUNKED
