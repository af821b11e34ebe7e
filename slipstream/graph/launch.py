"""Starts a composite model: the language model's group as for a plain model, and a worker group for each other one.

Runs in the supervisor's process: no PyTorch, no HTTP.
"""

import dataclasses
import importlib.util
import os
from typing import Any

import msgspec

from slipstream.config import EngineConfig, ServerConfig
from slipstream.errors import ConfigError
from slipstream.graph.model import Model
from slipstream.graph.placement import Placement, load
from slipstream.graph.worker import FRONT, WorkerSpec
from slipstream.process.group import Spec
from slipstream.process.server import Others, serve
from slipstream.transport.arena import Arena
from slipstream.weights.pull import resolve_model

NEEDED = ("python_multipart", "websockets", "av")  # of the audio routes; components check their own
SEGMENT_BYTES = 64 << 20  # of the arena, per process; the kernel adds pages when they are touched


class FrontGraph(msgspec.Struct, frozen=True):
    """A composite model's description for the front end; sent as JSON."""

    model: str
    workers: dict[int, tuple[str, ...]]  # group -> components; its peer number in the arena is the group's
    settings: dict[str, dict[str, Any]]


def run(engine: EngineConfig, server: ServerConfig) -> int:
    """Runs `slipstream serve` for a placement; returns the exit code."""
    if (engine.task, engine.pooling) != ("auto", "auto"):
        raise ConfigError("--task and --pooling: are for single models; leave them out for a model of several components")
    placement, model = load(engine.model)
    if server.api_server_count != 1:
        raise ConfigError("--api-server-count: must be 1 for a composite model, whose conductor is in the one front end")
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(f"{placement.name} needs the package {missing[0]}: pip install 'slipstream[voice]'")
    language = next((c.name for c in model.components if c.role == "language_model"), None)
    if language is None:
        raise ConfigError(f"model {model.name} has no language_model component, which a server needs")
    settings = {name: resolve_weights(s) for name, s in placement.settings.items()}
    place = placement.groups[placement.group_of(language)]
    own = placement.settings.get(language, {})
    if unknown := sorted(set(own) - {"weights", "dtype"}):
        raise ConfigError(f"settings: {language}: a language model has no setting {unknown[0]}; it has weights and dtype")
    dtype = own.get("dtype", "auto") if engine.dtype == "auto" else engine.dtype
    engine = dataclasses.replace(engine, model=own.get("weights", engine.model), dtype=dtype)
    if place.tensor_parallel_size != 1:
        engine = dataclasses.replace(engine, tensor_parallel_size=place.tensor_parallel_size)
    if place.device != "cpu":
        engine = dataclasses.replace(engine, device=place.device)
    if place.threads:
        os.environ.setdefault("OMP_NUM_THREADS", str(place.threads))  # the ranks inherit it; workers set their own
    server = dataclasses.replace(server, served_model_name=server.served_model_name or [placement.name])
    path = str(resolve_model(engine.model))
    others = worker_groups(placement, model, settings, engine)
    return serve(engine, server, path, others)


def resolve_weights(settings: dict[str, Any]) -> dict[str, Any]:
    """The settings, with `weights` replaced by their `folder`. Fetches them first if needed."""
    rest = {k: v for k, v in settings.items() if k != "weights"}
    return {**rest, "folder": str(resolve_model(settings["weights"]))} if "weights" in settings else rest


def worker_groups(placement: Placement, model: Model, settings: dict[str, dict[str, Any]], engine: EngineConfig) -> Others:
    """A spec for each group but the language model's, and the model's description for the front end."""
    roles = {c.name: c.role for c in model.components}
    places = [g for g in placement.groups.values() if roles[g.components[0]] != "language_model"]
    workers = {i: place.components for i, place in enumerate(places, 1)}
    peers = {component: i for i, components in workers.items() for component in components}
    arena = Arena.create(len(workers) + 1, SEGMENT_BYTES)
    specs = []
    for i, place in enumerate(places, 1):
        own = {c: settings.get(c, {}) for c in place.components}
        spec = WorkerSpec(placement.model, place.components, own, i, peers, place.threads or 1)
        role = msgspec.json.encode(spec).decode()
        specs.append(Spec(i, engine, "", 1, 0, "slipstream.graph.worker", role, (arena,)))
    assert FRONT not in workers
    graph = FrontGraph(placement.model, workers, settings)
    return Others(specs, msgspec.json.encode(graph).decode(), [arena])
