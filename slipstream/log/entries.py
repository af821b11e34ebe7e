"""Entries: what the leader writes and every rank, the leader included, applies in order.

Plain values, msgpack on the wire. Rows travel as columns of packed little-endian int32.
"""

import msgspec
import numpy as np

from slipstream.errors import BadEntry
from slipstream.log.request import Request

NO_OVERLAP, OVERLAP, LATE_SAMPLE = 0, 1, 2
ORDERS = ("no_overlap", "overlap", "late_sample")


class Admit(msgspec.Struct, frozen=True, array_like=True, tag=0):
    """Gives request `id`, whose body came ahead, a slot and the pages of its prompt; or pages again after a preemption."""

    slot: int
    id: int


class Drop(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """Frees a slot and its pages. Every rank must answer that the request existed.

    `kept` is how many generated tokens stay part of the answer (-1: all). Pages beyond them leave the prefix index.
    """

    slot: int
    id: int
    kept: int = -1


class Preempt(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """Takes a request's pages; it keeps its slot, tokens and sampling state, and waits for an Admit.

    `keep`: the pages' contents go to host memory first, and the Admit restores them; else they are computed again.
    """

    slot: int
    keep: bool = False


Command = Admit | Drop | Preempt


class Step(msgspec.Struct, frozen=True, array_like=True):
    """One forward. `decode`: the width of the row that each decoding slot has, in the replica's order; 0: no such rows.

    These rows are not named. `rows` holds the named rows that follow them, as int32 columns slots, starts, counts and sampled,
    one after the other.
    """

    order: int
    decode: int
    rows: bytes = b""

    def columns(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """The named rows. Raises BadEntry where `rows` is not four columns of one length."""
        if len(self.rows) % 16:
            raise BadEntry(f"the named rows of a step have {len(self.rows)} bytes; four int32 columns have a multiple of 16")
        slots, starts, counts, sampled = np.frombuffer(self.rows, "<i4").reshape(4, -1)
        return slots, starts, counts, sampled


def named(rows: "list[tuple[int, int, int, int]]") -> bytes:
    """(slot, start, count, sampled) of each row, as `Step.rows`."""
    return np.array(rows, "<i4").T.tobytes()


class Entry(msgspec.Struct, frozen=True, array_like=True, tag=10):
    """One record of the log. Outcomes through entry `settled_to` are applied before the commands.

    `side_messages` counts the messages of other kinds that were sent between the entry before and this one, so that a rank
    notices at once when one of them is missing.
    """

    seq: int
    settled_to: int
    commands: tuple[Command, ...] = ()
    step: Step | None = None
    side_messages: int = 0


class RequestBody(msgspec.Struct, frozen=True, array_like=True, tag=11):
    """A request's body, sent ahead of the entry that admits it. A rank answers a body with a grammar by a Prepared."""

    request: Request


class Forget(msgspec.Struct, frozen=True, array_like=True, tag=13):
    """A request whose body was sent ahead will not be admitted."""

    id: int


class Prepared(msgspec.Struct, frozen=True, array_like=True, tag=14):
    """A rank has compiled a request's grammar, or could not (`error`)."""

    rank: int
    id: int
    error: str = ""


class Reply(msgspec.Struct, frozen=True, array_like=True, tag=12):
    """A rank's answer to entry `seq`, right after launching its step (or after its commands, where it has none).

    `existed` has one value per Drop of the entry, in order.
    """

    rank: int
    seq: int
    digest: int
    existed: tuple[bool, ...] = ()


ToFollower = Entry | RequestBody | Forget
FromFollower = Reply | Prepared
