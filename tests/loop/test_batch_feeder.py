"""`BatchFeeder`: from batches to the arguments of calls, with and without prefetching."""

import itertools
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sources import Positioned, handed_out

import jstep
from jstep.loop.batch_feeder import BatchFeeder, copied_batches, make_calls
from jstep.loop.signals import StopWaiting
from jstep.loop.sources import Source, source_of

# From batches to the arguments of calls


def test_a_tuple_is_several_arguments_and_other_batches_are_one():
    def args(*batches):
        return [call.args for call in handed_out(Source(iter(batches), None))]

    assert args((1, 2), {"x": 1}, [1, 2], ()) == [(1, 2), ({"x": 1},), ([1, 2],), ()]
    pair = jstep.GATE_OP, 5
    assert args(pair) == [pair]


def test_stacks_end_with_the_lengths_or_the_source():
    source = source_of(list(range(8)), 0, 100, None)
    calls = handed_out(source, [3, 1, 2, 5])
    assert [(np.asarray(call.args[0]).tolist(), call.steps) for call in calls] == [
        ([0, 1, 2], 3),
        (3, 1),
        ([4, 5], 2),
        (6, 1),
        (7, 1),
    ]


def test_a_source_that_ends_between_calls_gives_no_empty_call():
    assert [call.steps for call in handed_out(source_of([1, 2, 3, 4], 0, 9, None), [2] * 4)] == [2, 2]
    assert handed_out(source_of([], 0, 9, None), [2] * 4) == []


@pytest.mark.parametrize("array", [np.asarray, jnp.asarray])
def test_trees_are_stacked_leaf_by_leaf(array):
    batches = [({"x": array([i, i])}, array(float(i)), None) for i in range(3)]
    (call,) = handed_out(source_of(batches, 0, 9, None), [3])
    x, y, nothing = call.args
    assert nothing is None
    assert x["x"].tolist() == [[0, 0], [1, 1], [2, 2]]
    assert y.tolist() == [0, 1, 2]
    assert isinstance(y, type(array(0.0)) if array is np.asarray else jax.Array)


@pytest.mark.parametrize(
    "batches",
    [
        [{"x": np.zeros((4, 2))}, {"x": np.zeros((3, 2))}],
        [{"x": np.zeros(2)}, {"y": np.zeros(2)}],
        [{"x": np.zeros(2)}, {"x": np.zeros(2, int)}],
    ],
)
def test_batches_that_cannot_be_stacked_become_single_calls(batches):
    calls = handed_out(source_of(batches, 0, 9, None), [2])
    assert [(call.steps, call.stacked, call.why != "") for call in calls] == [(1, False, True)] * 2
    calls = handed_out(source_of(batches, 0, 9, None), [2], stack_one=True)
    assert [(call.steps, call.stacked) for call in calls] == [(1, True)] * 2
    assert all(leaf.shape[0] == 1 for call in calls for leaf in jax.tree.leaves(call.args))


def test_the_step_axis_is_not_sharded():
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec("data")
    for sharding in (jax.sharding.NamedSharding(mesh, spec), {"x": jax.sharding.NamedSharding(mesh, spec)}):
        batches = [{"x": np.zeros((4, 2))}] * 2
        (single, _) = handed_out(source_of(batches, 0, 9, None), None, sharding=sharding)
        (stacked,) = handed_out(source_of(batches, 0, 9, None), [2], sharding=sharding)
        assert single.args[0]["x"].sharding.spec == spec
        assert stacked.args[0]["x"].sharding.spec == jax.sharding.PartitionSpec(None, "data")


# With and without prefetching


class Clock:
    """A clock that advances by `secs` each time it is read."""

    def __init__(self, secs):
        self.secs, self.now = secs, 0.0

    def __call__(self):
        self.now += self.secs
        return self.now


def make_feeder(batches, secs, start=0, position=None, lengths=None, **kwargs):
    source = source_of(batches, start, 100, position)
    return BatchFeeder(source, make_calls(copied_batches(source), 0, lengths), clock=Clock(secs), **kwargs)


