import pytest

from tests.faults.bad import BadServer


@pytest.fixture(scope="module")
def server():
    """One misbehaving server for a module: every fault must leave it serving."""
    with BadServer("-tp", "2") as server:
        yield server
        server.wait_healthy()
