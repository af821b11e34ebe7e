"""The rings between ranks on one machine: whole messages, wrap-around, wake-ups, bounds."""

import os
import subprocess
import sys
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream import config
from slipstream.errors import Diverged, EngineDown
from slipstream.log.entries import Drop, Entry, Reply, RequestBody
from slipstream.log.request import Request, SamplingParams
from slipstream.process.channel import FollowerEnd, LeaderEnd, Ring
from slipstream.process.group import Group, Spec
from slipstream.rank.leader import MAX_GRAMMAR_BYTES, MAX_UNANSWERED_ENTRIES
from tests.helpers.poll import wait_for
from tests.helpers.server import ROOT, TINY
from tests.helpers.toy_group import request


def ring_pair(size: int) -> tuple[Ring, Ring]:
    """A writer and a reader with maps of their own, as two processes have."""
    memory, event = Ring.create(size)
    return Ring(memory, event), Ring(os.dup(memory), os.dup(event))


def close(*rings: Ring) -> None:
    for ring in rings:
        os.close(ring.memory)
        ring.bell.close()


@settings(max_examples=200, deadline=None)
@given(st.integers(8, 40), st.lists(st.one_of(st.none(), st.integers(0, 160)), max_size=80))
def test_messages_come_whole_in_order_and_once_through_any_wrap_around(words: int, calls: list[int | None]):
    """None reads one message; a number writes one of that length."""
    writer, reader = ring_pair(8 * words)
    sent: list[bytes] = []
    try:
        for i, call in enumerate(calls):
            if call is None:
                assert reader.get() == (sent.pop(0) if sent else None)
                continue
            message = bytes([i % 251]) * call
            need = (4 + call + 7) // 8 * 8
            if 2 * need > 8 * words:
                with pytest.raises(ValueError, match="too large"):
                    writer.put(message)
            elif writer.put(message):
                sent.append(message)
            else:
                assert sent, "an empty ring refused a message that fits"
        while sent:
            assert reader.get() == sent.pop(0)
        assert reader.get() is None
    finally:
        close(writer, reader)


def test_a_full_ring_refuses_and_takes_again_once_read():
    writer, reader = ring_pair(256)
    count = 0
    while writer.put(b"x" * 20):
        count += 1
    assert count == 256 // 24
    assert not writer.put(b"x" * 20)
    assert reader.get() == b"x" * 20
    assert writer.put(b"y" * 20)
    close(writer, reader)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.sampled_from(["put", "turn", "clear"]), max_size=60))
def test_ff14_the_descriptor_is_readable_whenever_a_message_is_unread(calls: list[str]):
    """So a sleeping reader is woken by the write itself, however long it has slept; no timeout is involved."""
    writer, reader = ring_pair(1 << 14)
    end = FollowerEnd(reader, writer)
    unread = 0
    for call in calls:
        if call == "put":
            assert writer.put(end._encoder.encode(Entry(0, -1)))
            unread += 1
        elif call == "turn":
            assert len(end.receive()) == unread
            unread = 0
        elif not unread:
            reader.bell.clear()
        if unread:
            assert wait_for(reader.bell.fileno(), timeout=0)
    assert not wait_for(reader.bell.fileno(), timeout=0) or unread or end.receive() == []
    close(writer, reader)


READER = """
import os, sys
from slipstream.process.channel import FollowerEnd, Ring
from slipstream.log.entries import Entry, Reply, RequestBody
from tests.helpers.poll import wait_for
a, b, c, d = map(int, sys.argv[1:])
end = FollowerEnd(Ring(a, b), Ring(c, d))
while True:
    assert wait_for(*end.descriptors(), timeout=-0.001) # for ever: only a write can wake it
    for message in end.receive():
        if isinstance(message, RequestBody):
            last = sum(message.request.prompt) % 2**32
        else:
            end.answer(Reply(1, message.seq, last))
            if message.seq == 299:
                sys.exit(0)
"""


