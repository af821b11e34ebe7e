"""Messages between front ends and an encoder's process, beside those of `process.protocol` that both kinds share."""

import msgspec

from slipstream.process.protocol import Abort, Finished, Load, Refused


class Encode(msgspec.Struct, frozen=True, tag=True):
    """Texts of one request, as ids. The process answers with one `Encoded`, `Refused` or `Finished(reason="error")`.

    `firsts`: for each pair of texts the number of ids that belong to its first part (token type 0); () where texts stand alone.
    """

    id: int
    rows: tuple[bytes, ...]  # int32 little-endian token ids
    firsts: tuple[int, ...] = ()


class Encoded(msgspec.Struct, frozen=True, tag=True):
    """The result of a whole request: float32 little-endian [texts, width]; width is 1 for scores."""

    id: int
    data: bytes


ToEncoder = Encode | Abort
FromEncoder = Encoded | Refused | Finished | Load
