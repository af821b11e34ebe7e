"""Where the components of a composite model run: reads and checks a YAML file or a known name. Torch-free.

    model: slipstream.components.voice:VOICE   # package.module:NAME of the model's value
    name: voice                            # what clients call it
    target_itl_ms: 100                     # no step in a decoder's group may take longer
    groups:
      hear:  {components: [encoder], threads: 1}
      write: {components: [decoder]}
      think: {components: [llm], tensor_parallel_size: 1}
      speak: {components: [speech]}
    settings:                              # by component; `weights` names a package, folder or file
      encoder: {weights: whisper-tiny.en}

Functions run in the front end's process and are not placed.
"""

import importlib
import pathlib
from typing import Any

import msgspec

from slipstream.errors import ConfigError
from slipstream.graph.known import KNOWN
from slipstream.graph.model import Loop, Model, check

DEFAULT_ITL_MS = 100.0


class GroupPlace(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One group: its components, its device and its threads."""

    components: tuple[str, ...]
    device: str = "cpu"
    tensor_parallel_size: int = 1
    threads: int | None = None  # for each process's arithmetic (default: 1; a language model's ranks choose their own)


class Placement(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    model: str
    name: str
    groups: dict[str, GroupPlace]
    settings: dict[str, dict[str, Any]] = {}
    target_itl_ms: float = DEFAULT_ITL_MS

    def group_of(self, component: str) -> str:
        """The group that holds a component; "front" for functions."""
        return next((name for name, g in self.groups.items() if component in g.components), "front")


def load(name: str) -> tuple[Placement, Model]:
    """A known name or a YAML file, checked against its model. Raises ConfigError naming the fault."""
    if name in KNOWN:
        raw: Any = KNOWN[name]
    else:
        import yaml

        try:
            raw = yaml.safe_load(pathlib.Path(name).read_text())
        except (OSError, yaml.YAMLError) as e:
            raise ConfigError(f"{name}: {e}") from None
    try:
        placement = msgspec.convert(raw, Placement)
    except msgspec.ValidationError as e:
        raise ConfigError(f"{name}: {e}") from None
    model = resolve(placement.model)
    if not isinstance(model, Model):
        raise ConfigError(
            f"{name}: {placement.model} is not a model; name a slipstream.graph.model.Model as package.module:NAME"
        )
    check(model)
    check_placement(placement, model)
    return placement, model


def weights_of(name: str) -> list[str]:
    """What the components of a known name or a YAML file load: names of models, folders or files."""
    placement, _ = load(name)
    return list(dict.fromkeys(s["weights"] for s in placement.settings.values() if "weights" in s))


def resolve(reference: str) -> Any:
    """Imports the object named by "package.module:NAME"."""
    module, _, name = reference.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as e:
        raise ConfigError(f"{reference!r} cannot be imported: {e}") from None


def check_placement(p: Placement, model: Model) -> None:
    """Raises ConfigError, naming group and component, for a placement that could not serve the model well."""
    held: dict[str, str] = {}
    for name, group in p.groups.items():
        _check_group(p, model, name, group)
        for component in group.components:
            if component in held:
                raise ConfigError(f"group {name}: component {component} is held by group {held[component]} too")
            held[component] = name
    for c in model.components:
        if c.role == "function" and c.name in held:
            raise ConfigError(
                f"group {held[c.name]}: component {c.name} is a function; it runs in the front end's process, so leave it out"
            )
        if c.role != "function" and c.name not in held:
            raise ConfigError(f"component {c.name} is placed on no group; name it in the components of one")
    for name, settings in p.settings.items():
        if not isinstance(settings.get("weights", ""), str):
            raise ConfigError(f"settings: {name}: weights: name a model, a folder or a file")
        if name not in model.by_name:
            raise ConfigError(f"settings: model {model.name} has no component {name}; it has {', '.join(model.by_name)}")
    for walk in model.walks:
        for link in walk.links:
            source, target = link.source.split(".")[0], link.target.split(".")[0]
            if isinstance(link, Loop) and p.group_of(source) != p.group_of(target):
                what = f"the loop {link.source} -> {link.target}"
                raise ConfigError(f"walk {walk.name}: {what} leaves group {p.group_of(source)}")
    if sum(c.role == "language_model" for c in model.components) > 1:
        raise ConfigError(f"model {model.name}: one language model can be served by the log at a time")


def _check_group(p: Placement, model: Model, name: str, group: GroupPlace) -> None:
    for component in group.components:
        if component not in model.by_name:
            raise ConfigError(
                f"group {name}: model {model.name} has no component {component}; it has {', '.join(model.by_name)}"
            )
    if not group.components:
        raise ConfigError(f"group {name}: it holds no component; name at least one")
    parts = [model.by_name[c] for c in group.components]
    decoders = [c for c in parts if c.role in ("autoregressive", "language_model")]
    slow = next((c for c in parts if c not in decoders and c.step_ms > p.target_itl_ms), None)
    if decoders and slow:
        raise ConfigError(
            f"group {name}: a step of component {slow.name} takes {slow.step_ms:g} ms and cannot be split, longer than "
            f"target_itl_ms {p.target_itl_ms:g}, so component {decoders[0].name} in the same group would stall; "
            "give it a group of its own"
        )
    served = [c for c in parts if c.role == "language_model"]
    if served and len(parts) > 1:
        raise ConfigError(f"group {name}: component {served[0].name} is served by the log and needs a group of its own")
    if not served and group.tensor_parallel_size != 1:
        raise ConfigError(f"group {name}: tensor_parallel_size: only a language model can be split over ranks")
    if not served and group.device != "cpu":
        raise ConfigError(f"group {name}: device {group.device!r}: components without a log run on cpu")
    if group.tensor_parallel_size < 1 or (group.threads is not None and group.threads < 1):
        raise ConfigError(f"group {name}: tensor_parallel_size and threads must be at least 1")
