"""The composite models that have a name: their placements as in YAML (see `placement`). Plain values."""

from typing import Any

KNOWN: dict[str, dict[str, Any]] = {
    "voice": {
        "model": "slipstream.components.voice:VOICE",
        "name": "voice",
        "groups": {
            "hear": {"components": ["encoder"]},
            "write": {"components": ["decoder"]},
            "think": {
                "components": ["llm"],
                "threads": 1,
            },  # two threads would wait for each other whenever another component runs
            "speak": {"components": ["speech"]},
        },
        "settings": {
            "encoder": {"weights": "whisper-tiny.en", "margin": 4.0},
            "decoder": {"weights": "whisper-tiny.en"},
            "llm": {
                "weights": "smollm2-135m",
                "dtype": "float32",
            },  # bfloat16 changes which token wins a near-tie, often with so small a model
        },
    },
}


def is_composite(name: str) -> bool:
    """Whether a name is that of a composite model: a known name, or a placement's YAML file."""
    return name in KNOWN or name.endswith((".yaml", ".yml"))
