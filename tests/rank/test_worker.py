"""How a rank and a worker of components say that they cannot start."""

import pytest

from slipstream.errors import ModelError
from slipstream.graph import worker as graph_worker
from slipstream.process.control import Control
from slipstream.process.protocol import Fault, FromRank, Setup, ToRank
from slipstream.rank import worker


@pytest.mark.parametrize(("error", "refusal"), [(ModelError, True), (RuntimeError, False)])
@pytest.mark.parametrize("module", [worker, graph_worker])
def test_a_reason_of_any_length_reaches_the_supervisor(module, error: type[Exception], refusal: bool, monkeypatch):
    """One that does not fit into a message of the control socket would end the supervisor instead of the group."""
    supervisor, theirs = Control.pair(FromRank)
    control = Control(theirs, ToRank)
    monkeypatch.setattr(module, "begin_member", lambda fd, parent: (control, Setup("{}", "", 0, 1, 0, 1, 0), []))

    def fail(*_) -> int:
        raise error("no such tensor, " * 50_000)

    monkeypatch.setattr(module, "run", fail)
    monkeypatch.setattr("sys.argv", ["worker", "0", "0"])
    assert (module.main(["0", "0"]) if module is graph_worker else module.main()) == 1
    fault, _ = supervisor.receive() or (None, [])
    assert isinstance(fault, Fault) and "no such tensor" in fault.reason and fault.refusal is refusal


def test_a_setup_with_a_long_template_arrives_whole():
    control, theirs = Control.pair(FromRank)
    template = "{# a long remark #}" * 8000
    control.send(Setup(template, "", 0, 1, 0, 1, 0))
    setup, _ = Control(theirs, ToRank).receive() or (None, [])
    assert isinstance(setup, Setup) and setup.engine == template
