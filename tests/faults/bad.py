"""A server whose ranks misbehave on demand, and what every fault must lead to."""

import json
import os
import time
from typing import Any

from tests.helpers.server import Clients, Server

AT_ONCE = 2.0  # seconds within which a fault that shows itself reaches every client
TIMEOUT = 4.0  # --step-timeout where ranks stand still; elsewhere it is so long that no end can come from it
PROGRAM = ("-m", "tests.faults.bad_server")
SIM = ("--device", "sim", "--enable-debug")


class BadServer(Server):
    def __init__(self, *args: str, start_fault: dict | None = None, **more: Any):
        env = {"FAULT_START": json.dumps(start_fault)} if start_fault else {}
        device = () if "--device" in args else SIM
        super().__init__(*device, *args, program=PROGRAM, env=env, **more)

    @property
    def fault_file(self) -> str:
        return str(self.folder / "fault.json")

    def arm(self, fault: str, rank: int, lasting: bool = False) -> float:
        """Has `rank` commit `fault` at its next opportunity. Returns the time."""
        draft = self.fault_file + ".draft"
        with open(draft, "w") as file:
            json.dump({"rank": rank, "fault": fault, "lasting": lasting}, file)
        os.rename(draft, self.fault_file)
        return time.monotonic()

    def wait_committed(self) -> None:
        self.until(lambda: not os.path.exists(self.fault_file), "the fault")

    def assert_recovers(self, old: set[int]) -> None:
        """The ranks `old` are gone, a new group serves, and its memory is as anonymous as the old one's."""
        self.wait_healthy()
        assert self.complete().status == 200
        assert not old & set(self.family()), "old ranks are alive"
        self.assert_no_names()


def assert_poisons(server: BadServer, fault: str, rank: int, within: float, lasting: bool = False) -> str:
    """Under load, `rank` commits `fault`: each client hears exactly one error in time, and the server comes back.

    Returns the verdict, a line of the log.
    """
    server.wait_healthy()
    before = len(server.log)
    old = {r["pid"] for r in server.ranks().values()}
    clients = Clients(server, 3, max_tokens=7000)
    clients.wait_started()
    since = server.arm(fault, rank, lasting)
    if fault.split(":")[-1] in ("admit", "prefill", "half published"):
        late = Clients(server, 1, prompt="x" * 3000, max_tokens=2000)
        late.assert_one_error_each(since, within)
    clients.assert_one_error_each(since, within)
    server.assert_recovers(old)
    lines = [line for line in server.log[before:].splitlines() if "is down:" in line]
    assert len(lines) == 1, lines
    return lines[0]
