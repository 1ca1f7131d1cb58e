"""Batches of every kind, made one: what the loop is handed, in which order, and where the source then is."""

import itertools
import json
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jstep
from jstep.loop import feed as _feed
from jstep.loop.signals import StopWaiting


def handed_out(source, lengths=None, **kwargs):
    return list(_feed.calls(source, lengths, **kwargs))


def numbers(batches, start=0, last_step=100, position=None, lengths=None):
    source = _feed.source_of(batches, start, last_step, position)
    return [np.asarray(call.args[0]).tolist() for call in handed_out(source, lengths)]


class Indexed:
    """No length: it says by IndexError where it ends."""

    def __init__(self, end=None):
        self.end, self.asked = end, []

    def __getitem__(self, step):
        self.asked.append(step)
        if self.end is not None and step >= self.end:
            raise IndexError(step)
        return step * 10


class Positioned:
    """An iterator with a position."""

    def __init__(self, end=100, state="int"):
        self.at, self.end, self.kind = 0, end, state
        self.shared = {"at": 0}

    def __iter__(self):
        return self

    def __next__(self):
        if self.at >= self.end:
            raise StopIteration
        self.at += 1
        self.shared["at"] = self.at
        return (self.at - 1) * 10

    def get_state(self):
        return {"int": self.at, "bytes": str(self.at).encode(), "shared": self.shared}[self.kind]

    def set_state(self, state):
        self.at = int(state["at"] if isinstance(state, dict) else state)


class PositionedLoader:
    """An iterable whose iterator has one, as Grain's and PyTorch's loaders are."""

    def __iter__(self):
        return Positioned()


# What a source is


def test_indexed_starts_at_the_step():
    batches = Indexed()
    assert numbers(batches, 3, 6) == [30, 40, 50]
    assert batches.asked == [3, 4, 5]  # nothing before, nothing past the last step


@pytest.mark.parametrize("end", [4, 0])
def test_indexed_without_a_length_ends_with_index_error(end):
    assert numbers(Indexed(end)) == [10 * i for i in range(end)]


def test_sequences_end_at_their_length():
    assert numbers([0, 10, 20]) == [0, 10, 20]
    assert numbers((0, 10, 20), start=2) == [20]
    assert numbers([0, 10], start=5) == []
    assert numbers(np.arange(6).reshape(3, 2), start=1) == [[2, 3], [4, 5]]


def test_an_index_error_inside_of_a_known_length_is_no_end():
    class Broken:
        def __len__(self):
            return 5

        def __getitem__(self, step):
            return [0, 1][step]

    with pytest.raises(IndexError):
        numbers(Broken())


def test_jstep_batches_are_indexed():
    batches = jstep.batches(np.arange(12), batch_size=3, seed=1)
    expected = [batches[n].tolist() for n in (2, 3, 4, 5)]
    assert numbers(batches, 2, 6) == expected


def test_functions_of_the_step():
    assert numbers(lambda step: step + 1, 4, 7) == [5, 6, 7]
    assert numbers(jstep.constant(0.5), 0, 2) == [0.5, 0.5]


def test_generators_and_iterables_go_on_from_where_they_are():
    made = iter(range(10))
    next(made)
    assert numbers((x for x in made), start=0)[:3] == [1, 2, 3]
    assert numbers({5: None}.keys()) == [5]


@pytest.mark.parametrize("kind", ["int", "bytes", "shared"])
def test_a_position_survives_json(kind):
    source = _feed.source_of(Positioned(state=kind), 0, 100, None)
    assert [next(source.items) for _ in range(3)] == [0, 10, 20]
    kept = json.loads(json.dumps(source.position()))
    next(source.items)
    again = _feed.source_of(Positioned(state=kind), 3, 100, kept)
    assert next(again.items) == 30
    assert kept == json.loads(json.dumps(kept))


def test_a_position_is_a_copy():
    """An iterator may give the very dict that it goes on changing."""
    source = _feed.source_of(Positioned(state="shared"), 0, 100, None)
    next(source.items)
    kept = source.position()
    next(source.items)
    assert kept == {"value": {"at": 1}}


def test_an_iterable_whose_iterator_has_a_position():
    source = _feed.source_of(PositionedLoader(), 0, 100, None)
    next(source.items)
    assert source.position() == {"value": 1}
    assert next(_feed.source_of(PositionedLoader(), 7, 100, {"value": 7}).items) == 70


