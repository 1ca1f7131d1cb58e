"""A source of items and helpers for the tests of `prefetch_to_device`."""

import gc
import threading

import numpy as np
from waiting import TIMEOUT, wait_until
from waiting import prefetch_threads as threads


class Source:
    """An iterator that counts the items read and blocks while `gate` is not set."""

    def __init__(self, n=10**6):
        self.n, self.read, self.gate = n, 0, threading.Event()
        self.gate.set()

    def __iter__(self):
        return self

    def __next__(self):
        assert self.gate.wait(TIMEOUT)
        if self.read == self.n:
            raise StopIteration
        self.read += 1
        return np.float32(self.read - 1)


def check_no_leftover_threads():
    """A fixture that checks that all prefetch threads end."""
    assert not threads()
    yield
    if threads():  # a thread held by a reference cycle ends when it is collected; collecting is slow
        gc.collect()
    wait_until(lambda: not threads())
