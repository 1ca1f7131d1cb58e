"""Waiting for other threads in tests, with a time limit."""

import signal
import threading
import time

import pytest

TIMEOUT = 20  # seconds after which a hanging test fails


def wait_until(condition):
    deadline = time.monotonic() + TIMEOUT
    while not condition():
        assert time.monotonic() < deadline, "timed out waiting for the condition"
        time.sleep(0.001)


def interrupt(call):
    """Press Ctrl-C while a call waits for something."""

    def interrupted():
        threading.Timer(
            0.2, signal.pthread_kill, (threading.main_thread().ident, signal.SIGINT)
        ).start()
        call()

    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            interrupted()
    finally:
        signal.signal(signal.SIGINT, handler)


def prefetch_threads():
    """Return the threads that read batches ahead."""
    return [thread for thread in threading.enumerate() if thread.name == "jstep-prefetch"]
