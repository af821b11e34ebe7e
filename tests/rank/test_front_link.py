"""The leader's link to a front end: it never blocks, it is bounded, and its end has a reason."""

import socket
import threading
import time

import msgspec
import pytest

from slipstream.log.request import Request, SamplingParams
from slipstream.process.protocol import Abort, Finished, Refused, Submit
from slipstream.rank import front_link
from slipstream.rank.front_link import FrontLink
from slipstream.rank.leader_driver import BEHIND_BYTES, BEHIND_SECONDS, Choices, LeaderDriver
from slipstream.system.framing import Frames, frame


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


BIAS = tuple((i, 1.0) for i in range(10_000))


def submit(first: int, count: int) -> Submit:
    sampling = SamplingParams(logit_bias=BIAS, seed=7)
    return Submit(Request(first, b"\0" * 400, 8, sampling), tuple(range(first + 1, first + count)))


def test_choices_share_what_is_large_and_differ_in_their_number():
    requests = list(msgspec.msgpack.decode(msgspec.msgpack.encode(submit(10, 3)), type=Submit).requests())
    assert [(r.id, r.sampling.choice, r.sampling.seed) for r in requests] == [(10, 0, 7), (11, 1, 7), (12, 2, 7)]
    assert all(r.sampling.logit_bias is requests[0].sampling.logit_bias and r.prompt is requests[0].prompt for r in requests)


def test_requests_beyond_the_queue_s_bytes_are_refused_until_others_have_ended(ends):
    link, theirs = ends
    driver = LeaderDriver.__new__(LeaderDriver)
    driver.owner, driver.held_bytes = {}, 0
    driver.queue_bytes = 2 * Choices.of(link, submit(0, 2)).weight
    taken = []
    driver.take = lambda event, now: taken.extend(r.id for r in event.requests())  # type: ignore[method-assign]
    for first in (10, 20, 30):
        driver.submit(Choices.of(link, submit(first, 2)), submit(first, 2), 0.0)
    assert taken == [10, 11, 20, 21] and driver.held_bytes == driver.queue_bytes
    link.flush()
    refused = [msgspec.msgpack.decode(body, type=Refused) for body in Frames().feed(theirs.recv(1 << 16))]
    assert [(r.id, r.status) for r in refused] == [(30, 429), (31, 429)] and "--queue-memory-bytes" in refused[0].message
    assert driver.disown(10) is link and driver.held_bytes == driver.queue_bytes, "the other choice still runs"
    assert driver.disown(11) is link and driver.held_bytes == driver.queue_bytes // 2
    driver.submit(Choices.of(link, submit(40, 2)), submit(40, 2), 0.0)
    assert taken[-2:] == [40, 41]
