"""What a writer has written."""

import time

from jstep import summary


def scalars(events, tag="loss"):
    return [(e.step, e.value) for e in events.Scalars(tag)]


def events_of(writer):
    return list(summary.summary_iterator(writer.path))


def wait_until(condition):
    """For what another thread does in its own time; a wait, not a measurement."""
    for _ in range(1000):
        if condition():
            return
        time.sleep(0.02)
    raise AssertionError("it did not happen within 20 s")
