"""The channel over TCP, between processes on loopback: the same interface, bounded, and never a deadlock."""

import contextlib
import subprocess
import sys
import time

import msgspec
import pytest
import zmq

from slipstream.errors import ConfigError, Diverged, EngineDown
from slipstream.log.entries import Entry, Prepared, Reply, RequestBody
from slipstream.process import channel_tcp
from slipstream.process.channel_tcp import connect, serve_followers
from tests.helpers.poll import wait_for
from tests.helpers.server import ROOT
from tests.helpers.toy_group import request

FOLLOWER = """
import sys, msgspec
from slipstream.log.entries import Entry, Reply
from slipstream.process.channel_tcp import Address, connect
from tests.helpers.poll import wait_for
end = connect(msgspec.json.decode(sys.argv[1], type=Address), int(sys.argv[2]))
while True:
    assert wait_for(*end.descriptors(), timeout=20)
    for message in end.receive():
        if isinstance(message, Entry):
            end.answer(Reply(int(sys.argv[2]), message.seq, message.seq * 3, (True,)))
            if message.settled_to == 99:
                end.close()
                sys.exit(0)
"""


def follower(address, rank: int) -> subprocess.Popen:
    return subprocess.Popen([sys.executable, "-c", FOLLOWER, msgspec.json.encode(address).decode(), str(rank)], cwd=ROOT)


def collect(leader, count: int) -> list:
    out = []
    end = time.monotonic() + 30
    while len(out) < count:
        assert wait_for(*leader.descriptors(), timeout=30) and time.monotonic() < end, f"{len(out)} of {count} replies"
        out += leader.receive()
    return out


def test_entries_reach_all_processes_in_order_and_replies_come_back_in_order():
    address, leader = serve_followers(2)
    processes = [follower(address, rank) for rank in (1, 2)]
    try:
        leader.send(RequestBody(request(7, range(1000))))
        for seq in range(200):
            leader.send(Entry(seq, 99 if seq == 199 else -1))
        replies = collect(leader, 400)
        for rank in (1, 2):
            assert [r.seq for r in replies if r.rank == rank] == list(range(200))
        assert all(r.digest == r.seq * 3 and r.existed == (True,) for r in replies)
        assert [p.wait(20) for p in processes] == [0, 0]
    finally:
        for p in processes:
            p.kill()
        leader.close()


@pytest.fixture
def pair(monkeypatch):
    monkeypatch.setattr(channel_tcp, "MAX_QUEUED_MESSAGES", 16)
    address, leader = serve_followers(1, patience=0.2)
    end = connect(address, 1)
    leader.send(Entry(0, -1))
    assert wait_for(*end.descriptors(), timeout=20)
    while not end.receive():
        assert wait_for(*end.descriptors(), timeout=20)
    yield leader, end
    leader.close()
    end.close()


def test_ff14_a_descriptor_is_readable_whenever_something_is_unread_also_after_sends(pair):
    """ZeroMQ tells once; a send in between must not eat the notice."""
    leader, end = pair
    for seq in range(1, 200):
        end.answer(Reply(1, seq, 0))
        if seq % 3 == 0:
            end.answer(Prepared(1, seq))
        leader.send(Entry(seq, -1))
        leader.send(Entry(seq, 0))  # a send right after something may have come
        assert wait_for(*leader.descriptors(), timeout=20), f"nothing to read after {seq}"
        got = leader.receive()
        while len(got) < (2 if seq % 3 == 0 else 1):
            assert wait_for(*leader.descriptors(), timeout=20)
            got += leader.receive()
        entries = []
        while len(entries) < 2:
            assert wait_for(*end.descriptors(), timeout=20)
            entries += end.receive()
    assert not leader.receive() and not end.receive()


def test_ff15_a_peer_that_does_not_read_is_an_error_that_names_it_and_no_deadlock(pair):
    leader, end = pair
    body = RequestBody(request(1, range(20_000)))
    with pytest.raises(Diverged, match="rank 1 has not read its channel"):
        for _ in range(20_000):
            leader.send(body)
    with pytest.raises(EngineDown, match="stopped reading"):
        for seq in range(100_000):
            end.answer(Reply(1, seq, 0, (True,) * 20_000))


def test_who_does_not_know_the_key_is_not_heard():
    address, leader = serve_followers(1, patience=0.5)
    other, _ = zmq.curve_keypair()
    stranger = connect(channel_tcp.Address(address.host, address.ports, other.decode()), 1)
    with contextlib.suppress(EngineDown):
        stranger.answer(Reply(1, 0, 0))
    wait_for(*leader.descriptors(), timeout=0.5)
    assert not leader.receive()
    with pytest.raises(Diverged):
        leader.send(Entry(0, -1))
    stranger.close()
    end = connect(address, 1)  # and the right one still can connect
    end.answer(Reply(1, 0, 5))
    assert collect(leader, 1) == [Reply(1, 0, 5)]
    leader.close()
    end.close()


def test_ff16_no_port_is_fixed():
    ends = [serve_followers(2) for _ in range(3)]
    assert len({port for address, _ in ends for port in address.ports}) == 6
    for _, leader in ends:
        leader.close()


def test_a_host_that_is_not_ours_is_refused_by_name():
    with pytest.raises(ConfigError, match="cannot listen for ranks on 203.0.113.1"):
        serve_followers(1, host="203.0.113.1")
