"""Blocking calls in background threads, and queue factories."""

import threading

import pytest
from waiting import TIMEOUT, wait_until

from jstep.core.exceptions import OutOfRangeError
from jstep.queues import queues
from jstep.queues.queues import FIFOQueue, RandomShuffleQueue


class Call:
    """A call in a background thread."""

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
        self.thread.join(TIMEOUT)
        assert not self.thread.is_alive(), "the call hangs"
        if self.error:
            raise self.error
        return self.result


def wait_until_blocked(queue, enqueues=0, dequeues=0, batches=0, fills=0):
    """Wait until these numbers of calls block inside the queue; `fills` is the `enqueue_many` in
    progress."""

    def blocked():
        with queue._mutex:
            return queue._waiting, bool(queue._collecting), bool(queue._adding)

    wait_until(lambda: blocked() == (enqueues + dequeues + batches + fills, batches, fills))


def drain(queue):
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


def filled(queue, elements):
    for element in elements:
        queue.enqueue(element)
    return queue


both_queues = pytest.mark.parametrize("make", [fifo, shuffle])


def disable_polling(monkeypatch):
    """A fixture: without polling, a lost wake-up makes the call hang."""
    monkeypatch.setattr(queues, "_POLL_SECS", 3600)
