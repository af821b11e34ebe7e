"""The leader's machine: what it makes of replies, and when it tells an end."""

import numpy as np
import pytest

from slipstream.log.batch import Batch, InitSlot
from slipstream.log.caches import one_table
from slipstream.log.entries import Entry, Reply
from slipstream.log.replica import Replica
from slipstream.process.protocol import Finished, Submit, Tokens
from slipstream.rank.effects import Interpreter
from slipstream.rank.events import (
    Arrived,
    DeviceEffect,
    Launch,
    Poison,
    Prepare,
    Send,
    SendReply,
    SendToFront,
    Span,
    Tick,
    Wake,
)
from slipstream.rank.leader import HEARTBEAT, WINDOW, Leader, load_of
from slipstream.schedule.budget import Budget
from slipstream.schedule.planner import Planner
from tests.helpers.toy_group import ToyDevice, ToyGroup, request

LIMITS = one_table(pages=64, slots=8, max_len=256, page_size=4)


class Lone(Interpreter):
    """A leader of two or three whose followers are played by the test."""

    def __init__(self, size: int = 2, asynchronous: bool = True):
        replica = Replica(LIMITS)
        self.leader = Leader(replica, Planner(replica, Budget(64), 100), size, asynchronous)
        self.toy = ToyDevice(LIMITS)
        self.now = 0.0
        self.messages: list = []
        self.entries: list[Entry] = []
        self.batches: list = []
        self.poisoned_by: Poison | None = None

    def on(self, event) -> None:
        self.perform(self.leader.on(event, self.now))

    def send_to_front(self, effect: SendToFront) -> None:
        self.messages.append(effect.message)

    def send(self, effect: Send) -> None:
        if isinstance(effect.message, Entry):
            self.entries.append(effect.message)

    def poison(self, effect: Poison) -> None:
        self.poisoned_by = effect

    def device(self, effect: DeviceEffect) -> None:
        if isinstance(effect, Launch):
            self.batches.append(effect.batch)
        else:
            assert isinstance(effect, InitSlot)
            self.toy.queue(effect)

    def reply(self, effect: SendReply) -> None:
        """The leader notes its own."""

    def prepare(self, effect: Prepare) -> None:
        raise AssertionError("no request here needs a resource")

    def wake(self, effect: Wake) -> None:
        """The test says when time passes."""

    def span(self, effect: Span) -> None:
        """Nobody times this leader."""

    def land(self) -> None:
        self.now += 1e-3
        self.on(Arrived(self.toy.run(self.batches.pop(0))))

    def right(self, seq: int, rank: int = 1) -> Reply:
        digest, existed = self.leader.sealed[seq]
        return Reply(rank, seq, digest, existed)

    def ends(self) -> list[Finished]:
        return [m for m in self.messages if isinstance(m, Finished)]


def test_an_end_waits_until_every_rank_has_acknowledged_the_drop_and_tokens_do_not():
    group = Lone(size=3)
    group.on(Submit(request(1, range(4), 2)))
    while group.batches:
        group.land()
    assert sum(isinstance(m, Tokens) for m in group.messages) == 2 and not group.ends()
    drop = next(e.seq for e in group.entries if any(type(c).__name__ == "Drop" for c in e.commands))
    for seq in range(drop + 1):
        group.on(group.right(seq, rank=1))
    assert not group.ends()
    for seq in range(drop + 1):
        assert not group.ends()
        group.on(group.right(seq, rank=2))
    assert group.ends() == [Finished(1, "length")]


def started(size: int = 2) -> Lone:
    group = Lone(size)
    group.on(Submit(request(1, range(4), 100)))
    group.land()
    group.land()
    return group


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda r: Reply(r.rank, r.seq, r.digest ^ 1, r.existed), "rank 1 differs at entry 1: its digest is"),
        (lambda r: Reply(r.rank, r.seq, r.digest, (False,)), r"rank 1 differs at entry 1: its drops found"),
        (lambda r: Reply(r.rank, r.seq - 1, r.digest, r.existed), "answered entry 0 where 1 was due"),
        (lambda r: Reply(r.rank, r.seq + 1, r.digest, r.existed), "answered entry 2 where 1 was due"),
        (lambda r: Reply(7, r.seq, r.digest, r.existed), "rank 7 differs at entry 1"),
        (lambda r: Reply(0, r.seq, r.digest, r.existed), "rank 0 differs at entry 1"),
    ],
)
def test_ff01_anything_but_one_equal_reply_from_each_rank_in_order_poisons_and_nothing_more_is_written(spoil, says: str):
    group = started()
    group.on(group.right(0))
    group.on(spoil(group.right(1)))
    assert group.poisoned_by is not None and says in group.poisoned_by.reason
    written = len(group.entries)
    group.on(Submit(request(2, range(4))))
    group.now += 10
    group.on(Tick())
    assert len(group.entries) == written


