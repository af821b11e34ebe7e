"""Draws a composite model and where it runs: as SVG by hand, as PNG with Pillow from the same shapes.

One column per distance from the input; a component's colour is its group's. The client's inputs are below the component that
takes them, its outputs above the one that makes them.
"""

import html
import io
from dataclasses import dataclass

from slipstream.errors import ConfigError
from slipstream.graph.chunks import Whole
from slipstream.graph.model import Loop, Model, policy_of
from slipstream.graph.placement import Placement

BOX_W, BOX_H, GAP_X, GAP_Y, PORT_W, PORT_H, MARGIN = 150, 56, 96, 44, 110, 26, 28
COLOURS = ("#cfe3f7", "#d9efd2", "#fbe3c3", "#e6d7f3", "#f7d3d3", "#d3efee", "#eeeac2")
FRONT_COLOUR, INK, LINE, STREAM = "#ececec", "#222222", "#555555", "#1a66b3"


@dataclass(frozen=True)
class Box:
    x: float
    y: float
    w: float
    h: float
    fill: str
    lines: tuple[str, ...]


@dataclass(frozen=True)
class Arrow:
    points: tuple[tuple[float, float], ...]
    label: str
    stream: bool


@dataclass(frozen=True)
class Drawing:
    width: float
    height: float
    boxes: tuple[Box, ...]
    arrows: tuple[Arrow, ...]
    title: str


def depths(model: Model) -> dict[str, int]:
    """Each component's longest distance from an input, over all walks, without loops."""
    before: dict[str, set[str]] = {c.name: set() for c in model.components}
    for walk in model.walks:
        for link in walk.links:
            source, target = link.source.split(".")[0], link.target.split(".")[0]
            if target in before and source in before and not isinstance(link, Loop):
                before[target].add(source)
    out: dict[str, int] = {}
    for _ in before:
        for name, sources in before.items():
            out[name] = max((out.get(s, 0) + 1 for s in sources), default=0)
    return out


def lay_out(model: Model, placement: Placement) -> Drawing:
    """The place of every shape, in pixels of the SVG."""
    columns: dict[int, list[str]] = {}
    for name, depth in depths(model).items():
        columns.setdefault(depth, []).append(name)
    links = list(dict.fromkeys((link.source, link.target, link) for walk in model.walks for link in walk.links))
    ins, outs = _ports(links, "in."), _ports(links, "out.")
    top = MARGIN + 30 + max((len(v) for v in outs.values()), default=0) * (PORT_H + 10) + 20
    places: dict[str, tuple[float, float]] = {}
    boxes: list[Box] = []
    colours = {name: COLOURS[i % len(COLOURS)] for i, name in enumerate(placement.groups)}
    for depth, names in columns.items():
        for row, name in enumerate(names):
            group = placement.group_of(name)
            x, y = MARGIN + depth * (BOX_W + GAP_X), top + row * (BOX_H + GAP_Y)
            places[name] = (x, y)
            lines = (name, model.by_name[name].role.replace("_", " "), f"group {group}" if group != "front" else "front end")
            boxes.append(Box(x, y, BOX_W, BOX_H, colours.get(group, FRONT_COLOUR), lines))
    for table, sign in ((outs, -1), (ins, 1)):
        for name, ports in table.items():
            x, y = places[name]
            for i, port in enumerate(ports):
                base = y - 20 - PORT_H if sign < 0 else y + BOX_H + 20
                px, py = x + (BOX_W - PORT_W) / 2, base + sign * i * (PORT_H + 10)
                places.setdefault(port, (px, py))
                boxes.append(Box(*places[port], PORT_W, PORT_H, "#ffffff", (port,)))
    arrows = tuple(_arrow(places, source, target, link) for source, target, link in links)
    width = max(b.x + b.w for b in boxes) + MARGIN
    height = max(b.y + b.h for b in boxes) + MARGIN
    return Drawing(width, height, tuple(dict.fromkeys(boxes)), arrows, f"{model.name}: components, edges and groups")


def _ports(links, prefix: str) -> dict[str, list[str]]:
    """The client's ports, by the component that they belong to."""
    out: dict[str, list[str]] = {}
    for source, target, _ in links:
        port, other = (source, target) if prefix == "in." else (target, source)
        if port.startswith(prefix) and port not in (p for ports in out.values() for p in ports):
            out.setdefault(other.split(".")[0], []).append(port)
    return out


