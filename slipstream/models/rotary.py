"""Rotary position tables from a Hugging Face config: default, linear and llama3 scaling; others are refused by name.

Follows RoFormer (arXiv:2104.09864) and the `rope_parameters` of transformers; Llama 3's bands are its config's.
"""

import math

import torch
from torch import Tensor

from slipstream.errors import ModelError

KNOWN = ("default", "linear", "llama3")


def rope_parameters(config: dict) -> dict:
    """`rope_parameters` (transformers 5), or `rope_theta` and `rope_scaling` of older files, as one dict with `rope_type`."""
    rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    rope.setdefault("rope_type", rope.pop("type", "default"))
    rope.setdefault("rope_theta", config.get("rope_theta") or 10000.0)
    return rope


def rotary_table(config: dict, head_dim: int, length: int) -> Tensor:
    """float32 [length, width]: cos(position * frequency) in the first half, sin in the second.

    The width is that part of `head_dim` that is rotated: all of it, or `partial_rotary_factor` times as much. Raises ModelError
    for a scaling kind that is not known.
    """
    rope = rope_parameters(config)
    kind = rope["rope_type"]
    if kind not in KNOWN:
        raise ModelError(f"rope_type {kind!r} is not supported; known: {', '.join(KNOWN)}")
    width = int(head_dim * (rope.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0))
    exponents = torch.arange(0, width, 2, dtype=torch.float32) / width
    frequencies = 1.0 / (float(rope["rope_theta"]) ** exponents)
    if kind == "linear":
        frequencies = frequencies / float(rope["factor"])
    elif kind == "llama3":
        frequencies = _llama3(frequencies, rope)
    angles = torch.outer(torch.arange(length, dtype=torch.float32), frequencies)
    return torch.cat([angles.cos(), angles.sin()], dim=1)


def _llama3(frequencies: Tensor, rope: dict) -> Tensor:
    """Long wavelengths are divided by `factor`, short ones kept, those between interpolated."""
    factor, low, high = float(rope["factor"]), float(rope["low_freq_factor"]), float(rope["high_freq_factor"])
    original = float(rope["original_max_position_embeddings"])
    turns = original * frequencies / (2 * math.pi)  # full turns within the original context
    smooth = ((turns - low) / (high - low)).clamp(0, 1)
    return frequencies * (smooth + (1 - smooth) / factor)
