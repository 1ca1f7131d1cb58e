"""Enqueue operations for the tests of `QueueRunner`, and checks that its threads end."""

import itertools
import threading

from waiting import TIMEOUT


def counting_op(queue, n=None):
    """Return an operation that enqueues 0, 1, …, n - 1 and then raises StopIteration."""
    numbers = itertools.count() if n is None else iter(range(n))
    return lambda: queue.enqueue(next(numbers))


def failing_op(queue, after, exception):
    numbers = itertools.count()

    def op():
        if next(numbers) == after:
            raise exception
        queue.enqueue("item")

    return op


def join_all(threads):
    for thread in threads:
        thread.join(TIMEOUT)
    return not any(thread.is_alive() for thread in threads)


def check_no_leftover_threads():
    """A fixture that checks that all threads of the test end."""
    before = set(threading.enumerate())
    yield
    leftover = set(threading.enumerate()) - before
    assert join_all(leftover), leftover
