"""A run leaves nothing behind: no thread, no handler of a signal, no setup of logging."""

import logging
import signal
import threading
import time

import pytest


def leftovers():
    """Threads that a run has left behind; those of libraries may linger for a moment."""
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        found = [thread.name for thread in threading.enumerate() if thread.name.startswith("jstep")]
        if not found:
            return []
        time.sleep(0.01)
    return found


@pytest.fixture(autouse=True)
def nothing_left_behind():
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    logger = logging.getLogger("jstep")
    setup = logger.level, logger.propagate, list(logger.handlers)
    yield
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before
    assert (logger.level, logger.propagate, list(logger.handlers)) == setup
    assert leftovers() == []
