"""A stream between a front end and a leader that ends while both run on."""

from tests.faults.bad import BadServer
from tests.helpers.server import Clients


def test_a_link_that_the_leader_has_ended_is_renewed_and_the_group_runs_on():
    """Each client hears one error, both sides say why, and the server serves again without a restart."""
    with BadServer("-tp", "2", "--step-timeout", "120") as server:
        ranks = {r["pid"] for r in server.ranks().values()}
        for _ in range(2):
            clients = Clients(server, 3, max_tokens=7000)
            clients.wait_started()
            since = server.arm("front link cut", 0)
            clients.assert_one_error_each(since, 5.0)
            server.wait_healthy(30)
            assert server.complete().status == 200
        assert {r["pid"] for r in server.ranks().values()} == ranks
        for line in (
            "the leader has lost a front end: a fault of the test",
            "the link to the model's process was lost",
            "a front end has lost its link to group 0 and gets another",
        ):
            assert server.log.count(line) == 2, server.log[-6000:]
