"""The supervisor's verdicts: who is blamed when ranks stand still, and what a group agrees on before it begins."""

import json
import os
import time
from types import SimpleNamespace

import pytest

from slipstream import config
from slipstream.log.caches import one_table
from slipstream.process.board import STATES, Board
from slipstream.process.group import Group, Member, Spec, State
from slipstream.process.protocol import Begin, Fault, Loaded

SECOND = 10**9


@pytest.fixture
def group():
    """A group of three whose ranks are words on the board; no process is started."""
    board = Board.create(3)
    group = Group(Spec(0, config.EngineConfig(device="sim"), "", 3, 0), board)
    group.state = State.READY
    group.members = [Member(r, SimpleNamespace(), Inbox(), -1) for r in range(3)]  # type: ignore[arg-type]
    for rank in range(3):
        show(group, rank, pid=100 + rank, rank=rank, state=STATES.index("ready"), launched=5, arrived=5)
    yield group
    os.close(board.fd)


class Inbox:
    """A control socket: what the rank has said, and what it was told."""

    def __init__(self):
        self.said: list = []
        self.sent: list = []

    def receive(self):
        return (self.said.pop(0), []) if self.said else None

    def send(self, message, descriptors=()) -> bool:
        self.sent.append(message)
        return True


def show(group: Group, page_size: int, beat_ago: float = 0.0, **words: int) -> None:
    now = time.monotonic_ns()
    for name, value in {"beat_ns": now - int(beat_ago * SECOND), **words}.items():
        group.board.writer(page_size).set(name, value)


def say(group: Group, rank: int, message) -> None:
    group.members[rank].control.said.append(message)  # type: ignore[attr-defined]
    group.on_message(group.members[rank])


def test_a_group_that_moves_is_left_alone(group: Group):
    group.check(5.0)
    assert group.failure is None


def test_of_several_ranks_that_stand_still_the_one_that_stood_first_is_blamed(group: Group):
    show(group, 0, beat_ago=6.0)
    show(group, 1, beat_ago=7.0)
    group.check(5.0)
    assert group.failure is not None and group.failure.startswith("rank 1 has made no progress for 5 s")


def test_in_a_hanging_step_the_rank_behind_in_outcomes_is_blamed(group: Group):
    late = time.monotonic_ns() - 6 * SECOND
    show(group, 0, launched=6, arrived=5, launched_ns=late, arrived_ns=late)
    show(group, 1, launched=6, arrived=6)
    show(group, 2, launched=6, arrived=4, launched_ns=late, arrived_ns=late)
    group.check(5.0)
    assert group.failure is not None and group.failure.startswith("rank 2 has made no progress")


def test_in_a_hanging_step_the_rank_that_the_others_sum_with_is_blamed(group: Group):
    late = time.monotonic_ns() - 6 * SECOND
    for rank in range(3):
        show(group, rank, launched=6, launched_ns=late, arrived_ns=late, collective=40)
    show(group, 0, sums_with=2 + 1)
    show(group, 1, sums_with=2 + 1)
    group.check(5.0)
    assert group.failure is not None and group.failure.startswith("rank 2 has made no progress")
    assert "had launched 6" in group.failure and "40 collectives" in group.failure


def test_a_long_queue_of_steps_that_keep_arriving_is_no_hang(group: Group):
    now = time.monotonic_ns()
    show(group, 0, launched=9, arrived=8, launched_ns=now - 9 * SECOND, arrived_ns=now - SECOND)
    group.check(5.0)
    assert group.failure is None


def test_before_all_are_ready_nobody_is_judged(group: Group):
    group.state = State.STARTING
    show(group, 1, beat_ago=1000.0)
    group.check(5.0)
    assert group.failure is None


def test_ff17_every_capacity_is_the_least_of_the_ranks(group: Group):
    for rank, (pages, slots, length, host) in enumerate([(100, 9, 700, 5), (80, 12, 800, 4), (90, 10, 600, 3)]):
        say(group, rank, Loaded(one_table(pages, slots, length, host_pages=host), 0, "same"))
    begin = Begin(one_table(80, 9, 600, host_pages=3))
    assert all(m.control.sent == [begin] for m in group.members)  # type: ignore[attr-defined]


def test_ranks_whose_pages_differ_in_kind_stop_the_start(group: Group):
    for rank, page_size in enumerate((16, 16, 64)):
        say(group, rank, Loaded(one_table(10, 2, 100, page_size), 0, "same"))
    assert group.refused and group.failure == "the ranks differ in page size: 16 and 64"


def test_ff17_a_rank_of_another_build_or_configuration_stops_the_start_by_name(group: Group):
    for rank, stamp in enumerate(["a", "a", "b"]):
        say(group, rank, Loaded(one_table(1, 1, 1), 0, stamp))
    assert group.refused and group.failure is not None
    assert "rank 2 differs from rank 0" in group.failure and "'b' against 'a'" in group.failure
    assert not any(m.control.sent for m in group.members)  # type: ignore[attr-defined]


def test_the_first_reason_stays_and_a_mistake_of_the_configuration_is_not_tried_again(group: Group):
    say(group, 1, Fault(1, -1, "--dtype cannot be used", refusal=True))
    say(group, 0, Fault(0, -1, "rank 0 lost its peer"))
    assert group.failure == "--dtype cannot be used" and group.refused and group.state is State.POISONED


def test_a_signal_to_the_process_and_one_to_its_group_ask_once():
    """`timeout` and some init systems send both at once; only a later one means: at once."""
    from slipstream.process.supervisor import SAME_SIGNAL_S, Supervisor

    supervisor = Supervisor([], Board.create(1), 30.0)
    supervisor.stop()
    supervisor.stop()
    assert supervisor._asked.qsize() == 1
    time.sleep(2 * SAME_SIGNAL_S)
    supervisor.stop()
    assert supervisor._asked.qsize() == 2


def test_asked_once_it_drains_asked_twice_it_hurries_and_asked_a_third_time_it_waits_for_nobody(monkeypatch):
    from types import SimpleNamespace

    from slipstream.process import supervisor as module
    from slipstream.process.protocol import Drain

    monkeypatch.setattr(module, "SAME_SIGNAL_S", -1.0)
    supervisor = module.Supervisor([], Board.create(1), 30.0)
    sent: list[Drain] = []
    supervisor.fronts = [SimpleNamespace(control=SimpleNamespace(send=sent.append))]  # type: ignore[list-item]
    for messages, code in (([Drain(20.0)], None), ([Drain(20.0), Drain(0.0)], None), ([Drain(20.0), Drain(0.0)], 0)):
        supervisor.stop()
        supervisor._on("asked", None)
        assert (sent, supervisor.code) == (messages, code)


def test_a_flight_record_has_no_spans_of_the_incarnation_before(group: Group, tmp_path):
    """Both counted their entries from 0: together they would tell another story."""
    now = time.monotonic_ns()
    old = group.board.writer(1)
    for entry in (7, 8):
        old.span(1, now - 2 * SECOND, now - SECOND, entry, 0xABC)
    group.board.clear(1)
    group.started_ns = now
    group.board.writer(1).span(1, now + 1, now + 2, 7, 0xDEF)
    file = group.record(tmp_path)
    assert file is not None
    spans = json.loads(file.read_text())["ranks"][1]["spans"]
    assert [(s["entry"], s["digest"]) for s in spans] == [(7, f"{0xDEF:016x}")]
