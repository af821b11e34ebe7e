"""Composite models that have a name, as their placements are written in YAML (see `placement`). A value, no code to load."""

from typing import Any

KNOWN: dict[str, dict[str, Any]] = {
    "voice": {
        "model": "slipstream.components.voice:VOICE",
        "name": "voice",
        "groups": {
            "hear": {"components": ["encoder"]},
            "write": {"components": ["decoder"]},
            "think": {"components": ["llm"], "threads": 1},  # two would wait for each other whenever another part runs
            "speak": {"components": ["speech"]},
        },
        "settings": {
            "encoder": {"weights": "whisper-tiny.en", "margin": 4.0},
            "decoder": {"weights": "whisper-tiny.en"},
            "llm": {"weights": "smollm2-135m", "dtype": "float32"},  # so small a model flips near-ties in bfloat16
        },
    },
}


def is_composite(name: str) -> bool:
    """Whether a model's name means a composite one: a known name, or a placement's YAML file."""
    return name in KNOWN or name.endswith((".yaml", ".yml"))
