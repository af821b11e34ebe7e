"""Where this program keeps files. Imports the standard library only."""

import os
import pathlib

from slipstream.errors import ConfigError


def home_folder(instead: str) -> pathlib.Path:
    """Raises ConfigError naming the variable `instead` if the user has none."""
    try:
        return pathlib.Path.home()
    except RuntimeError:
        raise ConfigError(f"this user has no home folder; set {instead} to a folder for files") from None


def cache_folder() -> pathlib.Path:
    """The folder of models and flight records; it may not exist yet. Raises ConfigError if the user has no home folder."""
    if given := os.environ.get("SLIPSTREAM_CACHE"):
        return home_folder("SLIPSTREAM_CACHE") / given[2:] if given.startswith("~/") else pathlib.Path(given)
    base = os.environ.get("XDG_CACHE_HOME")
    return (pathlib.Path(base) if base else home_folder("SLIPSTREAM_CACHE") / ".cache") / "slipstream"