@pytest.mark.parametrize("kind", ["bytes", "dict"])
def test_grain(kind):
    grain = pytest.importorskip("grain")
    pytest.importorskip("grain.python")

    def make():
        if kind == "dict":
            return grain.MapDataset.range(50).shuffle(seed=3).batch(4).to_iter_dataset()
        sampler = grain.python.IndexSampler(50, shard_options=grain.python.NoSharding(), shuffle=True, seed=3)
        source = grain.python.RangeDataSource(0, 50, 1)
        return grain.python.DataLoader(
            data_source=source, sampler=sampler, operations=[grain.python.Batch(4)], worker_count=0
        )

    expected = [np.asarray(x).tolist() for x in itertools.islice(make(), 6)]
    source = _feed.source_of(make(), 0, 100, None)
    assert [next(source.items).tolist() for _ in range(3)] == expected[:3]
    kept = json.loads(json.dumps(source.position()))
    assert ("base64" in kept) == (kind == "bytes")
    next(source.items)
    again = _feed.source_of(make(), 3, 100, kept)
    assert [next(again.items).tolist() for _ in range(3)] == expected[3:]


@pytest.mark.parametrize("batches", [{"x": 1}, "text", b"bytes"])
def test_one_batch_is_no_source(batches):
    with pytest.raises(TypeError, match=r"batches is a \w+, which may be one batch.*itertools.repeat"):
        _feed.source_of(batches, 0, 1, None)


@pytest.mark.parametrize("batches", [None, 3, 0.5, object()])
def test_no_source_at_all(batches):
    with pytest.raises(TypeError, match=r"must have batches\[N\], be a function of the step, or be iterable"):
        _feed.source_of(batches, 0, 1, None)


def test_going_on_without_a_position_is_said(caplog):
    _feed.source_of((x for x in [1]), 0, 10, None)
    _feed.source_of([1], 5, 10, None)
    _feed.source_of(Positioned(), 5, 10, {"value": 5})
    assert not caplog.records
    _feed.source_of((x for x in [1]), 5, 10, None)
    assert "a generator has no position to go on from" in caplog.text
    caplog.clear()
    _feed.source_of(Positioned(), 5, 10, None)
    assert "no position for the Positioned" in caplog.text


def test_what_can_go_on_from_any_step():
    assert all(map(_feed.is_seekable, ([1], Indexed(), lambda step: step, Positioned(), PositionedLoader())))
    assert not any(map(_feed.is_seekable, (iter([1]), {1}, (x for x in []))))


# From batches to the arguments of calls


def test_a_tuple_is_the_arguments_and_anything_else_one():
    def args(*batches):
        return [call.args for call in handed_out(_feed.Source(iter(batches), None))]

    assert args((1, 2), {"x": 1}, [1, 2], ()) == [(1, 2), ({"x": 1},), ([1, 2],), ()]
    pair = jstep.GATE_OP, 5
    assert args(pair) == [pair]


def test_stacks_end_with_the_lengths_and_with_the_source():
    source = _feed.source_of(list(range(8)), 0, 100, None)
    made = handed_out(source, [3, 1, 2, 5])
    assert [(call.args[0].tolist(), call.steps) for call in made] == [
        ([0, 1, 2], 3),
        ([3], 1),
        ([4, 5], 2),
        ([6, 7], 2),
    ]


def test_a_source_that_ends_between_calls_makes_no_empty_one():
    assert [call.steps for call in handed_out(_feed.source_of([1, 2, 3, 4], 0, 9, None), [2] * 4)] == [2, 2]
    assert handed_out(_feed.source_of([], 0, 9, None), [2] * 4) == []


@pytest.mark.parametrize("array", [np.asarray, jnp.asarray])
def test_trees_are_stacked_leaf_by_leaf(array):
    batches = [({"x": array([i, i])}, array(float(i)), None) for i in range(3)]
    (call,) = handed_out(_feed.source_of(batches, 0, 9, None), [3])
    x, y, nothing = call.args
    assert nothing is None
    assert x["x"].tolist() == [[0, 0], [1, 1], [2, 2]]
    assert y.tolist() == [0, 1, 2]
    assert isinstance(y, type(array(0.0)) if array is np.asarray else jax.Array)


def test_ragged_batches_are_named():
    batches = [{"x": np.zeros((4, 2))}, {"x": np.zeros((3, 2))}]
    with pytest.raises(ValueError, match=r"steps_per_call: .*\[\(3, 2\), \(4, 2\)\] at 'x'.*steps_per_call=1"):
        handed_out(_feed.source_of(batches, 0, 9, None), [2])
    with pytest.raises(ValueError, match=r"steps_per_call: batches of different structures"):
        handed_out(_feed.source_of([{"x": 1}, {"y": 1}], 0, 9, None), [2])


