"""`slipstream doctor`: why a server is slow or does not start, and what to do about each finding."""

import argparse
import os
import pathlib
import resource
import shutil
import socket
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass

from slipstream.client.remote import Remote
from slipstream.commands import env
from slipstream.commands.top import Metrics, total
from slipstream.errors import SlipstreamError

GOOD, POOR, BAD = "ok", "slow", "broken"
STYLES = {GOOD: "green", POOR: "yellow", BAD: "bold red"}
EAGER_SHARE = 0.1  # of a server's steps outside captured graphs, from which it is worth a word
EAGER_ADVICE = {
    "enforce_eager": "start it without --enforce-eager",
    "model_code": "transformers' code runs this model and waits for the device within a step, so no graph can hold it",
    "step_size": "steps above 2048 tokens launch for 20 to 30 ms: for a small model, --max-num-batched-tokens 2048",
    "prompt_logprobs": "requests ask for log probabilities of their prompts (prompt_logprobs, echo with logprobs)",
    "sampling": "requests ask for top_k, top_p, min_p, penalties, biases, bad words or logprobs: 1.5 ms of host time a step",
    "grammar": "requests ask for structured output; its masks come from the host",
}
MIN_DRIVER = 525  # CUDA 12's; older ones cannot run this PyTorch


@dataclass(frozen=True)
class Finding:
    what: str
    state: str  # GOOD, POOR or BAD
    found: str
    advice: str = ""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model", nargs="?", default="smollm2-135m", help="the model whose files are checked (default %(default)s)"
    )
    parser.add_argument("--port", type=int, default=8000, help="the port of the server to start (default %(default)s)")


def run(args: argparse.Namespace) -> int:
    """Exit status 0 if nothing is broken."""
    from rich.table import Table

    from slipstream.system.terminal import console

    table = Table("", "", "found", "what to do", box=None, padding=(0, 2, 0, 0), show_header=False)
    broken = False
    for f in examine(args.model, args.port):
        broken |= f.state == BAD
        table.add_row(f"[{STYLES[f.state]}]{f.state}[/]", f.what, f.found, f.advice)
    console().print(table)
    return int(broken)


def examine(model: str, port: int) -> Iterator[Finding]:
    facts = env.collect()
    yield packages(facts)
    yield threads(os.environ, facts["cpu"]["cores"])
    yield cpu_quota(facts["cpu"]["cores"])
    yield number_type(facts)
    yield memory()
    yield open_files()
    yield from gpus(facts["cuda"])
    yield model_files(model)
    free = port_free(port)
    yield free
    if free.state != GOOD:
        yield from running_server(Remote(f"http://127.0.0.1:{port}", None))


def packages(facts: dict) -> Finding:
    if facts["missing"]:
        name, how = next(iter(facts["missing"].items()))
        return Finding("packages", BAD, f"missing: {', '.join(facts['missing'])}", f"{how} (first: {name})")
    return Finding("packages", GOOD, f"all installed; torch {facts['packages']['torch']}")


def threads(environ, cores: int) -> Finding:
    """OMP_NUM_THREADS is inherited by every rank and overrides what Slipstream would choose."""
    asked = environ.get("OMP_NUM_THREADS")
    if asked and asked.isdigit() and int(asked) != cores:
        return Finding(
            "threads", POOR, f"OMP_NUM_THREADS={asked} on {cores} cores", "unset it; ranks share the cores by themselves"
        )
    return Finding("threads", GOOD, f"{cores} cores")


def cpu_quota(cores: int, file: str = "/sys/fs/cgroup/cpu.max") -> Finding:
    """A control group's quota does not reduce the visible cores, so threads are stopped in mid-step."""
    try:
        quota, period = pathlib.Path(file).read_text().split()
    except (OSError, ValueError):
        return Finding("CPU quota", GOOD, "none")
    if quota == "max" or int(quota) >= cores * int(period):
        return Finding("CPU quota", GOOD, "none")
    allowed = int(quota) / int(period)
    advice = f"pin the process to {max(1, int(allowed))} cores (taskset, --cpuset-cpus) instead of a quota"
    return Finding("CPU quota", POOR, f"{allowed:g} of {cores} cores", advice)


def number_type(facts: dict) -> Finding:
    if facts["cuda"]["available"] or facts["cpu"]["bfloat16"]:
        return Finding("bfloat16", GOOD, "in hardware")
    return Finding(
        "bfloat16",
        POOR,
        "not supported by this CPU",
        "float32 is used, with twice the memory traffic; a CPU with avx512_bf16 or amx helps",
    )


