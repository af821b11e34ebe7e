"""The leader's side of the stream to one front end. Never blocks: what the front end does not read is kept, up to a bound."""

import socket
import struct

import msgspec

from slipstream.process.protocol import ToFront, ToLeader

MAX_UNSENT = 64 << 20  # bytes
_LENGTH = struct.Struct("<I")


class FrontLink:
    """Messages both ways, in order. `closed` once the front end is gone or was cut off; nothing is sent then."""

    def __init__(self, sock: socket.socket):
        sock.setblocking(False)
        self.sock = sock
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode = msgspec.msgpack.Decoder(ToLeader).decode
        self._unsent = bytearray()
        self._rest = bytearray()
        self.closed = False

    def fileno(self) -> int:
        return self.sock.fileno()

    def queue(self, message: ToFront) -> None:
        body = self._encode(message)
        self._unsent += _LENGTH.pack(len(body))
        self._unsent += body

    @property
    def blocked(self) -> bool:
        """Whether something waits to be sent, so that the driver should watch for room."""
        return bool(self._unsent)

    def flush(self) -> None:
        """Sends what the socket takes. A front end that leaves MAX_UNSENT bytes unread is cut off."""
        if not self._unsent or self.closed:
            return
        try:
            sent = self.sock.send(self._unsent)
            del self._unsent[:sent]
        except BlockingIOError:
            pass
        except OSError:
            self.close()
        if len(self._unsent) > MAX_UNSENT:
            self.close()

    def receive(self) -> list[ToLeader]:
        """Whole messages that have arrived; sets `closed` at the end of the stream."""
        while True:
            try:
                data = self.sock.recv(1 << 18)
            except BlockingIOError:
                break
            except OSError:
                data = b""
            if not data:
                self.close()
                break
            self._rest += data
            if len(data) < 1 << 18:
                break
        out, at = [], 0
        while len(self._rest) - at >= 4:
            (length,) = _LENGTH.unpack_from(self._rest, at)
            if len(self._rest) - at - 4 < length:
                break
            out.append(self._decode(memoryview(self._rest)[at + 4 : at + 4 + length]))
            at += 4 + length
        if at:
            self._rest = self._rest[at:]
        return out

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self.sock.close()
