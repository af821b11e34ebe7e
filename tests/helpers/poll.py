"""Waiting for descriptors in tests, and in the small processes that tests start."""

import select


def wait_for(*descriptors: int, timeout: float) -> list[int]:
    """Descriptors that became readable within `timeout` seconds; a negative one waits for ever."""
    poller = select.poll()
    for fd in descriptors:
        poller.register(fd, select.POLLIN)
    return [fd for fd, _ in poller.poll(timeout * 1e3)]
