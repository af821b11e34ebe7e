"""Whether the GPU tests were run on the CUDA sources as they are (docs/gpu_runs.md)."""

import pathlib
import shutil
import subprocess

import pytest

from tests.gpu import record


def test_the_cuda_sources_are_those_that_the_gpu_tests_ran_on():
    reason = record.outdated()
    assert reason is None, reason
    if left := record.partly():
        pytest.skip(left)


@pytest.fixture
def copy(tmp_path: pathlib.Path) -> pathlib.Path:
    """A checkout with the CUDA sources and a record that holds."""
    if not shutil.which("git"):
        pytest.skip("git is not installed")
    for folder in record.FOLDERS:
        shutil.copytree(record.ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "docs").mkdir()
    (tmp_path / record.RECORD).write_text(
        "# Runs\n\n| " + " | ".join(record.COLUMNS) + " |\n|---|---|---|---|---|---|---|---|\n"
    )
    record.write(ROW | {"sources": record.sources(tmp_path)}, tmp_path)
    for args in (("init", "-q"), ("add", "."), ("commit", "-q", "-m", "Tile the sums")):
        subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a@b", *args], cwd=tmp_path, check=True)
    return tmp_path


ROW = {
    "date": "2026-01-02",
    "commit": "abc",
    "machine": "1 × GPU",
    "tests": "all",
    "passed": 3,
    "failed": 0,
    "skipped": 1,
    "sources": "",
}


def test_a_change_of_the_sources_makes_the_record_old_and_says_what_to_do(copy: pathlib.Path):
    assert record.outdated(copy) is None
    file = copy / "slipstream/ops/cuda/sums.py"
    file.write_text(file.read_text() + "\n")
    reason = record.outdated(copy)
    assert reason and "make test-gpu" in reason and "2026-01-02" in reason and "Tile the sums" in reason
    record.write(ROW | {"date": "2026-01-03", "sources": record.sources(copy)}, copy)
    assert record.outdated(copy) is None and record.last_run(copy)["date"] == "2026-01-03"
    shutil.move(file, file.with_name("other.py"))
    assert record.outdated(copy)


def test_the_record_needs_no_git(copy: pathlib.Path):
    shutil.rmtree(copy / ".git")
    assert record.outdated(copy) is None
    (copy / "slipstream/device/cuda/more.py").write_text("")
    assert "make test-gpu" in (record.outdated(copy) or "")


def test_a_run_with_failures_does_not_count(copy: pathlib.Path):
    record.write(ROW | {"failed": 2, "sources": record.sources(copy)}, copy)
    assert "2 GPU tests failed" in (record.outdated(copy) or "")


def test_a_run_of_some_tests_says_which(copy: pathlib.Path):
    record.write(ROW | {"tests": "tests/gpu/test_ops.py", "sources": record.sources(copy)}, copy)
    assert record.outdated(copy) is None and "tests/gpu/test_ops.py" in (record.partly(copy) or "")
