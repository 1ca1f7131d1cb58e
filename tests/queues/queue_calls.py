"""Calls that wait in threads of their own, and queues to make."""

import threading
import time

import pytest

from jstep.queues import FIFOQueue, RandomShuffleQueue, _bounded_queue
from jstep.queues.errors import OutOfRangeError

LONG = 20  # seconds until a test that hangs fails


class Call:
    """A call in a thread of its own."""

    def __init__(self, fn, *args):
        self.result = self.error = None

        def run():
            try:
                self.result = fn(*args)
            except BaseException as ex:
                self.error = ex

        self.thread = threading.Thread(target=run, daemon=True)
        self.thread.start()

    def wait(self):
        self.thread.join(LONG)
        assert not self.thread.is_alive(), "the call hangs"
        if self.error:
            raise self.error
        return self.result


def until(condition):
    deadline = time.monotonic() + LONG
    while not condition():
        assert time.monotonic() < deadline, "never came true"
        time.sleep(0.001)


def asleep(queue, enqueues=0, dequeues=0, batches=0):
    """Waits until so many calls wait inside of the queue."""
    wanted = (enqueues, dequeues, batches)
    until(lambda: (queue._for_room.count, queue._for_elements.count, queue._for_batch.count) == wanted)


def drained(queue):
    out = []
    while True:
        try:
            out.append(queue.dequeue())
        except OutOfRangeError:
            return out


def fifo(capacity=10):
    return FIFOQueue(capacity)


def shuffle(capacity=10, min_after_dequeue=0, seed=0):
    return RandomShuffleQueue(capacity, min_after_dequeue, seed)


both = pytest.mark.parametrize("make", [fifo, shuffle])


def never_polls(monkeypatch):
    """A fixture: a lost wake-up shows as a call that hangs."""
    monkeypatch.setattr(_bounded_queue, "_POLL_SECS", 3600)