def test_a_reply_to_an_entry_that_was_never_written_poisons():
    group = started()
    for seq in range(group.leader.next):
        group.on(group.right(seq))
    assert group.poisoned_by is None
    group.on(Reply(1, group.leader.next, 0))
    assert group.poisoned_by is not None


def test_ff15_entries_without_a_reply_are_bounded():
    group = Lone()
    group.on(Submit(request(1, range(4), 200)))
    for _ in range(3 * WINDOW):
        if group.batches:
            group.land()
        group.now += 2.0
        group.on(Tick())
    assert len(group.entries) <= WINDOW + 1
    while group.leader.replied[1] < group.leader.next - 1:
        group.on(group.right(group.leader.replied[1] + 1))
    group.land()
    assert len(group.entries) > WINDOW + 1, "it goes on once answers come"


def test_an_idle_leader_writes_an_empty_entry_each_second():
    group = Lone()
    for tenth in range(1, 51):
        group.now = tenth / 10
        group.on(Tick())
        while group.leader.replied[1] < group.leader.next - 1:
            group.on(group.right(group.leader.replied[1] + 1))
    assert 4 <= len(group.entries) * HEARTBEAT <= 6
    assert all(e.step is None and not e.commands for e in group.entries)


def test_serial_scheduling_waits_for_no_reply_and_never_has_two_steps_in_flight():
    group = Lone(asynchronous=False)
    group.on(Submit(request(1, range(4), 30)))
    for _ in range(29):
        assert len(group.batches) == 1
        group.land()
    assert group.leader.steps["overlap"] == 0 and group.leader.replied[1] == -1


def test_asynchronous_scheduling_keeps_one_step_ahead_with_no_order_forced_by_admissions_and_aborts():
    group = ToyGroup(size=2)
    for i in range(10):
        group.submit(request(i, range(5 + i), 30))
        group.turn()
        group.turn()
        if i % 3 == 2:
            group.abort(i)
    group.run()
    group.assert_right()
    assert group.leader.steps["overlap"] >= 0.95 * sum(group.leader.steps.values())


@pytest.mark.parametrize("asynchronous", [False, True])
def test_ff02_no_rank_but_the_leader_looks_at_a_clock(asynchronous: bool):
    """Followers that are told absurd times stay equal: the leader compares every digest."""
    group = ToyGroup(size=3, asynchronous=asynchronous, pages=20)
    for i, rank in enumerate(group.ranks[1:]):
        original = rank.on
        rank.on = lambda event, now=0.0, original=original, i=i: original(event, -1e9 * (i + 1))  # type: ignore[method-assign]
    group.submit(*(request(i, range(5 + i), 30) for i in range(6)))
    group.run()
    group.assert_right()


def test_ff03_outcomes_that_arrive_at_other_times_on_each_rank_change_no_replica():
    """A follower buffers an arrival until an entry's mark names it."""
    group = ToyGroup(size=2, pages=20)
    group.submit(*(request(i, range(5 + i), 12) for i in range(4)))
    follower = group.ranks[1]
    settled = follower.replica.settled_to
    for _ in range(8):
        group.turn()
        marks = [e.settled_to for e in group.entries if isinstance(e, Entry) and e.seq <= follower.applied]
        assert follower.replica.settled_to <= max(marks, default=-1)
    assert follower.replica.settled_to > settled
    group.run()
    group.assert_right()


def test_a_host_that_wakes_late_is_woken_earlier_until_the_device_is_fed():
    """Steps of 20 ms, and wake-ups 8 ms late: with the usual lead each would come after the device has run dry."""
    group = Lone(size=1)
    group.leader.planner.budget.base = 0.02
    group.on(Submit(request(1, range(4), 240)))
    overlapped = []
    for _ in range(100):
        begin = group.now
        group.now = max(group.leader.plan_at(), begin) + 0.008
        if group.now < begin + 0.02:
            group.on(Tick())
        overlapped.append(len(group.batches) == 2)
        group.now = begin + 0.02 - 1e-3
        group.land()
    assert sum(overlapped[10:]) >= 0.95 * len(overlapped[10:])
    late = group.leader.plan_at() - group.leader.arrived_at
    for _ in range(100):  # on a host that is in time it falls back, so that newcomers join soon
        group.on(Tick())
        group.now = max(group.leader.plan_at(), group.now)
        group.on(Tick())
        group.now = group.leader.arrived_at + 0.02 - 1e-3
        group.land()
    assert group.leader.plan_at() - group.leader.arrived_at > late


def test_the_load_of_a_step_at_a_quarter_of_a_million_tokens_is_no_negative_number():
    column = lambda *values: np.array(values, np.int32)
    ones = column(1, 1)
    batch = Batch(0, column(0, 1), column(9, 245_760), column(1, 16_384), ones, 1, 1, np.zeros((0, 4), np.int32))
    assert load_of(batch) == (1, 16_384, 245_760.0)
