"""Figures as a table, as JSON, and the progress bar."""

import contextlib
import json
import pathlib
import typing
from collections.abc import Callable, Iterator


def table(title: str, figures: dict[str, typing.Any]) -> None:
    """Prints one row a figure to stdout; errors are red, their reasons and a note follow."""
    from rich.table import Table

    from slipstream.system.terminal import console

    out = Table(title=title, title_justify="left", show_header=False, box=None, padding=(0, 2, 0, 0))
    for name, value in figures.items():
        if name not in ("error_reasons", "note"):
            style = "bold red" if name in ("errors", "wrong") and value else None
            out.add_row(*label(name), shown(value), style=style)
    screen = console()
    screen.print(out)
    if "note" in figures:
        screen.print(f"  {figures['note']}", style="yellow", markup=False, highlight=False)
    for reason, count in figures.get("error_reasons", {}).items():
        screen.print(f"  {count} x {reason}", style="red", markup=False, highlight=False)


def label(name: str) -> tuple[str]:
    """A figure's name in the table: `itl_p999_ms` is "itl p99.9, ms"."""
    unit = ""
    if name.endswith("_ms") and not name.endswith("over_50_ms"):
        name, unit = name[:-3], ", ms"
    words = name.replace("_per_s", "/s").replace("_", " ").replace("p999", "p99.9")
    for short in ("ttft", "itl", "tpot"):
        words = words.replace(short, short.upper())
    return (words + unit,)


def shown(value: typing.Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.1f}" if abs(value) >= 100 else f"{value:.2f}" if abs(value) >= 1 else f"{value:.3f}"
    return str(value)


def write_json(path: str, report: dict[str, typing.Any]) -> None:
    pathlib.Path(path).write_text(json.dumps(report, indent=2) + "\n")


@contextlib.contextmanager
def progress(title: str, total: int) -> Iterator[Callable[[int], None]]:
    """A progress bar on stderr, removed at its end; yields the function that sets how many are done."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(title, total=total)
        yield lambda done: bar.update(task, completed=done)