def test_sharding_has_no_part_in_the_step_axis():
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec("data")
    for sharding in (jax.sharding.NamedSharding(mesh, spec), {"x": jax.sharding.NamedSharding(mesh, spec)}):
        batches = [{"x": np.zeros((4, 2))}] * 2
        (single, _) = handed_out(_feed.source_of(batches, 0, 9, None), None, sharding=sharding)
        (stacked,) = handed_out(_feed.source_of(batches, 0, 9, None), [2], sharding=sharding)
        assert single.args[0]["x"].sharding.spec == spec
        assert stacked.args[0]["x"].sharding.spec == jax.sharding.PartitionSpec(None, "data")


# The feed: ahead or not


class Clock:
    """Each look at it is `secs` later."""

    def __init__(self, secs):
        self.secs, self.now = secs, 0.0

    def __call__(self):
        self.now += self.secs
        return self.now


def feed(batches, secs, start=0, position=None, lengths=None, **kwargs):
    source = _feed.source_of(batches, start, 100, position)
    return _feed.Feed(source, _feed.calls(source, lengths), clock=Clock(secs), **kwargs)


@pytest.mark.parametrize("secs", [1e-6, 1.0], ids=["direct", "ahead"])
@pytest.mark.parametrize("lengths", [None, [3, 1, 4, 1, 5, 9]])
@pytest.mark.parametrize("end", [0, 1, 3, 4, 5, 20])
def test_ahead_and_direct_hand_out_the_same(secs, lengths, end):
    one = feed(Positioned(end), secs, lengths=lengths and iter(lengths))
    got, steps = [], 0
    assert one.position == {"value": 0}
    for call in one:
        got += np.ravel(call.args[0]).tolist()
        steps += call.steps
        assert one.position == {"value": steps}  # of what was handed out, not of what was read
    assert (one._ahead is not None) == (secs == 1.0 and len(got) >= (4 if lengths is None else 9))
    assert got == [10 * i for i in range(end)]
    one.close()


@pytest.mark.parametrize("secs", [1e-6, 1.0], ids=["direct", "ahead"])
def test_errors_of_the_source_come_out(secs):
    def batches(step):
        if step == 6:
            raise OSError("no such shard")
        return step

    one, got = feed(batches, secs), []
    with pytest.raises(OSError, match="no such shard"):
        got.extend(np.asarray(call.args[0]).item() for call in one)
    assert got == [0, 1, 2, 3, 4, 5]
    one.close()


def test_only_the_slow_are_made_ahead():
    quick = feed(lambda step: step, 1e-6)
    list(quick)
    assert quick._ahead is None

    def slow(step):
        time.sleep(0.001)
        return step

    source = _feed.source_of(slow, 0, 10, None)
    real = _feed.Feed(source, _feed.calls(source, None))
    assert len(list(real)) == 10
    assert real._ahead is not None
    real.close()


@pytest.mark.parametrize("secs", [1e-6, 1.0], ids=["direct", "ahead"])
def test_waiting_only_while_it_waits(secs):
    seen = []

    def batches(step):
        seen.append(one.waiting)
        return step

    one = feed(batches, secs)
    assert not one.waiting
    for _ in itertools.islice(one, 10):
        assert not one.waiting
    assert all(seen[:4])  # by its own thread later
    one.close()


@pytest.mark.parametrize("secs", [1e-6, 1.0], ids=["direct", "ahead"])
@pytest.mark.parametrize("at", [0, 2, 7])
def test_who_is_to_stop_does_not_wait(secs, at):
    """A signal may arrive between two looks at it: before a wait it is looked for again."""
    stop = [] if at else [True]
    one, got = feed(Positioned(), secs, stopping=lambda: bool(stop)), 0
    with pytest.raises(StopWaiting):  # noqa: PT012
        for _ in one:
            got += 1
            if got == at:
                stop.append(True)
    assert got == at
    assert one.position == {"value": got}
    one.close()


@pytest.mark.parametrize("secs", [1e-6, 1.0], ids=["direct", "ahead"])
def test_an_interrupted_wait_loses_no_batch(secs):
    """The signal's exception may come after the source has moved and before the batch is handed out."""

    class Interrupted(Positioned):
        def __next__(self):
            value = super().__next__()
            if self.at == 3:
                raise StopWaiting
            return value

    one, got = feed(Interrupted(), secs), []
    with pytest.raises(StopWaiting):
        got.extend(np.asarray(call.args[0]).item() for call in one)
    assert got == [0, 10]
    assert one.position == {"value": 2}
    one.close()


def test_close_ends_the_thread():
    one = feed(lambda step: step, 1.0)
    for _ in itertools.islice(one, 6):
        pass
    assert any(thread.name == "jstep-prefetch" for thread in threading.enumerate())
    one.close()
    assert not any(thread.name == "jstep-prefetch" and thread.is_alive() for thread in threading.enumerate())
    one.close()
