"""The leader's link to a front end: it never blocks, it is bounded, and its end has a reason."""

import socket
import threading
import time

import msgspec
import pytest

from slipstream.process.protocol import Abort, Finished
from slipstream.rank import front_link
from slipstream.rank.front_link import FrontLink
from slipstream.rank.leader_driver import BEHIND_BYTES, BEHIND_SECONDS, LeaderDriver
from slipstream.system.framing import frame


@pytest.fixture
def ends():
    ours, theirs = socket.socketpair()
    yield FrontLink(ours), theirs
    ours.close()
    theirs.close()


def test_a_front_end_that_does_not_read_is_cut_off_with_a_reason(ends, monkeypatch):
    link, _ = ends
    monkeypatch.setattr(front_link, "MAX_UNSENT", 1 << 20)
    link.queue(Finished(1, "error", "x" * (2 << 20)))
    link.flush()
    assert link.closed == "it has left more than 1 MiB unread"


def test_what_is_not_a_message_ends_the_link_and_what_came_before_it_counts(ends):
    link, theirs = ends
    theirs.sendall(frame(msgspec.msgpack.encode(Abort(7))) + frame(b"\xc1\xc1"))
    assert link.receive() == [Abort(7)]
    assert link.closed.startswith("it has sent something that is not a message")


def test_a_front_end_that_has_closed_is_gone(ends):
    link, theirs = ends
    theirs.close()
    assert link.receive() == [] and link.closed == "it has closed the stream"


def eased(link: FrontLink) -> float:
    """Seconds that a driver with this link waits for it."""
    driver = LeaderDriver.__new__(LeaderDriver)
    driver.fronts = {link.fileno(): link}
    begin = time.monotonic()
    driver.ease()
    return time.monotonic() - begin


def test_the_leader_waits_for_a_front_end_that_reads_but_not_for_long(ends):
    link, theirs = ends
    link.queue(Finished(1, "error", "x" * (BEHIND_BYTES + (1 << 20))))
    link.flush()
    before = link.unsent
    assert eased(link) >= BEHIND_SECONDS and link.unsent == before, "nobody reads, and the leader goes on after a moment"
    reader = threading.Thread(target=lambda: all(iter(lambda: theirs.recv(1 << 20), b"")))
    reader.start()
    for _ in range(1000):
        if link.unsent > BEHIND_BYTES:
            eased(link)
    assert link.unsent <= BEHIND_BYTES
    link.close("over")
    reader.join()
