"""`slipstream env`: versions, devices, and missing packages with how to install them. For users and for bug reports."""

import argparse
import importlib.metadata
import json
import os
import pathlib
import platform
import sys
import typing

from slipstream import __version__

REQUIRED = (
    "torch", "numpy", "msgspec", "transformers", "tokenizers", "jinja2", "safetensors", "gguf", "huggingface_hub",
    "starlette", "uvicorn", "httptools", "prometheus_client", "rich", "llguidance", "pyyaml", "pyzmq",
)  # fmt: skip
OPTIONAL = (
    ("matplotlib", "pictures of `slipstream bench --plot` and `trace`", "pip install matplotlib"),
    ("hibari-tts", "`slipstream serve voice`", "pip install 'slipstream[voice]'"),
    ("sentencepiece", "`.model` tokenizers without a tokenizer.json", "pip install 'slipstream[tokenizers]'"),
    ("tiktoken", "`.tiktoken` tokenizers without a tokenizer.json", "pip install 'slipstream[tokenizers]'"),
    ("opentelemetry-sdk", "--otlp-traces-endpoint", "pip install 'slipstream[otel]'"),
    ("triton", "kernels on CUDA", "comes with PyTorch's CUDA builds: pip install torch"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    facts = collect()
    if args.json:
        print(json.dumps(facts, indent=2))
    else:
        _print(facts)
    return 1 if facts["missing"] else 0


def collect() -> dict[str, typing.Any]:
    """All facts as plain values. `missing` lists required packages only."""
    versions = {name: _version(name) for name in (*REQUIRED, *(name for name, *_ in OPTIONAL))}
    missing = [name for name in REQUIRED if versions[name] is None]
    return {
        "slipstream": __version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cpu": _cpu(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "cuda": _cuda(),
        "cache": os.environ.get("SLIPSTREAM_CACHE") or "the user's cache folder (SLIPSTREAM_CACHE sets another)",
        "packages": versions,
        "missing": {name: f"pip install {name}" for name in missing},
        "optional": {name: {"for": use, "get": how} for name, use, how in OPTIONAL if versions[name] is None},
    }


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cpu() -> dict[str, typing.Any]:
    """Name, usable cores, and the instructions that decide the default dtype."""
    name, flags = platform.processor() or platform.machine(), ""
    try:
        for line in pathlib.Path("/proc/cpuinfo").read_text().splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                name = value.strip()
            elif key.strip() in ("flags", "Features"):
                flags = value
                break
    except OSError:
        pass
    have = set(flags.split())
    bf16 = [f for f in ("amx_bf16", "avx512_bf16", "bf16") if f in have]
    return {"name": name, "cores": len(os.sched_getaffinity(0)), "bfloat16": bf16}


def _cuda() -> dict[str, typing.Any]:
    try:
        import torch
    except ImportError as e:
        return {"available": False, "why": f"PyTorch cannot be imported: {e}"}
    if not torch.backends.cuda.is_built():
        return {"available": False, "why": "this PyTorch is a CPU build"}
    if not torch.cuda.is_available():
        return {"available": False, "why": "PyTorch finds no CUDA device; check with nvidia-smi whether the driver does"}
    devices = []
    for i in range(torch.cuda.device_count()):
        p = torch.cuda.get_device_properties(i)
        devices.append({"name": p.name, "memory_gib": round(p.total_memory / 2**30, 1), "capability": f"{p.major}.{p.minor}"})
    return {"available": True, "version": torch.version.cuda, "devices": devices}


def _print(facts: dict[str, typing.Any]) -> None:
    from rich.table import Table

    from slipstream.system.terminal import console

    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    cpu, cuda = facts["cpu"], facts["cuda"]
    table.add_row("slipstream", facts["slipstream"])
    table.add_row("python", f"{facts['python']} ({sys.executable})")
    table.add_row("system", facts["system"])
    bf16 = f"bfloat16 in hardware ({', '.join(cpu['bfloat16'])})" if cpu["bfloat16"] else "no bfloat16 in hardware"
    table.add_row("cpu", f"{cpu['name']}, {cpu['cores']} cores, {facts['memory_gib']} GiB, {bf16}")
    if cuda["available"]:
        for i, d in enumerate(cuda["devices"]):
            table.add_row(f"cuda:{i}", f"{d['name']}, {d['memory_gib']} GiB, compute {d['capability']}, CUDA {cuda['version']}")
    else:
        table.add_row("cuda", f"none: {cuda['why']}")
    table.add_row("cache", facts["cache"])
    for name, version in facts["packages"].items():
        how = facts["missing"].get(name) or facts["optional"].get(name, {}).get("get")
        use = facts["optional"].get(name, {}).get("for")
        table.add_row(name, version or f"[bold]missing[/bold]{f' (for {use})' if use else ''}: {how}")
    console().print(table)
