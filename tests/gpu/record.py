"""Runs the GPU tests and writes what came of them into docs/gpu_runs.md (`make test-gpu`).

The suite runs where no GPU is, so it cannot see that a kernel broke: it checks this record instead. A row names the content of
the sources that were tested, not only a commit, so it holds through rebases, in shallow clones and where there is no git.

    python tests/gpu/record.py            all of them, recorded; with pytest's arguments a selection, recorded as such
    python tests/gpu/record.py --check    a warning where the record does not hold for these sources
"""

import argparse
import collections
import datetime
import hashlib
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
FOLDERS = ("slipstream/device/cuda", "slipstream/ops/cuda")
TESTS = ("tests/gpu", "tests/device/cuda/test_host.py")
RECORD = "docs/gpu_runs.md"
COLUMNS = ("date", "commit", "machine", "tests", "passed", "failed", "skipped", "sources")
ALL = "all"  # in the column of tests; else what was run


class Outcomes:
    """A plugin of pytest that counts tests by how they ended."""

    def __init__(self):
        self.counts = collections.Counter()

    def pytest_runtest_logreport(self, report) -> None:
        if report.when == "call" or report.outcome != "passed":
            self.counts[report.outcome] += 1


def sources(root: pathlib.Path = ROOT) -> str:
    """A digest of what the tests are there for."""
    digest = hashlib.sha256()
    for file in sorted(file for folder in FOLDERS for file in (root / folder).rglob("*.py")):
        digest.update(f"{file.relative_to(root).as_posix()}\n".encode() + file.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def git(*args: str, root: pathlib.Path = ROOT) -> str:
    """What git prints; "" where there is no git or no checkout."""
    try:
        return subprocess.run(["git", *args], cwd=root, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def last_run(root: pathlib.Path = ROOT) -> dict[str, str]:
    """The newest row, by column."""
    rows = [line for line in (root / RECORD).read_text().splitlines() if line.startswith("|")]
    assert len(rows) > 2, f"{RECORD} has no run"
    return dict(zip(COLUMNS, (cell.strip() for cell in rows[2].strip("|").split("|")), strict=True))


def outdated(root: pathlib.Path = ROOT) -> str | None:
    """Why the record does not hold for these sources, and what to do; None where it does."""
    run = last_run(root)
    what = "run `make test-gpu` on a machine with a GPU and commit " + RECORD
    if run["sources"] != sources(root):
        change = git("log", "-1", "--format=; their last change is %h of %cs, %s", "--", *FOLDERS, root=root)
        return f"{' and '.join(FOLDERS)} are not what the GPU tests of {run['date']} ran on{change}: {what}"
    if run["failed"] != "0":
        return f"{run['failed']} GPU tests failed on {run['date']}: mend them, {what}"
    return None


def partly(root: pathlib.Path = ROOT) -> str | None:
    """What the newest run was, where it was not of all tests."""
    run = last_run(root)
    return None if run["tests"] == ALL else f"of the GPU tests only these ran on the CUDA sources as they are: {run['tests']}"


def write(row: dict[str, object], root: pathlib.Path = ROOT) -> None:
    """Puts a run on top of the table."""
    file = root / RECORD
    lines = file.read_text().splitlines(keepends=True)
    top = next(i for i, line in enumerate(lines) if line.startswith("|---")) + 1
    lines.insert(top, "| " + " | ".join(str(row[column]) for column in COLUMNS) + " |\n")
    file.write_text("".join(lines))


def run(selection: list[str], commit: str) -> int:
    import pytest
    import torch

    if not torch.cuda.is_available():
        print("no GPU here: nothing is run or recorded")
        return 2
    seen, outcomes = sources(), Outcomes()
    code = int(pytest.main([*TESTS, *selection], plugins=[outcomes]))
    if code in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        machine = f"{torch.cuda.device_count()} × {torch.cuda.get_device_name()}, PyTorch {torch.__version__}"
        counts = {outcome: outcomes.counts[outcome] for outcome in ("passed", "failed", "skipped")}
        tests = " ".join(selection).replace("|", "/") or ALL
        write(
            {"date": datetime.date.today().isoformat(), "commit": commit, "machine": machine, "tests": tests, "sources": seen}
            | counts
        )
    return code


def main() -> int:
    parser = argparse.ArgumentParser(description="Runs the GPU tests and records them.")
    parser.add_argument("--check", action="store_true", help="run nothing; warn where the record does not hold")
    parser.add_argument("--commit", help="what to record, where there is no git")
    args, selection = parser.parse_known_args()
    if args.check:
        if reason := outdated() or partly():
            print(f"warning: {reason}", file=sys.stderr)
        return 0
    dirty = "+" if git("status", "--porcelain", "--untracked-files=no") else ""
    return run(selection, args.commit or (git("rev-parse", "--short", "HEAD") or "unknown") + dirty)


if __name__ == "__main__":
    sys.exit(main())
