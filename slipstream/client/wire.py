"""Parsers of HTTP/1.1 answers and of event streams. They do no I/O: they take bytes as they come, split anywhere."""

from slipstream.errors import SlipstreamError


class ServerError(SlipstreamError):
    """The server refused, failed, or broke the protocol. `status` is the HTTP status, 0 if there is none."""

    def __init__(self, message: str, status: int = 0):
        super().__init__(f"HTTP {status}: {message}" if status else message)
        self.status = status


class Response:
    """Parses one response (RFC 9112): status line and headers, then a body by length, by chunks, or until the end."""

    def __init__(self) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self.done = False
        self.keep = False  # whether the connection may serve another request
        self._buffer = bytearray()
        self._left = 0  # bytes of the body or of the current chunk to come
        self._mode = "head"

    def feed(self, data: bytes) -> bytes:
        """The body's bytes that `data` completes. Raises ServerError for bytes that are not HTTP."""
        self._buffer += data
        body = bytearray()
        while not self.done and getattr(self, "_" + self._mode)(body):
            pass
        return bytes(body)

    def feed_eof(self) -> None:
        """The peer closed. Raises ServerError unless this body ends with the connection."""
        if self.done:
            return
        if self._mode != "rest":
            raise ServerError("the server closed the connection in mid-answer", self.status if self.status >= 400 else 0)
        self.done = True

    def _line(self) -> bytes | None:
        end = self._buffer.find(b"\n")
        if end < 0:
            if len(self._buffer) > 65536:
                raise ServerError("a header line over 64 KiB")
            return None
        line = bytes(self._buffer[:end]).rstrip(b"\r")
        del self._buffer[: end + 1]
        return line

    def _head(self, body: bytearray) -> bool:
        line = self._line()
        if line is None:
            return False
        if not self.status:
            parts = line.split(None, 2)
            if len(parts) < 2 or not parts[0].startswith(b"HTTP/1.") or not parts[1].isdigit():
                raise ServerError(f"not an HTTP/1.1 answer: {line[:60]!r}")
            self.status = int(parts[1])
            self.keep = parts[0] == b"HTTP/1.1"
        elif line:
            name, _, value = line.partition(b":")
            self.headers[name.decode("latin-1").strip().lower()] = value.decode("latin-1").strip()
        elif self.status < 200:  # 100 Continue and similar: the real answer follows
            self.status, self.headers = 0, {}
        else:
            self._choose_body()
        return True

    def _choose_body(self) -> None:
        if "close" in self.headers.get("connection", "").lower():
            self.keep = False
        if "chunked" in self.headers.get("transfer-encoding", "").lower():
            self._mode = "size"
        elif self.status in (204, 304):
            self.done = True
        elif "content-length" in self.headers:
            self._left = int(self.headers["content-length"])
            self._mode, self.done = "length", self._left == 0
        else:
            self._mode, self.keep = "rest", False

    def _take(self, body: bytearray) -> bool:
        """Moves bytes of the current piece; returns whether it is complete."""
        body += self._buffer[: self._left]
        taken = min(self._left, len(self._buffer))
        del self._buffer[:taken]
        self._left -= taken
        return self._left == 0

    def _length(self, body: bytearray) -> bool:
        self.done = self._take(body)
        return False

    def _rest(self, body: bytearray) -> bool:
        body += self._buffer
        self._buffer.clear()
        return False

    def _size(self, body: bytearray) -> bool:
        line = self._line()
        if line is None:
            return False
        try:
            self._left = int(line.split(b";", 1)[0], 16)
        except ValueError:
            raise ServerError(f"a chunk's size is not a hexadecimal number: {line[:40]!r}") from None
        self._mode = "chunk" if self._left else "trailer"
        return True

    def _chunk(self, body: bytearray) -> bool:
        if not self._take(body):
            return False
        self._mode = "chunk_end"
        return True

    def _chunk_end(self, body: bytearray) -> bool:
        line = self._line()
        if line is None:
            return False
        if line:
            raise ServerError("a chunk is longer than its size says")
        self._mode = "size"
        return True

    def _trailer(self, body: bytearray) -> bool:
        line = self._line()
        if line is None:
            return False
        self.done = not line
        return True


class Events:
    """Splits a `text/event-stream` into the data of its events (WHATWG HTML §9.2; ids and names are not needed)."""

    def __init__(self) -> None:
        self._tail = b""
        self._data: list[bytes] = []

    def feed(self, data: bytes) -> list[bytes]:
        lines = (self._tail + data).split(b"\n")
        self._tail = lines.pop()
        out: list[bytes] = []
        for line in lines:
            line = line.rstrip(b"\r")
            if line.startswith(b"data:"):
                self._data.append(line[5:].lstrip(b" "))
            elif not line and self._data:
                out.append(b"\n".join(self._data))
                self._data = []
        return out
