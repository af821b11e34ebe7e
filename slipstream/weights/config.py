"""A model's config without its weights. Imports no PyTorch: a simulated rank and its grammars need sizes alone."""

import pathlib

from slipstream.weights.gguf_config import hf_config
from slipstream.weights.gguf_file import GGUFFile
from slipstream.weights.parts import normalize_config, read_config


def load_config(path: str | pathlib.Path) -> dict:
    """The config of a folder, a config.json or a GGUF file, as `Checkpoint.config` has it. Raises ModelError."""
    path = pathlib.Path(path)
    return normalize_config(hf_config(GGUFFile(path))) if path.suffix == ".gguf" else read_config(path)
