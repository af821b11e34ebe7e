"""Control sockets: SEQPACKET pairs that carry msgpack with descriptors; and how the supervisor's children begin and end."""

import array
import ctypes
import faulthandler
import gc
import os
import signal
import socket
from typing import Any

import msgspec

from slipstream.process.board import STATES, BoardWriter
from slipstream.process.protocol import Ready, Setup, ToRank

_PR_SET_PDEATHSIG = 1
MAX_MESSAGE_BYTES = 1 << 18  # more than the kernel takes as one message
MAX_DESCRIPTORS = 250
MAX_REASON_CHARS = 4000  # of a text that a child sends: its message must fit


class Control:
    """One end of a control socket. `inward` is the union of messages that arrive here."""

    def __init__(self, sock: socket.socket, inward: Any):
        self.sock = sock
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode = msgspec.msgpack.Decoder(inward).decode

    @classmethod
    def pair(cls, inward: Any) -> tuple["Control", socket.socket]:
        """This process's end, and the socket for the child."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        return cls(ours, inward), theirs

    def fileno(self) -> int:
        return self.sock.fileno()

    def send(self, message: msgspec.Struct, descriptors: tuple[int, ...] | list[int] = ()) -> bool:
        """False when the other end is gone."""
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))] if descriptors else []
        try:
            self.sock.sendmsg([self._encode(message)], rights)
        except OSError:
            return False
        return True

    def receive(self) -> tuple[Any, list[int]] | None:
        """The next message and its descriptors; None at the end. Blocks unless the socket is readable."""
        try:
            data, fds, _, _ = socket.recv_fds(self.sock, MAX_MESSAGE_BYTES, MAX_DESCRIPTORS)
        except OSError:
            return None
        return (self._decode(data), list(fds)) if data else None

    def close(self) -> None:
        self.sock.close()


def die_with_parent(parent: int) -> None:
    """Makes the kernel kill this process when its parent (pid `parent`) ends. Exits at once if the parent has ended."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def begin_member(fd: int, parent: int) -> tuple[Control, Setup, list[int]] | None:
    """The first work of every process of a group. Returns None if the supervisor (pid `parent`) is gone.

    `fd` is its control socket. Signals are left to the supervisor, whose SIGUSR1 asks for this process's stacks.
    """
    die_with_parent(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C goes to all; the supervisor decides
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    faulthandler.register(signal.SIGUSR1)  # stacks for the supervisor's report
    control = Control(socket.socket(fileno=fd), ToRank)
    got = control.receive()
    if got is None:
        return None
    setup, descriptors = got
    assert isinstance(setup, Setup)
    return control, setup, descriptors


def report_ready(control: Control, board: BoardWriter) -> None:
    """The last work of every process of a group before its loop."""
    gc.collect()
    gc.freeze()  # loaded objects stay: a collection that walked them stopped every stream for 80 ms
    board.set("state", STATES.index("ready"))
    control.send(Ready())