@pytest.mark.parametrize("secs", [1e-6, 1.0], ids=["direct", "ahead"])
@pytest.mark.parametrize("lengths", [None, [3, 1, 4, 1, 5, 9]])
@pytest.mark.parametrize("end", [0, 1, 3, 4, 5, 20])
def test_prefetching_does_not_change_the_calls(secs, lengths, end):
    feeder = make_feeder(Positioned(end), secs, lengths=lengths and iter(lengths))
    got, steps = [], 0
    assert feeder.position == {"value": 0}
    for call in feeder:
        got += np.ravel(call.args[0]).tolist()
        steps += call.steps
        assert feeder.position == {"value": steps}  # of the batches handed out, not of those read
    assert (feeder._prefetch is not None) == (secs == 1.0 and len(got) >= (4 if lengths is None else 9))
    assert got == [10 * i for i in range(end)]
    feeder.close()


@pytest.mark.parametrize("secs", [1e-6, 1.0], ids=["direct", "ahead"])
def test_errors_of_the_source_are_raised(secs):
    def batches(step):
        if step == 6:
            raise OSError("no such shard")
        return step

    feeder, got = make_feeder(batches, secs), []
    with pytest.raises(OSError, match="no such shard"):
        got.extend(np.asarray(call.args[0]).item() for call in feeder)
    assert got == [0, 1, 2, 3, 4, 5]
    feeder.close()


def test_only_slow_sources_are_prefetched():
    fast = make_feeder(lambda step: step, 1e-6)
    list(fast)
    assert fast._prefetch is None

    def slow(step):
        time.sleep(0.001)
        return step

    source = source_of(slow, 0, 10, None)
    slow_feeder = BatchFeeder(source, make_calls(copied_batches(source), 0, None))
    assert len(list(slow_feeder)) == 10
    assert slow_feeder._prefetch is not None
    slow_feeder.close()


@pytest.mark.parametrize("secs", [1e-6, 1.0], ids=["direct", "ahead"])
def test_waiting_is_true_only_during_a_wait(secs):
    seen = []

    def batches(step):
        seen.append(feeder.waiting)
        return step

    feeder = make_feeder(batches, secs)
    assert not feeder.waiting
    for _ in itertools.islice(feeder, 10):
        assert not feeder.waiting
    assert all(seen[:4])  # later batches come from the prefetch thread
    feeder.close()


@pytest.mark.parametrize("secs", [1e-6, 1.0], ids=["direct", "ahead"])
@pytest.mark.parametrize("at", [0, 2, 7])
def test_a_run_that_stops_does_not_wait_for_a_batch(secs, at):
    """A signal can arrive between two checks; it is checked again before each wait."""
    stop = [] if at else [True]
    feeder, got = make_feeder(Positioned(), secs, stopping=lambda: bool(stop)), 0
    with pytest.raises(StopWaiting):  # noqa: PT012
        for _ in feeder:
            got += 1
            if got == at:
                stop.append(True)
    assert got == at
    assert feeder.position == {"value": got}
    feeder.close()


@pytest.mark.parametrize("secs", [1e-6, 1.0], ids=["direct", "ahead"])
def test_an_interrupted_wait_loses_no_batch(secs):
    """StopWaiting can be raised after the source has advanced and before the batch is handed out."""

    class Interrupted(Positioned):
        def __next__(self):
            value = super().__next__()
            if self.at == 3:
                raise StopWaiting
            return value

    feeder, got = make_feeder(Interrupted(), secs), []
    with pytest.raises(StopWaiting):
        got.extend(np.asarray(call.args[0]).item() for call in feeder)
    assert got == [0, 10]
    assert feeder.position == {"value": 2}
    feeder.close()


def test_close_ends_the_thread():
    feeder = make_feeder(lambda step: step, 1.0)
    for _ in itertools.islice(feeder, 6):
        pass
    assert any(thread.name == "jstep-prefetch" for thread in threading.enumerate())
    feeder.close()
    assert not any(thread.name == "jstep-prefetch" and thread.is_alive() for thread in threading.enumerate())
    feeder.close()
