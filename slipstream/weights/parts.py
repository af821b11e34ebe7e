"""Functions for every kind of checkpoint: the bounds of a part, checks of a shape, both spellings of a config."""

import json
import pathlib

from slipstream.errors import ModelError

Part = tuple[int, int]  # [start, stop) of a dimension


def _bounds(part: Part | None, size: int, name: str) -> range:
    start, stop = (0, size) if part is None else part
    if not 0 <= start <= stop <= size:
        raise ValueError(f"{name}: [{start}, {stop}) does not lie within a dimension of {size}")
    return range(start, stop)


def cut(
    shape: tuple[int, ...], rows: Part | None, cols: Part | None, name: str, inner: Part | None = None
) -> tuple[range, range, range]:
    """The asked part of the first three dimensions; a missing one counts as 1. Raises ValueError for a part outside."""
    for part, least, what in ((cols, 2, "columns"), (inner, 3, "inner part")):
        if part is not None and len(shape) < least:
            raise ValueError(f"{name} has {len(shape)} dimensions and no {what}")
    first, second, third = (*shape, 1, 1, 1)[:3]
    return _bounds(rows, first, name), _bounds(cols, second, name), _bounds(inner, third, name)


def check_shape(name: str, stored: tuple[int, ...], expected: tuple[int, ...] | None, config: dict) -> None:
    """Raises ModelError if the file and the config disagree, naming the config's keys that have the size asked for."""
    if expected is None or tuple(expected) == stored:
        return
    asked = {n for n, m in zip(expected, stored, strict=False) if n != m}
    keys = [f"{key} {value}" for key, value in config.items() if type(value) is int and value in asked]
    of_keys = f" ({', '.join(keys)})" if keys else ""
    raise ModelError(f"tensor {name} is of shape {list(stored)}, and the config asks for {list(expected)}{of_keys}")


def normalize_config(config: dict) -> dict:
    """Gives a config both spellings of the rotary parameters: `rope_theta` with `rope_scaling` (older) and `rope_parameters`.

    A `rope_parameters` per layer type, and nested configs (`text_config`), are left as they are.
    """
    parameters = config.get("rope_parameters")
    if isinstance(parameters, dict) and "rope_theta" in parameters:
        config.setdefault("rope_theta", parameters["rope_theta"])
    elif parameters is None and "rope_theta" in config:
        scaling = dict(config.get("rope_scaling") or {})
        kind = scaling.pop("type", None)
        scaling.setdefault("rope_type", kind or "default")
        config["rope_parameters"] = {"rope_theta": config["rope_theta"], **scaling}
    return config


def read_json(path: pathlib.Path) -> dict:
    try:
        data = json.loads(path.read_text())
    except OSError as e:
        raise ModelError(f"{path}: {e.strerror or e}") from None
    except ValueError as e:
        raise ModelError(f"{path} is not JSON: {e}") from None
    if not isinstance(data, dict):
        raise ModelError(f"{path}: expected an object")
    return data


def read_config(path: pathlib.Path) -> dict:
    """config.json of a folder, or that file itself, normalized. Raises ModelError."""
    return normalize_config(read_json(path if path.suffix == ".json" else path / "config.json"))


def first_architecture(config: dict) -> str:
    """The first of `architectures`, or "" where the config names none."""
    return (config.get("architectures") or [""])[0]
