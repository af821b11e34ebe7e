"""Rotary position tables from a Hugging Face config: every kind that `KINDS` names; others are refused by name.

Follows RoFormer (arXiv:2104.09864) and the `rope_parameters` of transformers. Scaling by YaRN is arXiv:2309.00071, LongRoPE is
arXiv:2402.13753, and Llama 3's bands are its config's. A text has one position a token, so the sections of multimodal tables
(`mrope_section`) all turn by it, and the table is the plain one.
"""

import math

import torch
from torch import Tensor

from slipstream.errors import ModelError

_ORIGINAL = "original_max_position_embeddings"
# by kind: the keys that it needs, and those that it may have
KINDS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "default": ((), ()),
    "linear": (("factor",), ()),
    "dynamic": (("factor",), ()),
    "llama3": (("factor", "low_freq_factor", "high_freq_factor"), ()),
    "yarn": ((), ("factor", "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate")),
    "longrope": (("short_factor", "long_factor"), ("factor", "attention_factor")),
    "proportional": ((), ("factor",)),
}
_OLDER_NAMES = {"mrope": "default", "su": "longrope"}
# known with every kind; the sections change nothing for text, and `_ORIGINAL` nothing where a kind does not read it
_ANY = ("rope_type", "type", "rope_theta", "partial_rotary_factor", _ORIGINAL, "mrope_section", "mrope_interleaved")


def rope_parameters(config: dict, layer_type: str | None = None) -> dict:
    """`rope_parameters` (transformers 5), or `rope_theta` and `rope_scaling` of older files, as one dict with `rope_type`.

    layer_type: whose parameters, where the config has some for each of `layer_types`. Raises ModelError for a kind or a key
    that is not known, and for a key that is missing.
    """
    newer, older, theta = (config.get(key) for key in ("rope_parameters", "rope_scaling", "rope_theta"))
    part, original = config.get("partial_rotary_factor"), config.get(_ORIGINAL)
    rope = dict(newer or older or {})
    if layer_type is not None and layer_type in rope:
        rope = dict(rope[layer_type] or {})
    rope["rope_type"] = rope.get("rope_type") or rope.pop("type", None) or "default"
    rope["rope_type"] = kind = _OLDER_NAMES.get(rope["rope_type"], rope["rope_type"])
    rope["rope_theta"] = rope.get("rope_theta") or theta or 10000.0
    rope["partial_rotary_factor"] = rope.get("partial_rotary_factor") or part or 1.0
    if kind not in KINDS:
        raise ModelError(f"rope_type {kind!r} is not supported; known: {', '.join(KINDS)}")
    needed, optional = KINDS[kind]
    for key, value in rope.items():
        if key not in (*needed, *optional, *_ANY) and value not in (None, False):
            raise ModelError(f"rope_parameters: {key} {value!r} is not known with rope_type {kind!r}")
    for key in needed:
        if rope.get(key) is None:
            raise ModelError(f"rope_parameters: rope_type {kind!r} needs {key}")
    if kind in ("llama3", "yarn", "longrope"):
        rope[_ORIGINAL] = original or rope.get(_ORIGINAL) or config.get("max_position_embeddings")
        if not rope[_ORIGINAL]:
            raise ModelError(f"rope_parameters: rope_type {kind!r} needs {_ORIGINAL}")
    return rope


def rotary_table(config: dict, head_dim: int, length: int, layer_type: str | None = None) -> Tensor:
    """float32 [length, width]: cos(position * frequency) in the first half, sin in the second, times the kind's own factor.

    The width is that part of `head_dim` that is rotated: all of it, or `partial_rotary_factor` times as much. `length` is that
    of the longest request that is served. Raises ModelError for what `rope_parameters` refuses, and where the right frequencies
    would depend on the length of each request.
    """
    rope = rope_parameters(config, layer_type)
    frequencies, factor = _frequencies(rope, config, head_dim, length)
    angles = torch.outer(torch.arange(length, dtype=torch.float32), frequencies)
    return torch.cat([angles.cos(), angles.sin()], dim=1) * factor


