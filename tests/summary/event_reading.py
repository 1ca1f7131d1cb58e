"""Helpers that read the events of a writer."""

import time

from jstep import summary


def scalars(events, tag="loss"):
    return [(e.step, e.value) for e in events.Scalars(tag)]


def events_of(writer):
    return list(summary.summary_iterator(writer.path))


def wait_until(condition):
    """Wait up to 20 s for a condition that another thread establishes."""
    for _ in range(1000):
        if condition():
            return
        time.sleep(0.02)
    raise AssertionError("the condition did not hold within 20 s")
