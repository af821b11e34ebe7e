"""Slipstream: a serving engine for any-to-any models, scheduled asynchronously over one log."""

import importlib

__version__ = "0.1.0"


_PUBLIC = {"LLM": "slipstream.llm", "AsyncLLM": "slipstream.async_llm", "SamplingParams": "slipstream.sampling_params"}


def __getattr__(name: str):
    # These pull in the engine; `import slipstream` alone stays light, because the supervisor does it.
    if name in _PUBLIC:
        return getattr(importlib.import_module(_PUBLIC[name]), name)
    raise AttributeError(f"module 'slipstream' has no attribute {name!r}")
