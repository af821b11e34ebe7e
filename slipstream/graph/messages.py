"""Messages between the conductor and a group, addressed by (request, link of its walk), and their encoding.

A value is a text, a numpy array, or any value that msgpack can carry; None with `last` is an end that came alone. Arrays of
more than `INLINE_BYTES` bytes travel through a transport; the message holds a `Stored` instead. Every request opened at a group
is answered by exactly one `Done` or `Failed`, an aborted one by `Done`. No message about the request follows.
"""

import struct
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np

from slipstream.system import framing

INLINE_BYTES = 4096
ROOM_WAIT_SECONDS = 30.0  # seconds that a value waits for room in the transport before its request fails
_LENGTH = struct.Struct("<I")
_ID = struct.Struct("<q")


class Open(msgspec.Struct, frozen=True, tag=True):
    """Opens a request's part in this group. The group derives the plan from (walk, wanted), as the conductor did."""

    id: int
    walk: str
    wanted: tuple[str, ...]
    params: dict[str, Any] = {}


class Feed(msgspec.Struct, frozen=True, tag=True, eq=False):
    """A piece for a link that ends in this group. `tag` is the transport's id of the value, 0 for none."""

    id: int
    link: int
    value: Any
    last: bool
    tag: int = 0


class Stop(msgspec.Struct, frozen=True, tag=True):
    """Ends one component of a request, or all: sent pieces stay, its outputs end, no piece of it follows."""

    id: int
    component: str | None = None


class Abort(msgspec.Struct, frozen=True, tag=True):
    """The client is gone: the request's part is dropped."""

    id: int


class Took(msgspec.Struct, frozen=True, tag=True):
    """`count` pieces of a link were used, so its producer may send that many more."""

    id: int
    link: int
    count: int


class Inspect(msgspec.Struct, frozen=True, tag=True):
    """Asks for a request's state; answered by `Standing`, after all messages sent before."""

    id: int


class Forget(msgspec.Struct, frozen=True, tag=True):
    """A process of the transport is gone; the values that it held are released."""

    peer: int


class Piece(msgspec.Struct, frozen=True, tag=True, eq=False):
    """A piece for a link that starts in this group and ends elsewhere: at component `to`, or at the client ("out")."""

    id: int
    link: int
    value: Any
    last: bool
    to: str


class Done(msgspec.Struct, frozen=True, tag=True):
    """The group has ended its part of the request."""

    id: int


class Failed(msgspec.Struct, frozen=True, tag=True):
    """A component refused the request or its step raised. `status`: 400 if the request's content is at fault, else 500."""

    id: int
    component: str
    message: str
    status: int = 500
    param: str | None = None  # the parameter at fault


class Standing(msgspec.Struct, frozen=True, tag=True):
    """Whether a request has a step running or due in this group, and what each component without one waits for."""

    id: int
    moves: bool
    waits: dict[str, str] = {}


ToWork = Open | Feed | Stop | Abort | Took | Inspect  # messages about one request
ToGroup = ToWork | Forget
FromGroup = Piece | Took | Standing | Done | Failed


class Stored(msgspec.Struct, frozen=True):
    """A reference to a value in the transport."""

    id: int


def _enc(value: Any) -> msgspec.msgpack.Ext:
    if isinstance(value, Stored):
        return msgspec.msgpack.Ext(2, _ID.pack(value.id))
    if isinstance(value, np.ndarray):
        head = msgspec.msgpack.encode((value.dtype.str, value.shape))
        return msgspec.msgpack.Ext(1, _LENGTH.pack(len(head)) + head + value.tobytes())
    if isinstance(value, np.generic):
        return _enc(np.asarray(value))
    raise TypeError(f"a value of {type(value).__name__} cannot be sent")


def _ext(code: int, data: memoryview) -> Any:
    if code == 2:
        return Stored(_ID.unpack(data)[0])
    (n,) = _LENGTH.unpack_from(data)
    dtype, shape = msgspec.msgpack.decode(data[4 : 4 + n])
    return np.frombuffer(bytes(data[4 + n :]), np.dtype(dtype)).reshape(shape)


_encoder = msgspec.msgpack.Encoder(enc_hook=_enc)
_decoders = {to: msgspec.msgpack.Decoder(to, ext_hook=_ext) for to in (ToGroup, FromGroup)}


def _plain(message: Any) -> Any:
    """`Stored` is a struct itself, so msgspec would not call the hook for it."""
    value = getattr(message, "value", None)
    return msgspec.structs.replace(message, value=_enc(value)) if isinstance(value, Stored) else message


def encode(message: Any) -> bytes:
    """Encodes one message, with its length before it."""
    return framing.frame(_encoder.encode(_plain(message)))


def with_value(message: Any, value: Any, tag: int = 0) -> Any:
    """A copy of the message with another value and, for a Feed, tag."""
    more = {"tag": tag} if tag else {}
    return msgspec.structs.replace(message, value=value, **more)


class Frames:
    """Cuts a byte stream into messages. `kind` is ToGroup or FromGroup."""

    def __init__(self, kind: Any):
        self._decode = _decoders[kind].decode
        self._frames = framing.Frames()

    def feed(self, data: bytes) -> Iterator[Any]:
        return map(self._decode, self._frames.feed(data))
