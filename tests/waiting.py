"""Waiting for other threads in tests, with a time limit."""

import threading
import time

TIMEOUT = 20  # seconds after which a hanging test fails


def wait_until(condition):
    deadline = time.monotonic() + TIMEOUT
    while not condition():
        assert time.monotonic() < deadline, "timed out waiting for the condition"
        time.sleep(0.001)


def prefetch_threads():
    """Return the threads that read batches ahead."""
    return [thread for thread in threading.enumerate() if thread.name == "jstep-prefetch"]
