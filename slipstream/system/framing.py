"""Messages in a stream of bytes: each stands behind its length, four bytes, little endian. Over sockets and over pipes."""

import struct
from collections.abc import Iterator
from typing import BinaryIO

MAX_FRAME = 1 << 30  # bytes of one message; a longer one means that the stream is not what it should be
_LENGTH = struct.Struct("<I")


class BadFrame(ValueError):
    """A message is longer than the stream may carry."""


def head(body: bytes | bytearray) -> bytes:
    """What stands before a message."""
    return _LENGTH.pack(len(body))


def frame(body: bytes) -> bytes:
    """One message with its length before it."""
    return head(body) + body


class Frames:
    """Cuts a stream into messages, however it was cut on its way."""

    def __init__(self, most: int = MAX_FRAME):
        self._most = most
        self._rest = bytearray()

    def feed(self, data: bytes | bytearray) -> Iterator[memoryview]:
        """The messages that `data` completes, each without its length. Take them all. Raises BadFrame."""
        if self._rest:
            self._rest += data
            data = self._rest
        at = 0
        while len(data) - at >= 4:
            (length,) = _LENGTH.unpack_from(data, at)
            if length > self._most:
                raise BadFrame(f"a message of {length} bytes; at most {self._most} are allowed")
            end = at + 4 + length
            if end > len(data):
                break
            yield memoryview(data)[at + 4 : end]
            at = end
        if at or data is not self._rest:
            self._rest = bytearray(memoryview(data)[at:])


def read_frame(stream: BinaryIO) -> bytes | None:
    """The next message of a pipe, waited for; None at its end."""
    length = stream.read(4)
    return stream.read(_LENGTH.unpack(length)[0]) if len(length) == 4 else None


def write_frame(stream: BinaryIO, body: bytes) -> None:
    stream.write(head(body))
    stream.write(body)
    stream.flush()
