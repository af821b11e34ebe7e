"""The leader's side of the stream to one front end. Never blocks: what the front end does not read is kept, up to a bound."""

import socket

import msgspec

from slipstream.process.protocol import ToFront, ToLeader
from slipstream.system.framing import BadFrame, Frames, frame

MAX_UNSENT = 64 << 20  # bytes
_READ = 1 << 18  # bytes


class FrontLink:
    """Messages both ways, in order. `closed` says why the link has ended, "" while it has not; nothing is sent then."""

    def __init__(self, sock: socket.socket):
        sock.setblocking(False)
        self.sock = sock
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode = msgspec.msgpack.Decoder(ToLeader).decode
        self._unsent = bytearray()
        self._frames = Frames()
        self.closed = ""

    def fileno(self) -> int:
        return self.sock.fileno()

    def queue(self, message: ToFront) -> None:
        self._unsent += frame(self._encode(message))

    @property
    def unsent(self) -> int:
        """Bytes that wait until the front end reads."""
        return len(self._unsent)

    def flush(self) -> None:
        """Sends what the socket takes. A front end that leaves MAX_UNSENT bytes unread is cut off."""
        if not self._unsent or self.closed:
            return
        try:
            sent = self.sock.send(self._unsent)
            del self._unsent[:sent]
        except BlockingIOError:
            pass
        except OSError as e:
            self.close(f"sending to it failed: {e.strerror}")
        if len(self._unsent) > MAX_UNSENT:
            self.close(f"it has left more than {MAX_UNSENT >> 20} MiB unread")

    def receive(self) -> list[ToLeader]:
        """Whole messages that have arrived; sets `closed` at the end of the stream, or where it holds something else."""
        out: list[ToLeader] = []
        while not self.closed:
            try:
                data = self.sock.recv(_READ)
            except BlockingIOError:
                break
            except OSError:
                data = b""
            if not data:
                self.close("it has closed the stream")
                break
            try:
                out.extend(map(self._decode, self._frames.feed(data)))
            except (BadFrame, msgspec.MsgspecError) as e:
                self.close(f"it has sent something that is not a message: {e}")
            if len(data) < _READ:
                break
        return out

    def close(self, why: str) -> None:
        if not self.closed:
            self.closed = why
            self.sock.close()
