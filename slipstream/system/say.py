"""Writes lines to standard error. A failure to write never stops the process."""

import os
import select

MAX_LINE_BYTES = 4096  # the bytes that the kernel writes to a pipe at once


def say(text: str) -> None:
    """A line of the program's own."""
    write_line(f"slipstream: {text}")


def write_line(text: str) -> None:
    """Writes a line. It is lost if it cannot be read: the reader has gone (`2>&1 | head`), or has let a pipe fill up."""
    data = text.encode(errors="replace")[: MAX_LINE_BYTES - 1] + b"\n"
    poller = select.poll()
    poller.register(2, select.POLLOUT)
    try:
        if poller.poll(0):
            os.write(2, data)
    except OSError:
        pass


def open_standard_streams() -> None:
    """Opens /dev/null for each closed standard stream. Otherwise a socket would get its number, and our messages."""
    for fd in (0, 1, 2):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free number
            os.set_inheritable(fd, True)
