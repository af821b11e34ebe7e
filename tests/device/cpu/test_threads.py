"""A crew gives way to other programs, and takes its threads again when the machine has room."""

import pytest
import torch

from slipstream.device.cpu.threads import HOLD_S, MAX_HOLD_S, Crew, free_seconds


class Machine:
    """Its idle time goes on with the clock as the test says."""

    def __init__(self):
        self.now = 100.0
        self.idle = 0.0

    def passes(self, seconds: float, idle_cores: float) -> None:
        self.now += seconds
        self.idle += seconds * idle_cores


@pytest.fixture
def machine():
    before = torch.get_num_threads()
    yield Machine()
    torch.set_num_threads(before)


def crew_of(machine: Machine, most: int = 2) -> Crew:
    return Crew(most, lambda: machine.idle)


def loses_cores(crew: Crew, machine: Machine) -> None:
    for _ in range(2):
        crew.observe(machine.now, 0.4, 0.2)


def test_work_that_keeps_its_core_keeps_its_threads(machine):
    crew = crew_of(machine)
    for _ in range(50):
        machine.passes(0.02, 0.0)
        crew.observe(machine.now, 0.02, 0.0195)
    assert crew.count == 2 == torch.get_num_threads()


def test_short_work_is_no_sign(machine):
    crew = crew_of(machine)
    for _ in range(9):
        crew.observe(machine.now, 0.002, 0.0001)
    assert crew.count == 2


def test_one_hiccup_is_no_sign(machine):
    crew = crew_of(machine)
    for _ in range(5):
        crew.observe(machine.now, 0.06, 0.02)
        for _ in range(9):
            crew.observe(machine.now, 0.02, 0.0199)
    assert crew.count == 2


def test_one_thread_is_left_where_others_take_the_cores_until_there_is_room_for_more(machine):
    crew = crew_of(machine, most=3)
    loses_cores(crew, machine)
    assert crew.count == 1 == torch.get_num_threads()
    machine.passes(HOLD_S, 1.0)
    crew.look(machine.now)
    assert crew.count == 1, "one idle core is not enough for two more threads"
    machine.passes(HOLD_S / 2, 2.0)
    crew.look(machine.now)
    assert crew.count == 1, "it has not been idle for long enough"
    machine.passes(HOLD_S / 2, 2.0)
    crew.look(machine.now)
    assert crew.count == 3 == torch.get_num_threads()


def test_threads_that_lose_their_cores_again_and_again_are_tried_less_often(machine):
    """Where a container is held back, the machine looks idle all the time."""
    crew = crew_of(machine)
    waits = []
    for _ in range(8):
        loses_cores(crew, machine)
        since = machine.now
        while crew.count == 1:
            machine.passes(0.1, 1.0)
            crew.look(machine.now)
        waits.append(machine.now - since)
        machine.passes(0.4, 1.0)
    assert waits[0] == pytest.approx(HOLD_S, abs=0.11) and waits[-1] == pytest.approx(MAX_HOLD_S, abs=0.11)
    assert waits == sorted(waits)
    machine.passes(MAX_HOLD_S + 1, 1.0)
    loses_cores(crew, machine)
    machine.passes(HOLD_S, 1.0)
    crew.look(machine.now)
    assert crew.count == 2, "after a long good time the wait is short again"


def test_what_the_system_says_of_its_idle_time_grows():
    assert 0.0 <= free_seconds() <= free_seconds()
