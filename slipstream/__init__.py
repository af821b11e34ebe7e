"""Slipstream: a serving engine for any-to-any models, scheduled asynchronously over one log."""

__version__ = "0.1.0"


def __getattr__(name: str):
    # `LLM` pulls in the engine; `import slipstream` alone stays light, because the supervisor does it.
    if name == "LLM":
        from slipstream.llm import LLM

        return LLM
    raise AttributeError(f"module 'slipstream' has no attribute {name!r}")
