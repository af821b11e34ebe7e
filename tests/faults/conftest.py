import pytest

from tests.faults.bad import TIMEOUT, BadServer


@pytest.fixture(scope="module")
def server():
    """One misbehaving server for a module: every fault must leave it serving. Nothing there ends by --step-timeout."""
    with BadServer("-tp", "2", "--step-timeout", "120") as server:
        yield server
        server.wait_healthy()


@pytest.fixture(scope="module")
def watched():
    """The same with a short --step-timeout, for ranks that stand still."""
    with BadServer("-tp", "2", "--step-timeout", str(TIMEOUT)) as server:
        yield server
        server.wait_healthy()