def memory() -> Finding:
    for line in pathlib.Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable"):
            free = int(line.split()[1]) / 2**20
            if free < 2:
                return Finding("memory", BAD, f"{free:.1f} GiB free", "end other programs, or set --kv-cache-memory-bytes")
            return Finding("memory", GOOD, f"{free:.1f} GiB free")
    return Finding("memory", POOR, "unknown", "/proc/meminfo has no MemAvailable")


def open_files() -> Finding:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < 4096:
        return Finding("open files", POOR, f"limit {soft}", f"each client needs one: ulimit -n {max(65536, soft)}")
    return Finding("open files", GOOD, f"limit {soft}")


def gpus(cuda: dict) -> Iterator[Finding]:
    if not shutil.which("nvidia-smi"):
        yield Finding("GPU", GOOD, "none; models run on the CPU")
        return
    query = ["nvidia-smi", "--query-gpu=driver_version,name,memory.used,memory.total", "--format=csv,noheader,nounits"]
    try:
        lines = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout.strip().splitlines()
    except (OSError, subprocess.SubprocessError) as e:
        yield Finding("GPU", BAD, f"nvidia-smi fails: {e}", "the driver does not answer; reload it or restart the machine")
        return
    for i, line in enumerate(lines):
        driver, name, used, size = (x.strip() for x in line.split(","))
        if int(driver.split(".")[0]) < MIN_DRIVER:
            yield Finding(f"GPU {i}", BAD, f"{name}, driver {driver}", f"needs driver {MIN_DRIVER} or newer")
        elif float(used) > 0.1 * float(size):
            yield Finding(f"GPU {i}", POOR, f"{name}, {used} of {size} MiB in use", "nvidia-smi shows the process that uses it")
        else:
            yield Finding(f"GPU {i}", GOOD, f"{name}, driver {driver}, {size} MiB")
    if not cuda["available"]:
        yield Finding("CUDA", BAD, cuda["why"], "install a CUDA build of PyTorch, or use --device cpu")
    if len(lines) > 1:
        yield topology()


def topology() -> Finding:
    """The GPUs' links decide the cost of a sum."""
    try:
        text = subprocess.run(["nvidia-smi", "topo", "-m"], capture_output=True, text=True, timeout=20).stdout
    except (OSError, subprocess.SubprocessError):
        return Finding("links", POOR, "unknown", "nvidia-smi topo -m fails")
    if "NV" in text.replace("NVIDIA", ""):
        return Finding("links", GOOD, "NVLink")
    return Finding("links", POOR, "PCIe only", "sums between GPUs are slow; use fewer ranks")


def model_files(model: str) -> Finding:
    from slipstream.graph.known import is_composite
    from slipstream.graph.placement import weights_of
    from slipstream.weights.packages import PACKAGES
    from slipstream.weights.pull import resolve_model

    found: list[str] = []
    try:
        for name in weights_of(model) if is_composite(model) else [model]:
            if name in PACKAGES or pathlib.Path(name).expanduser().exists():
                found.append(str(resolve_model(name, verify=True)))
            else:
                found.append(f"{name} is looked up on the Hugging Face hub at start")
    except SlipstreamError as e:
        return Finding("model", BAD, str(e), f"slipstream {'plan' if is_composite(model) else 'pull'} {model}")
    return Finding("model", GOOD, ", ".join(found))


def port_free(port: int) -> Finding:
    with socket.socket() as s:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            s.bind(("127.0.0.1", port))
        except OSError as e:
            return Finding("port", POOR, f"{port}: {e.strerror}", "stop the server that runs already, or choose another --port")
    return Finding("port", GOOD, f"{port} is free")


def running_server(server: Remote) -> Iterator[Finding]:
    """What a server says of itself; nothing where the port is another program's."""
    try:
        metrics = server.metrics()
    except (SlipstreamError, ValueError) as e:
        yield Finding("server", POOR, f"{server.base_url} has no metrics for us: {e}")
        return
    if total(metrics, "steps_total"):
        yield eager_steps(metrics)
    if restarts := total(metrics, "group_restarts_total"):
        yield Finding("restarts", POOR, f"{restarts:.0f} since the start", "the server's log names each fault")


def eager_steps(metrics: Metrics) -> Finding:
    """What runs outside captured graphs costs the host milliseconds: too long where the device's step is shorter."""
    steps = total(metrics, "steps_total")
    shares = {labels["reason"]: count / steps for labels, count in metrics.get("eager_steps_total", ()) if count}
    if not shares:
        return Finding("eager steps", GOOD, f"none of {steps:.0f}")
    found = ", ".join(f"{reason} {share:.0%}" for reason, share in shares.items())
    reason, share = max(shares.items(), key=lambda item: item[1])
    if share < EAGER_SHARE:
        return Finding("eager steps", GOOD, f"{found} of {steps:.0f}")
    return Finding("eager steps", POOR, f"{found} of {steps:.0f}", EAGER_ADVICE[reason])