def _frequencies(rope: dict, config: dict, head_dim: int, length: int) -> tuple[Tensor, float]:
    """The frequency of each pair, float32 [width / 2], and what multiplies cosines and sines."""
    kind, base = rope["rope_type"], float(rope["rope_theta"])
    width = int(head_dim * rope["partial_rotary_factor"])
    if kind == "proportional":
        return _proportional(rope, base, head_dim), 1.0
    plain = 1.0 / base ** (torch.arange(0, width, 2, dtype=torch.float32) / width)
    if kind == "linear":
        return plain / float(rope["factor"]), 1.0
    if kind == "llama3":
        return _llama3(plain, rope), 1.0
    if kind == "yarn":
        return _yarn(plain, rope, config, width)
    if kind == "longrope":
        return _longrope(plain, rope, config, length)
    if kind == "dynamic":
        _refuse_dynamic(config, length)
    return plain, 1.0


def _proportional(rope: dict, base: float, head_dim: int) -> Tensor:
    """The pairs of a part of the head turn, at the frequencies of the whole head; the others stand still."""
    turned = int(rope["partial_rotary_factor"] * head_dim // 2)
    found = torch.zeros(head_dim // 2)
    found[:turned] = 1.0 / base ** (torch.arange(0, 2 * turned, 2, dtype=torch.float32) / head_dim)
    return found / float(rope.get("factor") or 1.0)


def _llama3(frequencies: Tensor, rope: dict) -> Tensor:
    """Long wavelengths are divided by `factor`, short ones kept, those between interpolated."""
    factor, low, high = float(rope["factor"]), float(rope["low_freq_factor"]), float(rope["high_freq_factor"])
    turns = rope[_ORIGINAL] * frequencies / (2 * math.pi)  # full turns within the original context
    smooth = ((turns - low) / (high - low)).clamp(0, 1)
    return frequencies * (smooth + (1 - smooth) / factor)


def yarn_magnitude(factor: float, mscale: float = 1.0) -> float:
    """What YaRN multiplies queries and keys by, each, when a context is stretched by `factor`."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def _stretch(rope: dict, config: dict) -> float:
    """How far the context is stretched: `factor`, or what the two lengths say."""
    return float(rope.get("factor") or config["max_position_embeddings"] / rope[_ORIGINAL])


def _yarn(frequencies: Tensor, rope: dict, config: dict, width: int) -> tuple[Tensor, float]:
    """Pairs of few turns within the original context are divided by `factor`, those of many kept, a ramp between."""
    factor, original, base = _stretch(rope, config), rope[_ORIGINAL], float(rope["rope_theta"])

    def pair_of(turns: float) -> float:
        return width * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(base))

    first, last = pair_of(rope.get("beta_fast") or 32), pair_of(rope.get("beta_slow") or 1)
    if rope.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, width - 1)
    ramp = ((torch.arange(len(frequencies)) - first) / ((last - first) or 0.001)).clamp(0, 1)
    magnitude = rope.get("attention_factor")
    if magnitude is None:
        mscale, of_all = rope.get("mscale"), rope.get("mscale_all_dim")
        magnitude = yarn_magnitude(factor)
        if mscale and of_all:
            magnitude = yarn_magnitude(factor, mscale) / yarn_magnitude(factor, of_all)
    return frequencies / factor * ramp + frequencies * (1 - ramp), float(magnitude)


def _longrope(frequencies: Tensor, rope: dict, config: dict, length: int) -> tuple[Tensor, float]:
    """A divisor for each pair. Requests up to the original length have other ones than longer requests."""
    short, long, original = rope["short_factor"], rope["long_factor"], rope[_ORIGINAL]
    for key in ("short_factor", "long_factor"):
        if len(rope[key]) != len(frequencies):
            raise ModelError(f"rope_parameters: {key} has {len(rope[key])} numbers; {len(frequencies)} pairs are rotated")
    if length > original and short != long:
        raise ModelError(
            f"rope_type 'longrope' turns requests of more than {original} tokens by other frequencies than shorter ones, and "
            f"a server has one table: --max-model-len must be at most {original}, not {length}"
        )
    factor, magnitude = _stretch(rope, config), rope.get("attention_factor")
    if magnitude is None:
        magnitude = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    return frequencies / torch.tensor(short, dtype=torch.float32), float(magnitude)


def _refuse_dynamic(config: dict, length: int) -> None:
    """Frequencies grow with a request's length from `max_position_embeddings` on. Up to there they are the plain ones."""
    most = config.get("max_position_embeddings", length)
    if length > most:
        raise ModelError(
            f"rope_type 'dynamic' turns requests of more than {most} tokens by frequencies of their length: --max-model-len "
            f"must be at most {most}, not {length}"
        )
