"""Lines to standard error that never stop the process that writes them."""

import os
import select

MAX_LINE_BYTES = 4096  # what the kernel takes as one, into a pipe that has room


def say(text: str) -> None:
    """A line of the program's own."""
    write_line(f"slipstream: {text}")


def write_line(text: str) -> None:
    """Writes a line, which is lost where nobody can read it: the reader has gone (`2>&1 | head`), or lets a pipe run full."""
    data = text.encode(errors="replace")[: MAX_LINE_BYTES - 1] + b"\n"
    poller = select.poll()
    poller.register(2, select.POLLOUT)
    try:
        if poller.poll(0):
            os.write(2, data)
    except OSError:
        pass


def open_standard_streams() -> None:
    """Where a standard stream is closed, /dev/null takes its number. A socket would get it otherwise, and all that is said."""
    for fd in (0, 1, 2):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free
            os.set_inheritable(fd, True)
