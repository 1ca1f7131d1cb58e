"""After each test: kill its processes, and check for threads, signal handlers and logging
configuration left behind."""

import logging
import signal
import threading
import time

import jax
import pytest
from children import kill_all
from repositories import fake_git, repository  # noqa: F401  (fixtures)


def remaining_threads():
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


@pytest.fixture
def compiling_threads():
    """The names of the threads that compile, one for each program."""
    seen = []

    def listener(event, duration, **_):
        if event == "/jax/core/compile/backend_compile_duration":
            seen.append(threading.current_thread().name)

    jax.monitoring.register_event_duration_secs_listener(listener)
    yield seen
    jax.monitoring.unregister_event_duration_listener(listener)


@pytest.fixture(autouse=True)
def check_for_leftovers():
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    logger = logging.getLogger("jstep")
    setup = logger.level, logger.propagate, list(logger.handlers)
    yield
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before
    assert (logger.level, logger.propagate, list(logger.handlers)) == setup
    assert remaining_threads() == []
