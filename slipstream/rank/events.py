"""What goes into a rank's machine and what comes out of it. Plain values; the driver turns effects into I/O, in order."""

from typing import NamedTuple

import numpy as np

from slipstream.log.batch import Batch, DeviceOp, Outcome
from slipstream.log.entries import Entry, Forget, Prepared, Reply, RequestBody
from slipstream.log.grammar import Matcher
from slipstream.log.request import Resource
from slipstream.process.protocol import Abort, Submit, ToFront

# --- events


class Arrived(NamedTuple):
    """An outcome came back from the device."""

    outcome: Outcome


class Tick(NamedTuple):
    """Time has passed (leader only)."""


class ResourcesReady(NamedTuple):
    """What this rank was asked to prepare for a request is there, or could not be made."""

    id: int
    made: dict[str, Matcher]  # by kind of resource
    error: str = ""


Event = Entry | RequestBody | Forget | Reply | Prepared | Arrived | Tick | Submit | Abort | ResourcesReady

# --- effects


class Send(NamedTuple):
    """To every follower, in order."""

    message: Entry | RequestBody | Forget


class Prepare(NamedTuple):
    """Make a request's resources beside the loop, then send ResourcesReady."""

    id: int
    resources: tuple[Resource, ...]


class Launch(NamedTuple):
    """Queue a whole step."""

    batch: Batch


class LaunchForward(NamedTuple):
    """Queue a step up to its logits."""

    batch: Batch


class LaunchSample(NamedTuple):
    """Queue the sampling of the step whose forward was queued."""

    seq: int
    masks: dict[int, np.ndarray]  # slot -> uint32 bit masks [sampled, words] of allowed ids
    discarded: frozenset[int]  # slots that ended since the forward was queued: no mask for them, their tokens do not count


class SendReply(NamedTuple):
    """This rank's reply to an entry, or its report that a request's resources are prepared. The leader only notes its own."""

    reply: Reply | Prepared


class SendToFront(NamedTuple):
    """To the front end that owns the message's request."""

    message: ToFront


class Wake(NamedTuple):
    """Send a Tick at this time (seconds, the driver's clock)."""

    at: float


class Span(NamedTuple):
    """The time since the effect before was spent in this phase, for this entry."""

    phase: str
    entry: int


class Poison(NamedTuple):
    """The group is no longer one: a rank answered wrongly. Names the rank and the first entry that differs."""

    rank: int
    entry: int
    reason: str


DeviceEffect = DeviceOp | Launch | LaunchForward | LaunchSample
Effect = DeviceEffect | Send | Prepare | SendReply | SendToFront | Wake | Span | Poison
