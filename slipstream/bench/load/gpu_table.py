"""The dense table of GPUs: starts a server of random weights, runs the workloads, and compares them with committed figures.

    python -m slipstream.bench.load.gpu_table [--quick] [--markdown docs/benchmarks.md]

The peer's figures are of vLLM 0.24.0 from its wheel (no FlashInfer, NVLink multicast off for all), measured on 2 x H200
with these workloads and Qwen3-8B's shape in bfloat16, prefix cache off, each once after a warm-up.
"""

import argparse
import datetime
import json
import pathlib
import platform
import shlex
import subprocess
import sys
import tempfile
import time
import typing

from slipstream import __version__
from slipstream.bench.load.report import label, shown
from slipstream.bench.load.server import own_server

Figures = dict[str, typing.Any]
Peer = dict[str, tuple[str, str]]  # figure -> (the peer's, our target)

SERVE = "--load-format dummy --no-enable-prefix-caching --max-model-len 32768 --max-num-seqs 128 --enable-debug"
SHAPE = str(pathlib.Path(__file__).parents[1] / "shapes" / "qwen3-8b")
IDLE = "device_idle_percent_rank_0"  # shown if `--bench --trace` is given
LATENCIES = ("itl_p50_ms", "itl_p99_ms", "itl_p999_ms", "gaps_over_50_ms", "worst_gap_ms")
FIRST = ("ttft_short_p50_ms", "ttft_long_p50_ms")
BURST = ("decode_chunks_per_s_per_stream", "prefill_ktok_per_s", "worst_gap_in_window_ms", "ttft_burst_p50_ms")


class Workload(typing.NamedTuple):
    """One run of `slipstream bench`: its arguments, those of a quick run, and the figures to show."""

    name: str
    full: str
    quick: str
    figures: tuple[str, ...]
    peer: Peer


CLOSED: Peer = {
    "requests_per_s": ("25.4", ">= 29"),
    "ttft_short_p50_ms": ("291", "<= 90"),
    "ttft_long_p50_ms": ("384", "<= 180"),
    "itl_p50_ms": ("5.25", "<= 4.6"),
    "itl_p99_ms": ("25", "<= 20"),
    "itl_p999_ms": ("118", "<= 30"),
    "gaps_over_50_ms": ("945 of 480 requests", "0"),
}
RATE: Peer = {
    "itl_p50_ms": ("4.0", "<= 3.6"),
    "itl_p99_ms": ("8.5", "<= 20"),
    "itl_p999_ms": ("50", "<= 25"),
    "gaps_over_50_ms": ("126 of 480 requests", "0"),
    "ttft_short_p50_ms": ("18", "<= 20"),
    "ttft_long_p50_ms": ("60", "<= 90"),
}


def burst_peer(chunks: str, rate: str, gap: str, first: str, wanted_first: str) -> Peer:
    wanted = (">= 50", ">= 47", "<= 40", wanted_first)
    return dict(zip(BURST, zip((chunks, rate, gap, first), wanted, strict=True), strict=True))


WORKLOADS = (
    Workload("closed 48", "closed --concurrency 48", "--requests 120", ("requests_per_s", *FIRST, *LATENCIES), CLOSED),
    Workload("closed 1", "closed --concurrency 1", "--requests 5", ("itl_p50_ms",), {"itl_p50_ms": ("3.78", "<= 3.4")}),
    Workload("rate 5", "rate --rate 5", "--requests 120", (*LATENCIES, *FIRST), RATE),
    Workload("burst 8", "burst --prompts 8", "", BURST, burst_peer("10.8", "51", "192", "2100", "<= 2300")),
    Workload("burst 32", "burst --prompts 32", "", BURST, burst_peer("7.4", "50", "223", "7100", "<= 7800")),
)