def test_two_processes_exchange_messages_of_every_size_and_a_sleeper_is_woken():
    out, back = Ring.create(1 << 16), Ring.create(1 << 12)
    fds = (*out, *back)
    process = subprocess.Popen([sys.executable, "-c", READER, *map(str, fds)], pass_fds=fds, cwd=ROOT)
    leader = LeaderEnd([Ring(*out)], [Ring(*back)], 20.0)
    try:
        replies: list[Reply] = []
        for seq in range(300):
            body = RequestBody(request(seq, range(seq * 24)))
            leader.send(body)
            leader.send(Entry(seq, -1))
            if seq < 5:
                time.sleep(0.02)  # let it fall asleep
            while len(replies) <= max(seq - 20, 0):
                assert wait_for(*leader.descriptors(), timeout=20)
                replies += leader.receive()
        while len(replies) < 300:
            assert wait_for(*leader.descriptors(), timeout=20)
            replies += leader.receive()
        assert [r.seq for r in replies] == list(range(300))
        assert all(r.digest == sum(request(r.seq, range(r.seq * 24)).prompt) % 2**32 for r in replies)
        assert process.wait(20) == 0
    finally:
        process.kill()
        process.wait()
        for fd in fds:
            os.close(fd)


def test_ff15_a_reader_that_stands_still_is_an_error_that_names_it_and_no_deadlock():
    out, back = ring_pair(512), ring_pair(512)
    leader, end = LeaderEnd([out[0]], [back[1]], 0.1), FollowerEnd(out[1], back[0])
    with pytest.raises(Diverged, match="rank 1 has not read its channel for 0.08 s"):
        for seq in range(1000):
            leader.send(Entry(seq, -1))
    with pytest.raises(EngineDown, match="stopped reading"):
        for seq in range(1000):
            end.answer(Reply(1, seq, 0))
    close(*out, *back)


def rings_of_a_group(monkeypatch, engine: config.EngineConfig) -> list[int]:
    """The sizes of the rings, to and from the follower, that a group of two makes. No process is started."""
    made: list[int] = []
    create = Ring.create
    monkeypatch.setattr(Ring, "create", staticmethod(lambda size: made.append(size) or create(size)))
    monkeypatch.setattr(Group, "_spawn", lambda self, rank, fds: None)

    class Board:
        fd = 0

        def clear(self, page_size: int) -> None: ...

    Group(Spec(0, engine, TINY, 2, 0), Board()).start()  # type: ignore[arg-type]
    return made


@pytest.mark.parametrize("slots", [1, 128, 4096])
def test_ff15_a_groups_rings_hold_a_whole_window_of_the_largest_messages(monkeypatch, slots: int):
    out, back = rings_of_a_group(monkeypatch, config.EngineConfig(max_num_seqs=slots, max_model_len=1024))
    writer, reader = ring_pair(back)
    end = FollowerEnd(reader, writer)
    for seq in range(MAX_UNANSWERED_ENTRIES + 1):  # every request of a full group ends in one entry, again and again
        end.answer(Reply(slots, 2**40 + seq, 2**64 - 1, (True,) * slots))
    close(writer, reader)
    writer, reader = ring_pair(out)
    leader = LeaderEnd([writer], [], 0.1)
    for seq in range(MAX_UNANSWERED_ENTRIES + 1):
        leader.send(Entry(2**40 + seq, 2**40, tuple(Drop(slot, 2**62, 1000) for slot in range(slots))))
    close(writer, reader)


@pytest.mark.parametrize("length", [1024, 1 << 20])
def test_the_largest_request_that_is_accepted_fits_into_a_groups_rings(monkeypatch, length: int):
    out, _ = rings_of_a_group(monkeypatch, config.EngineConfig(max_model_len=length))
    writer, reader = ring_pair(out)
    sampling = SamplingParams(logit_bias=tuple((i, -99.5) for i in range(262_144)), bad_words=((2**17,) * 64,) * 256)
    largest = Request(2**62, bytes(4 * length), 1, sampling, grammar=bytes(MAX_GRAMMAR_BYTES))
    LeaderEnd([writer], [], 0.1).send(RequestBody(largest))
    assert FollowerEnd(reader, writer).receive() == [RequestBody(largest)]
    close(writer, reader)


def test_ff16_a_ring_has_no_name():
    memory, event = Ring.create(4096)
    assert os.readlink(f"/proc/self/fd/{memory}").startswith("/memfd:")
    os.close(memory)
    os.close(event)
