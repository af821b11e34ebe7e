"""`slipstream plan`: checks a composite model's placement, prints it, and draws it. Loads and fetches nothing."""

import argparse
import pathlib

from slipstream.errors import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", help="a placement's YAML file, or a known composite model (voice)")
    parser.add_argument(
        "--draw", metavar="FILE", action="append", default=[], help="write a picture: a .svg or .png; may be repeated"
    )


def run(args: argparse.Namespace) -> int:
    from slipstream.graph import draw
    from slipstream.graph.known import KNOWN, is_composite
    from slipstream.graph.placement import load

    if not is_composite(args.config):
        raise ConfigError(f"{args.config!r} is neither a .yaml file nor one of {', '.join(KNOWN)}")
    for file in args.draw:
        if not file.endswith((".svg", ".png")):
            raise ConfigError(f"--draw {file}: the name must end in .svg or .png")
    placement, model = load(args.config)
    for line in report(placement, model):
        print(line)
    picture = draw.lay_out(model, placement)
    for file in args.draw:
        data = draw.svg(picture).encode() if file.endswith(".svg") else draw.png(picture)
        try:
            pathlib.Path(file).write_bytes(data)
        except OSError as e:
            raise ConfigError(f"--draw {file}: {e.strerror}") from None
    return 0


def report(placement, model) -> list[str]:
    """The groups with their components and weights on disk, then the edges between groups."""
    from slipstream.graph.launch import SEGMENT_BYTES
    from slipstream.graph.model import policy_of

    lines = [f"model {model.name} ({placement.model}), target_itl_ms {placement.target_itl_ms:g}", ""]
    lines.append(f"{'group':8} {'device':6} {'ranks':>5} {'threads':>7} {'weights':>9}  components")
    for name, group in placement.groups.items():
        weights = sum(weight_bytes(placement.settings.get(c, {}).get("weights")) for c in group.components)
        size = f"{weights / 1e6:.0f} MB" if weights else "-"
        parts = ", ".join(f"{c} ({model.by_name[c].role.replace('_', ' ')})" for c in group.components)
        lines.append(f"{name:8} {group.device:6} {group.tensor_parallel_size:>5} {group.threads or '-':>7} {size:>9}  {parts}")
    functions = ", ".join(c.name for c in model.components if c.role == "function")
    lines.append(f"{'front':8} {'-':6} {'-':>5} {'-':>7} {'-':>9}  {functions} (functions in the front end)")
    workers = 1 + sum(all(model.by_name[c].role != "language_model" for c in g.components) for g in placement.groups.values())
    lines += ["", f"arena: {workers} segments of at most {SEGMENT_BYTES >> 20} MiB; a page takes memory once it is touched", ""]
    lines.append("edges between groups:")
    for walk in model.walks:
        for link in walk.links:
            ends = [placement.group_of(place.split(".")[0]) for place in (link.source, link.target)]
            if ends[0] != ends[1] and not link.source.startswith("in.") and not link.target.startswith("out."):
                lines.append(f"  {walk.name}: {link.source} -> {link.target} ({ends[0]} -> {ends[1]}, {policy_of(link)})")
    return lines


def weight_bytes(weights: str | None) -> int:
    """Bytes on disk of a package's members, a folder or a file; 0 if unknown until fetched."""
    from slipstream.weights.packages import PACKAGES

    if not weights:
        return 0
    if weights in PACKAGES:
        return sum(m.size for m in PACKAGES[weights].members)
    path = pathlib.Path(weights)
    return sum(p.stat().st_size for p in (path.rglob("*") if path.is_dir() else [path]) if p.is_file())
