"""A source to prefetch from, and what to wait for."""

import gc
import threading
import time

import numpy as np

LONG = 20  # seconds until a test that hangs fails


def threads():
    return [t for t in threading.enumerate() if t.name == "jstep-prefetch"]


def until(condition):
    deadline = time.monotonic() + LONG
    while not condition():
        assert time.monotonic() < deadline, "never came true"
        time.sleep(0.001)


class Source:
    """Counts what is read, and waits on request."""

    def __init__(self, n=10**6):
        self.n, self.read, self.gate = n, 0, threading.Event()
        self.gate.set()

    def __iter__(self):
        return self

    def __next__(self):
        assert self.gate.wait(LONG)
        if self.read == self.n:
            raise StopIteration
        self.read += 1
        return np.float32(self.read - 1)


def ends_all_threads():
    """A fixture: whatever a test does, its threads end."""
    assert not threads()
    yield
    if threads():  # what a cycle holds ends with it; to look for cycles takes long
        gc.collect()
    until(lambda: not threads())
