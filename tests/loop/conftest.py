"""After each test: kill its processes, and check for threads, signal handlers and logging configuration left behind."""

import logging
import signal
import threading
import time

import pytest
from children import kill_all


def remaining_threads():
    """Return the names of threads of jstep that still run after 5 s."""
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        found = [thread.name for thread in threading.enumerate() if thread.name.startswith("jstep")]
        if not found:
            return []
        time.sleep(0.01)
    return found


@pytest.fixture(autouse=True)
def end_processes():
    yield
    kill_all()


@pytest.fixture(autouse=True)
def check_for_leftovers():
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    logger = logging.getLogger("jstep")
    setup = logger.level, logger.propagate, list(logger.handlers)
    yield
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before
    assert (logger.level, logger.propagate, list(logger.handlers)) == setup
    assert remaining_threads() == []