def _arrow(places, source: str, target: str, link) -> Arrow:
    a, b = places.get(source) or places[source.split(".")[0]], places.get(target) or places[target.split(".")[0]]
    policy = policy_of(link)
    stream = not isinstance(policy, Whole)
    numbers = ", ".join(str(v) for v in vars(policy).values() if v is not False and v is not True)
    label = f"{type(policy).__name__}({numbers})" if stream else "whole"
    port = (target if source.startswith("in.") else source).split(".")[1]
    if source.startswith("in."):
        return Arrow(((a[0] + PORT_W / 2, a[1]), (b[0] + BOX_W / 2, b[1] + BOX_H)), "", stream)
    if target.startswith("out."):
        return Arrow(((a[0] + BOX_W / 2, a[1]), (b[0] + PORT_W / 2, b[1] + PORT_H)), "", stream)
    start, end = (a[0] + BOX_W, a[1] + BOX_H / 2), (b[0], b[1] + BOX_H / 2)
    if isinstance(link, Loop):
        lift = min(a[1], b[1]) - 16
        return Arrow((start, (start[0] + 14, lift), (end[0] - 14, lift), end), f"{port}: loop", stream)
    shift = 9 * (sum(map(ord, port)) % 3 - 1)  # two edges between the same boxes do not hide each other
    return Arrow(((start[0], start[1] + shift), (end[0], end[1] + shift)), f"{port}: {label}", stream)


def svg(d: Drawing) -> str:
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{d.width:g}" height="{d.height:g}" font-family="sans-serif" '
        f'font-size="12" fill="{INK}"><rect width="100%" height="100%" fill="#fff"/>',
        f'<defs><marker id="a" markerWidth="9" markerHeight="8" refX="8" refY="4" orient="auto"><path d="M0,0 L9,4 L0,8 z" '
        f'fill="{LINE}"/></marker></defs><text x="{MARGIN}" y="{MARGIN}" font-size="15">{html.escape(d.title)}</text>',
    ]
    for a in d.arrows:
        path = " ".join(f"{x:g},{y:g}" for x, y in a.points)
        out.append(
            f'<polyline points="{path}" fill="none" stroke="{STREAM if a.stream else LINE}" '
            f'stroke-width="1.5" marker-end="url(#a)"{" stroke-dasharray=" + chr(34) + "6 3" + chr(34) if a.stream else ""}/>'
        )
        x, y = _middle(a)
        out.append(f'<text x="{x:g}" y="{y - 4:g}" text-anchor="middle" font-size="10">{html.escape(a.label)}</text>')
    for b in d.boxes:
        out.append(f'<rect x="{b.x:g}" y="{b.y:g}" width="{b.w:g}" height="{b.h:g}" rx="6" fill="{b.fill}" stroke="{LINE}"/>')
        for i, line in enumerate(b.lines):
            y = b.y + (b.h - 15 * len(b.lines)) / 2 + 12 + 15 * i
            weight = ' font-weight="bold"' if i == 0 and len(b.lines) > 1 else ""
            out.append(f'<text x="{b.x + b.w / 2:g}" y="{y:g}" text-anchor="middle"{weight}>{html.escape(line)}</text>')
    return "\n".join([*out, "</svg>\n"])


def _middle(a: Arrow) -> tuple[float, float]:
    (x0, y0), (x1, y1) = a.points[len(a.points) // 2 - 1], a.points[len(a.points) // 2]
    return (x0 + x1) / 2, (y0 + y1) / 2


def png(d: Drawing, scale: int = 2) -> bytes:
    """The same picture as PNG bytes. Raises ConfigError without Pillow."""
    try:
        from PIL import Image, ImageDraw, ImageFont
    except ImportError:
        raise ConfigError("a .png needs Pillow: pip install pillow (an .svg does not)") from None
    image = Image.new("RGB", (int(d.width * scale), int(d.height * scale)), "#ffffff")
    pen = ImageDraw.Draw(image)
    fonts = {size: ImageFont.load_default(size * scale) for size in (10, 12, 15)}

    def text(x: float, y: float, line: str, size: int, anchor: str = "ms") -> None:
        pen.text((x * scale, y * scale), line, INK, fonts[size], anchor)

    text(MARGIN, MARGIN, d.title, 15, "ls")
    for a in d.arrows:
        colour = STREAM if a.stream else LINE
        points = [(x * scale, y * scale) for x, y in a.points]
        pen.line(points, colour, 1 + scale)
        _head(pen, points, colour, scale)
        text(*_middle(Arrow(tuple((x, y - 4) for x, y in a.points), "", False)), a.label, 10)
    for b in d.boxes:
        corners = (b.x * scale, b.y * scale, (b.x + b.w) * scale, (b.y + b.h) * scale)
        pen.rounded_rectangle(corners, 6 * scale, b.fill, LINE, scale)
        for i, line in enumerate(b.lines):
            text(b.x + b.w / 2, b.y + (b.h - 15 * len(b.lines)) / 2 + 12 + 15 * i, line, 12)
    out = io.BytesIO()
    image.save(out, "PNG")
    return out.getvalue()


def _head(pen, points, colour: str, scale: int) -> None:
    (x0, y0), (x1, y1) = points[-2:]
    length = max(((x1 - x0) ** 2 + (y1 - y0) ** 2) ** 0.5, 1)
    dx, dy = (x1 - x0) / length * 8 * scale, (y1 - y0) / length * 8 * scale
    pen.polygon([(x1, y1), (x1 - dx - dy / 2, y1 - dy + dx / 2), (x1 - dx + dy / 2, y1 - dy - dx / 2)], colour)
