"""`BatchFeeder`: from batches to the arguments of calls, whoever reads them."""

import math
import threading
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fellows import Fellows
from sources import Positioned, handed_out, in_loops
from waiting import prefetch_threads as threads
from waiting import wait_until

from jstep.compiling.chunks import make_chunks
from jstep.core.signals import StopSignals, StopWaiting
from jstep.core.stopwatch import Stopwatch
from jstep.data.loaders import open_source
from jstep.loop import feeder as feeder_module
from jstep.loop.feeder import BatchFeeder, BatchReader, fetch_by_all

# From batches to the arguments of calls


def test_a_source_that_ends_between_calls_gives_no_empty_call():
    calls = handed_out(open_source([1, 2, 3, 4], 0, 9, None), [9], most=2)
    assert [call.steps for call in calls] == [2, 2]
    assert handed_out(open_source([], 0, 9, None), [9], most=2) == []


@pytest.mark.parametrize(
    "other", [{"x": np.zeros((3, 2))}, {"y": np.zeros((4, 2))}, {"x": np.zeros((4, 2), int)}]
)
def test_batches_of_other_shapes_begin_another_call(other):
    first = {"x": np.zeros((4, 2))}
    source = open_source([first, first, other, other, first], 0, 9, None)
    calls = handed_out(source, [9], most=4)
    assert [call.steps for call in calls] == [2, 2, 1]
    assert all(np.shape(leaf)[0] == 4 for call in calls for leaf in jax.tree.leaves(call.args))


# Read by the loop, or ahead of it by a thread


WAYS = ("direct", "ahead", "later")
each_way = pytest.mark.parametrize("way", WAYS)


@pytest.fixture(autouse=True)
def no_time(monkeypatch):
    """The thread starts after as many calls as a test says, whatever they take."""
    monkeypatch.setattr(feeder_module, "_CHECK_SECS", -math.inf)
    monkeypatch.setattr(BatchFeeder, "_check_waits", check_waits)


def check_waits(feeder, got):
    feeder.looks = getattr(feeder, "looks", 0) + 1
    if feeder.looks == feeder.starts_after:
        feeder._read_ahead()


def make_feeder(batches, way, ends=(math.inf,), signals=None):
    source = open_source(batches, 0, 100, is_saved=True, next_save=lambda number: number)
    reader = BatchReader(source)

    def made(step):
        return make_chunks(reader, step, in_loops(9 if ends[0] < math.inf else 1), ends=ends)

    feeder = BatchFeeder(reader, made(0), signals or StopSignals(), Stopwatch())
    feeder.starts_after = {"direct": None, "ahead": 1, "later": 3}.get(way, way)
    return feeder


def test_a_thread_reads_two_batches_ahead():
    read = []

    def batches(step):
        read.append((step, threading.current_thread().name == "jstep-prefetch"))
        return step

    feeder = make_feeder(batches, 2)
    for ahead in (0, 2, 2, 2):
        call = next(feeder)
        wait_until(lambda call=call, ahead=ahead: len(read) == call.first + 1 + ahead)
    assert read == [(step, step >= 2) for step in range(6)]
    assert threads()
    feeder.close()
    assert not threads()


@each_way
def test_errors_of_the_source_are_raised_at_their_step(way):
    def batches(step):
        if step == 6:
            raise OSError("no such shard")
        return step

    feeder, got = make_feeder(batches, way), []
    with pytest.raises(OSError, match="no such shard"):
        got.extend(np.asarray(call.args[0]).item() for call in feeder)
    assert got == [0, 1, 2, 3, 4, 5]
    assert feeder.waiting
    feeder.close()


def test_a_thread_keeps_no_batch_alive_that_was_handed_out():
    feeder, references = make_feeder((jnp.full(2, n) for n in range(6)), "ahead"), []
    for call in feeder:
        references.append(weakref.ref(call.args[0]))
        del call
    assert [reference() for reference in references] == [None] * 6
    feeder.close()


@each_way
def test_an_interrupted_wait_loses_no_batch(way):
    """StopWaiting can be raised after the source has advanced and before the batch is handed
    out."""

    class Interrupted(Positioned):
        def __next__(self):
            value = super().__next__()
            if self.at == 3:
                raise StopWaiting
            return value

    feeder, got = make_feeder(Interrupted(), way), []
    with pytest.raises(StopWaiting):
        got.extend(np.asarray(call.args[0]).item() for call in feeder)
    assert got == [0, 10]
    assert feeder._reader.source.position_after(2) == {"value": 2}
    feeder.close()


def test_all_processes_fetch_the_first_batch_or_none_does(monkeypatch):
    three = Fellows(monkeypatch, 3)
    assert three.each(lambda i: list(fetch_by_all([i, "next"]))) == [
        [0, "next"],
        [1, "next"],
        [2, "next"],
    ]
    assert three.each(lambda i: list(fetch_by_all([]))) == [[], [], []]
    first, none, last = three.each(lambda i: list(fetch_by_all([] if i == 1 else [i])))
    words = "batches: another process has no batch at all; give each process a part"
    assert (repr(first), none, repr(last)) == (
        f"ValueError({words!r})",
        [],
        f"ValueError({words!r})",
    )

    def broken():
        raise OSError("a file is gone")
        yield

    *others, own = three.each(lambda i: list(fetch_by_all(broken() if i == 2 else [i])))
    words = "batches: the first one cannot be fetched: process 2: OSError: a file is gone"
    assert [*map(repr, others), repr(own)] == [f"RuntimeError({words!r})"] * 2 + [
        "OSError('a file is gone')"
    ]
