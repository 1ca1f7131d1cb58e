"""When a thread reads the batches ahead of the loop: a rule of one sentence, in times that these
tests invent."""

import threading

import pytest
from sources import in_loops

from jstep.compiling.chunks import make_chunks
from jstep.core.signals import StopSignals
from jstep.core.stopwatch import Stopwatch
from jstep.data.loaders import open_source
from jstep.loop.feeder import BatchFeeder, BatchReader


def starts(read, step, calls=3000):
    """When a thread starts, in seconds after the first batch, if batches and calls take these
    seconds, or functions."""
    now, first = [0.0], [0.0]

    def batch(n):
        now[0] += read(n) if callable(read) else read
        return n

    source = open_source(batch, 0, 10**6, None)
    reader = BatchReader(source)

    def made(step):
        return make_chunks(reader, step, in_loops(1), ends=range(1, 10**6))

    watch = Stopwatch(clock=lambda: now[0])
    feeder = BatchFeeder(reader, made(0), StopSignals(), watch)
    try:
        for n in range(calls):
            next(feeder)
            if n == 0:
                first[0] = now[0]
                watch.started()
            if any(thread.name == "jstep-prefetch" for thread in threading.enumerate()):
                return now[0] - first[0]
            now[0] += step(n) if callable(step) else step
        return None
    finally:
        feeder.close()


@pytest.mark.thorough(
    except_for=["0.0004-0.01-False", "0.0007-0.01-True", "9e-05-1e-05-False", "0.00011-0.001-True"]
)
@pytest.mark.parametrize(
    ("read", "step", "is_ahead"),
    [
        (0.0, 0.01, False),
        (0.0004, 0.01, False),  # less than a twentieth
        (0.0007, 0.01, True),
        (0.00009, 0.00001, False),  # less than handing a batch over takes
        (0.00011, 0.001, True),
        (10.0, 0.001, True),
        (10.0, 1000.0, False),
    ],
)
def test_a_thread_starts_if_waiting_took_a_twentieth_of_a_second_and_0_1_milliseconds_a_call(
    read, step, is_ahead
):
    found = starts(read, step, 30_000)
    assert (found is not None) == is_ahead
    if found is not None:
        assert 1.0 <= found < 1.0 + 2 * (read + step) + 0.001, "at the first look"


def test_the_first_batch_and_the_calls_before_the_last_second_do_not_count():
    assert starts(lambda n: 5.0 * (n == 0), 0.01) is None  # files are opened
    slow_from = 500
    found = starts(lambda n: 0.01 * (n >= slow_from), 0.01)
    assert found is not None
    assert slow_from * 0.01 + 1.0 < found < slow_from * 0.01 + 2.1