def measure(url: str, workload: Workload, args: argparse.Namespace) -> Figures:
    """Runs one workload in a process of its own; raises RuntimeError with its output if it wrote no figures."""
    with tempfile.TemporaryDirectory() as folder:
        out = pathlib.Path(folder, "figures.json")
        words = [*shlex.split(workload.full), *shlex.split(workload.quick if args.quick else ""), *shlex.split(args.bench)]
        command = [sys.executable, "-m", "slipstream.cli", "bench", *words, "--base-url", url, "--json", str(out)]
        if args.vocab:
            command += ["--vocab", str(args.vocab)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=args.timeout)
        if not out.exists():
            raise RuntimeError(f"{' '.join(words)} failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
        return json.loads(out.read_text())["figures"]


def run_server(arguments: str, args: argparse.Namespace) -> tuple[float, dict[str, Figures]]:
    """Seconds from start to ready, and the figures of each workload that ran."""
    begin = time.monotonic()
    with own_server(arguments) as url:
        ready = time.monotonic() - begin
        print(f"ready in {ready:.1f} s", flush=True)
        found: dict[str, Figures] = {}
        for workload in WORKLOADS:
            if args.only and workload.name.split()[0] not in args.only and workload.name not in args.only:
                continue
            try:
                found[workload.name] = measure(url, workload, args)
            except (RuntimeError, subprocess.TimeoutExpired) as e:
                print(f"{workload.name}: {e}", flush=True)
                continue
            picked = {k: found[workload.name].get(k) for k in ("errors", *workload.figures, IDLE)}
            print(f"{workload.name}: " + ", ".join(f"{k} {shown(v)}" for k, v in picked.items()), flush=True)
        return ready, found


def table(runs: dict[str, tuple[float, dict[str, Figures]]]) -> str:
    """A Markdown table: one row a figure, one column a mode, with the peer's figure and our target."""
    modes = list(runs)
    lines = ["| work | figure | vLLM 0.24.0 | target | " + " | ".join(modes) + " |", "|---" * (4 + len(modes)) + "|"]
    lines.append("| start | to ready, s | 152 | <= 30 | " + " | ".join(f"{runs[m][0]:.1f}" for m in modes) + " |")
    for w in WORKLOADS:
        if not any(w.name in runs[m][1] for m in modes):
            continue
        seen = any(IDLE in runs[m][1].get(w.name, {}) for m in modes)
        for figure in (*w.figures, *([IDLE] if seen else [])):
            peer, wanted = w.peer.get(figure, ("", ""))
            cells = " | ".join(shown(runs[m][1].get(w.name, {}).get(figure)) for m in modes)
            lines.append(f"| {w.name} | {label(figure)[0]} | {peer} | {wanted} | {cells} |")
    return "\n".join(lines) + "\n"


def machine() -> str:
    """The GPUs and the libraries, in one line."""
    try:
        query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
        gpus = subprocess.run(query, capture_output=True, text=True).stdout.strip().splitlines()
    except OSError:
        gpus = []
    versions = "import torch, importlib.metadata as m; v = {d.name for d in m.distributions()}; "
    versions += "print('PyTorch', torch.__version__, 'Triton', m.version('triton') if 'triton' in v else '-')"
    libraries = subprocess.run([sys.executable, "-c", versions], capture_output=True, text=True).stdout.strip()
    what = f"{len(gpus)} x {gpus[0]}" if gpus else f"no GPU, {platform.machine()}"
    return f"{what}; {libraries}; Python {platform.python_version()}; Slipstream {__version__}"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m slipstream.bench.load.gpu_table", description=__doc__)
    parser.add_argument(
        "--model", default=SHAPE, help="a folder with config.json (default: Qwen3-8B's, as in the peer's figures)"
    )
    parser.add_argument("--serve", default="-tp 2", help="further arguments of `slipstream serve` (default: -tp 2)")
    parser.add_argument("--bench", default="", help="further arguments of every workload")
    parser.add_argument("--scheduling", default="async,serial", help="modes, one server each (default: async,serial)")
    parser.add_argument("--only", type=lambda t: t.split(","), help="workloads to run, by name or first word")
    parser.add_argument("--quick", action="store_true", help="120 requests where the table has 480")
    parser.add_argument("--vocab", type=int, help="token ids below are valid (default: asked of the server)")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds for one workload")
    parser.add_argument("--markdown", help="append the table to this file")
    args = parser.parse_args(argv)
    runs = {}
    for mode in args.scheduling.split(","):
        arguments = f"{shlex.quote(args.model)} {SERVE} {args.serve} --scheduling {mode}"
        print(f"slipstream serve {arguments}", flush=True)
        runs[mode] = run_server(arguments, args)
    text = table(runs)
    print(text)
    if args.markdown:
        command = " ".join(
            ["python -m slipstream.bench.load.gpu_table", *map(shlex.quote, argv if argv is not None else sys.argv[1:])]
        )
        head = f"\n## {datetime.date.today().isoformat()}: dense, {pathlib.Path(args.model).name}\n\n{machine()}\n\n"
        flags = f"`{command}`, serving with `{SERVE} {args.serve}`{' (quick: 120 requests)' if args.quick else ''}\n\n"
        with open(args.markdown, "a") as f:
            f.write(head + flags + text)
    return 0 if all(found for _, found in runs.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
