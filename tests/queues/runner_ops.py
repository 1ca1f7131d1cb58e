"""Enqueue ops, and how their threads end."""

import itertools
import threading

from jstep.queues.errors import OutOfRangeError

LONG = 20  # seconds until a test that hangs fails


def counting(queue, n=None):
    """An op that enqueues 0, 1, 2 … until n."""
    numbers = itertools.count() if n is None else iter(range(n))
    return lambda: queue.enqueue(next(numbers))


def failing(queue, after, exception):
    numbers = itertools.count()

    def op():
        if next(numbers) == after:
            raise exception
        queue.enqueue("item")

    return op


def drained(queue):
    out = []
    while True:
        try:
            out.append(queue.dequeue())
        except OutOfRangeError:
            return out


def ended(threads):
    for thread in threads:
        thread.join(LONG)
    return not any(thread.is_alive() for thread in threads)


def ends_all_threads():
    """A fixture: whatever a test does, its threads end."""
    before = set(threading.enumerate())
    yield
    left = set(threading.enumerate()) - before
    assert ended(left), left
