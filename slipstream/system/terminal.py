"""The console for tables."""

import os
import sys

from rich.console import Console

FILE_WIDTH = 160  # columns without a terminal, so that a log or a report is not cut off


def console() -> Console:
    """Standard output, as wide as the terminal, or `FILE_WIDTH` without one. COLUMNS overrides both."""
    out = Console()
    if not sys.stdout.isatty() and not os.environ.get("COLUMNS"):
        out.width = FILE_WIDTH
    return out
