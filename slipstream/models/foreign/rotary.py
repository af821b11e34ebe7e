"""Rotations that transformers changes while a model runs.

Two kinds of scaling look at the longest position of a forward: `longrope` turns all positions by other frequencies once a
request is longer than the original length, `dynamic` recomputes them as a request grows. A step has rows of many requests, and
keys stay in the cache, so neither can follow the longest one. Up to the length at which they would change, both are fixed.
"""

from typing import Any

from slipstream.errors import ModelError


def settle_rotary(lm: Any, max_len: int | None) -> int:
    """Switches the changes off and returns the most tokens of a request for which that is right, at most the model's own.

    Raises ModelError where `max_len` is more than these allow.
    """
    config = lm.config.get_text_config()
    lengths = [n for n in (getattr(config, "max_position_embeddings", None), max_len) if n]
    if not lengths:
        raise ModelError("its config names no max_position_embeddings; give --max-model-len")
    most = min(lengths)
    for module in lm.modules():
        kinds = getattr(module, "rope_type", None)
        for layer, kind in kinds.items() if isinstance(kinds, dict) else [(None, kinds)]:
            if kind and (kind == "longrope" or "dynamic" in kind):
                most = _bound(config, layer, kind, most, max_len)
        if kinds is not None:
            module.rope_type = dict.fromkeys(kinds, "default") if isinstance(kinds, dict) else "default"
    return most


def _bound(config: Any, layer: str | None, kind: str, most: int, asked: int | None) -> int:
    rope = config.rope_parameters if layer is None else config.rope_parameters[layer]
    fixed = rope.get("original_max_position_embeddings") or config.max_position_embeddings
    if asked and most > fixed:
        raise ModelError(
            f"rope_type {kind!r} turns all positions differently in requests of more than {fixed} tokens, which cannot follow "
            f"each request of a batch; --max-model-len {fixed} runs"
        )
    return min(most, fixed)
