"""Where tables go."""

import os
import sys

from rich.console import Console

FILE_WIDTH = 160  # columns where there is no terminal: a log or a report is not cut at the edge of one


def console() -> Console:
    """Standard output, as wide as the terminal or as `FILE_WIDTH` (COLUMNS says otherwise)."""
    out = Console()
    if not sys.stdout.isatty() and not os.environ.get("COLUMNS"):
        out.width = FILE_WIDTH
    return out
