"""The environment of every Python process that this one starts."""

import os
import pathlib

_HOME = pathlib.Path(__file__).resolve().parents[2]  # the folder that holds this package


def python_environment() -> dict[str, str]:
    """This process's environment, changed so that Python imports nothing from the current folder.

    With `python -m` that folder would come first: a model's folder, say, with a `msgspec.py` in it. A checkout that is not
    installed stays importable.
    """
    out = {**os.environ, "PYTHONSAFEPATH": "1"}
    paths = [path for path in out.get("PYTHONPATH", "").split(os.pathsep) if path]
    if _HOME.name not in ("site-packages", "dist-packages") and str(_HOME) not in paths:
        paths.append(str(_HOME))
    if paths:
        out["PYTHONPATH"] = os.pathsep.join(paths)
    return out
