"""From token ids to text, piece by piece. Pure; a stream is a value of one answer and holds at most three bytes."""

import codecs
from collections.abc import Callable, Iterable
from typing import Protocol


class Stream(Protocol):
    """The text of one answer as its ids come: the pieces of `push` and of one final `flush` joined are the whole text."""

    def push(self, id: int) -> str: ...

    def flush(self) -> str:
        """The text held back; the stream can go on afterwards."""
        ...


class TextStream:
    """Text of ids as they come: the pieces of `push` and of one final `flush` joined are the whole decoded text.

    Never emits half a character: bytes that could still become one are held back. Bytes that cannot are U+FFFD, as Unicode
    recommends (one for each maximal part of a character); `flush` writes the held bytes so.
    `strip_space`: one leading space of the whole text is not part of it (SentencePiece puts it before a text's first word).
    """

    __slots__ = ("_bytes_of", "_skipped", "_decoder", "_strip")

    def __init__(self, bytes_of: Callable[[int], bytes], skipped: frozenset[int], strip_space: bool):
        self._bytes_of = bytes_of
        self._skipped = skipped
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._strip = strip_space

    def push(self, id: int) -> str:
        if id in self._skipped:
            return ""
        data = self._bytes_of(id)
        if self._strip and data:
            self._strip = False
            data = data.removeprefix(b" ")
        return self._decoder.decode(data)

    def flush(self) -> str:
        """The held bytes, as U+FFFD; the stream can go on afterwards."""
        return self._decoder.decode(b"", final=True)


def decode(ids: Iterable[int], bytes_of: Callable[[int], bytes], skipped: frozenset[int], strip_space: bool) -> str:
    """The text of all ids at once."""
    data = b"".join([bytes_of(i) for i in ids if i not in skipped])
    return (data.removeprefix(b" ") if strip_space else data).decode("utf-8", "replace")
