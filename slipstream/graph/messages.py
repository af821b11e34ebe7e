"""Messages between the conductor and a group, addressed by (request, link of its walk). Plain values; `wire` encodes them.

`value` is a text, a numpy array, or what msgpack can carry; None with `last` is an end that came alone. Every request opened at
a group is answered by exactly one `Done` or `Failed`, an aborted one too; `Failed` may be followed by nothing.
"""

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Open:
    """A request's part in this group begins. The group derives the plan from (walk, wanted), as the conductor did."""

    id: int
    walk: str
    wanted: tuple[str, ...]
    params: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Feed:
    """A piece for a link that ends in this group."""

    id: int
    link: int
    value: Any
    last: bool
    tag: int = 0  # the transport's id of the value, 0 for none; set by the receiving side


@dataclass(frozen=True)
class Stop:
    """Ends one component of a request, or all: what it has sent stays, its outputs end, nothing of it follows."""

    id: int
    component: str | None = None


@dataclass(frozen=True)
class Abort:
    """The client is gone: the request's part is dropped and answered with Done."""

    id: int


@dataclass(frozen=True)
class Took:
    """`count` pieces of a link were used, so its producer may send as many more."""

    id: int
    link: int
    count: int


@dataclass(frozen=True, eq=False)
class Piece:
    """A piece for a link that starts in this group and ends elsewhere."""

    id: int
    link: int
    value: Any
    last: bool


@dataclass(frozen=True)
class Done:
    id: int


@dataclass(frozen=True)
class Failed:
    """A component refused the request or its step raised. `status`: 400 where the request's content is at fault, else 500."""

    id: int
    component: str
    message: str
    status: int = 500


ToGroup = Open | Feed | Stop | Abort | Took
FromGroup = Piece | Took | Done | Failed
