"""`train`: sources of batches."""

import functools
import itertools
import math
import os
import signal
import sys
import threading
import time
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from doubles import raising
from loop_runs import DATA, OPTIMIZER, Calls, Counted, by_hand, make_state, same, train

import jstep
from jstep.loop import feeder

SOURCES = {
    "indexed": lambda: DATA,
    "list": lambda: [DATA[n] for n in range(30)],
    "function": lambda: DATA.__getitem__,
    "generator": lambda: (DATA[n] for n in range(30)),
    "iterator of batches": lambda: iter(DATA),
    "position": Counted,
    "bytes position": lambda: Counted(bytes),
    "slow": lambda: Counted(slow=0.0005),
    "arguments": lambda: lambda step: (DATA[step],),
    "jax arrays": lambda: lambda step: {"x": jnp.asarray(DATA[step]["x"])},
    "prefetched": lambda: jstep.prefetch_to_device(DATA.from_step(0)),
}


@pytest.mark.thorough(except_for={"steps_per_call": [1]})
@pytest.mark.parametrize("name", SOURCES)
@pytest.mark.parametrize("steps_per_call", [1, 5])
def test_all_sources_give_an_identical_run(name, steps_per_call):
    batches = SOURCES[name]()
    state = train(12, batches, steps_per_call=steps_per_call)
    if steps_per_call == 1:
        assert same(state, by_hand(12))
    else:
        np.testing.assert_allclose(state.params["w"], by_hand(12).params["w"], rtol=1e-5)
    if hasattr(batches, "close"):
        batches.close()


@pytest.mark.thorough(except_for=["1-bytes position"])
@pytest.mark.parametrize(
    "name",
    ["indexed", "list", "function", "iterator of batches", "position", "bytes position", "slow"],
)
@pytest.mark.parametrize("steps_per_call", [1, 5])
def test_all_sources_with_a_position_resume(name, steps_per_call, tmp_path):
    kwargs = {"checkpoint_dir": tmp_path, "steps_per_call": steps_per_call}
    train(7, SOURCES[name](), **kwargs)
    state = train(14, SOURCES[name](), **kwargs)
    uninterrupted = train(
        14, SOURCES[name](), steps_per_call=steps_per_call, hooks=[Calls(every_n=7)]
    )
    assert same(state, uninterrupted)


def test_an_iterator_from_a_step_resumes_where_it_stopped(tmp_path):
    """Batch N is that of step N from the step of the iterator on, not of the step of the run."""
    seen = []
    data = jstep.batches({"x": np.arange(40.0)}, 1, shuffle=False)

    def step(state, batch):
        seen.append(int(batch["x"][0]))
        return jstep.increment_global_step(state), {}

    for last_step in (3, 6):
        jstep.train(
            step,
            make_state(),
            data.from_step(10),
            last_step,
            checkpoint_dir=tmp_path,
            progress=False,
        )
    assert seen == [10, 11, 12, 13, 14, 15]


def test_a_loader_that_rejects_its_position_is_named(tmp_path):
    class Refuses(Counted):
        def set_state(self, state):
            raise KeyError("epoch")

    train(5, Counted(), checkpoint_dir=tmp_path)
    with pytest.raises(KeyError, match="epoch") as error:
        train(7, Refuses(), checkpoint_dir=tmp_path)
    assert any(
        "Refuses did not accept the position in the checkpoint of step 5" in note
        for note in error.value.__notes__
    )


@pytest.mark.thorough(except_for=["function"])
@pytest.mark.parametrize("kind", ["function", "indexed"])
def test_a_stop_iteration_in_a_function_of_the_step_is_an_error(kind, tmp_path):
    """A `next` of an iterator that is exhausted would end the run in silence."""
    left = iter(range(3))

    def batch(step):
        next(left)
        return DATA[0]

    class Indexed:
        def __getitem__(self, step):
            return batch(step)

    batches = {"function": batch, "indexed": Indexed()}[kind]
    with pytest.raises(
        RuntimeError,
        match=r"StopIteration was raised for step 3.*jstep\.OutOfRangeError",
    ) as raised:
        train(10, batches, checkpoint_dir=tmp_path)
    assert isinstance(raised.value.__cause__, StopIteration)
    assert raised.value.state.global_step == 3
    assert jstep.Saver(tmp_path).latest_step() == 3
    with pytest.raises(RuntimeError, match="for step 0"):
        train(10, batches)


def batches_of_a_queue(count, fail=None):
    queue = jstep.FIFOQueue(100)
    for step in range(count):
        queue.enqueue(DATA[step])
    if fail is None:
        queue.close()
    else:
        jstep.QueueRunner(queue, [fail]).create_threads(start=True)
    return lambda step: queue.dequeue()


@pytest.mark.thorough(except_for=["1"])
@pytest.mark.parametrize("steps_per_call", [1, 4])
def test_an_out_of_range_error_ends_the_batches(steps_per_call, caplog):
    state = train(100, batches_of_a_queue(6), steps_per_call=steps_per_call)
    assert same(state, by_hand(6))
    assert "The batches ended after step 6, before last_step=100" in caplog.text
    assert "an iterable that does not end, see docs: recipes/loaders#epochs" in caplog.text


def test_an_out_of_range_error_with_a_cause_is_an_error():
    with pytest.raises(jstep.OutOfRangeError, match="its input failed") as raised:
        train(100, batches_of_a_queue(2, raising(OSError("no such shard"))))
    assert isinstance(raised.value.__cause__, OSError)


def test_empty_batches_are_an_error():
    calls = Calls()
    with pytest.raises(
        ValueError,
        match=r"batches: there is no batch for step 0, the first of this run \(last_step=5\)",
    ) as raised:
        train(5, [], hooks=[calls])
    assert "batch 0" not in "".join(raised.value.__notes__)
    assert calls.seen == [("begin", 0), ("close",)]


@pytest.mark.parametrize("slow", [0, 0.001])
def test_a_plain_step_gets_jax_arrays_with_and_without_prefetching(slow):
    """Whether batches are prefetched depends on their speed; their types must not."""
    kinds = set()

    def step(state, x):
        kinds.add((type(x).__name__, str(x.dtype)))
        return jstep.increment_global_step(state), {}

    def batches(n):
        time.sleep(slow)
        return np.full(2, n / 3)

    train(8, batches, step=step)
    assert kinds == {("ArrayImpl", "float32")}


class PythonCalls(jstep.Hook):
    begin_at, end_at = 20, 40

    def __init__(self):
        self.count = 0

    def after_step(self, step, state, metrics):
        if step == self.begin_at:
            sys.setprofile(self.called)
        elif step == self.end_at:
            sys.setprofile(self.before)

    def begin(self, state):
        self.before = sys.getprofile()

    def called(self, frame, event, arg):
        self.count += event == "call" and frame.f_code.co_filename.startswith(
            os.path.dirname(jstep.__file__)
        )

    def next_due(self, step):
        return next((at for at in (self.begin_at, self.end_at) if at > step), 2**62)


@pytest.mark.thorough(except_for=["True-26"])
@pytest.mark.parametrize(("on_device", "bound"), [(False, 28), (True, 26)])
def test_a_step_makes_no_more_calls_than_it_did(on_device, bound, request):
    """Each costs some tenths of a microsecond, which no bound on a ratio of noisy times has
    noticed."""
    request.addfinalizer(functools.partial(sys.setprofile, sys.getprofile()))
    batch = np.ones((8, 4), np.float32), np.arange(8)
    batch = jax.device_put(batch) if on_device else batch
    step = jstep.minimize(
        lambda params, x, y: jnp.sum(params["w"] ** 2) * x.mean() - y.mean(), OPTIMIZER
    )
    calls = PythonCalls()
    train(50, lambda step: batch, [calls], step=step, log_steps=None)
    assert 0 < calls.count / 20 <= bound
    state, _ = step(make_state(), *batch)
    calls.count = 0
    sys.setprofile(calls.called)
    for _ in range(20):
        state, _ = step(state, *batch)
    sys.setprofile(calls.before)
    assert 0 < calls.count / 20 <= 10


@pytest.mark.parametrize("makes_batches", [False, True])
def test_an_iteration_with_a_body_makes_no_more_calls_than_it_did(makes_batches, request):
    request.addfinalizer(functools.partial(sys.setprofile, sys.getprofile()))
    batch = jax.device_put((np.ones((8, 4), np.float32), np.arange(8)))
    step_fn = jstep.minimize(
        lambda params, x, y: jnp.sum(params["w"] ** 2) * x.mean() - y.mean(), OPTIMIZER
    )
    calls = PythonCalls()
    batches = None if makes_batches else lambda step: batch
    with jstep.Run(
        step_fn, make_state(), batches, 50, hooks=[calls], log_steps=None, progress=False
    ) as run:
        for _ in run:
            if makes_batches:
                run.train_step(*batch)
    assert 0 < calls.count / 20 <= (55 if makes_batches else 36)


def test_a_start_from_a_checkpoint_makes_no_more_calls_than_it_did(request, tmp_path):
    """For 100 leaves, with the read of the checkpoint and the trace of the step."""
    request.addfinalizer(functools.partial(sys.setprofile, sys.getprofile()))
    step = jstep.minimize(
        lambda params, x: sum(jnp.sum(w**2) for w in params.values()) * x.mean(), OPTIMIZER
    )
    slots = len(OPTIMIZER.init({"w": jnp.zeros(())}))
    calls = PythonCalls()
    for last_step in (2, 4):
        params = {f"w{n}": jnp.ones(4) for n in range(99 // (1 + slots))}
        state = jstep.TrainState.create(params, OPTIMIZER)
        calls.count = 0
        sys.setprofile(calls.called)
        first = jstep.every(1, lambda *_: sys.setprofile(None))
        train(
            last_step,
            lambda _: np.ones(4, np.float32),
            [first],
            step=step,
            state=state,
            checkpoint_dir=tmp_path,
        )
    assert 100 <= calls.count <= 15_000


# `train`: runs are identical whether the loop reads the batches or a thread does, and however often
# that changes.

UNDECIDED = 7
"""The number of the first batch that a thread reads, if one starts."""


@pytest.fixture(params=["direct", "ahead"])
def way(request, monkeypatch):
    """Sets how batches are read, whatever that takes."""

    def check_waits(calls, got):
        calls.looks = getattr(calls, "looks", 0) + 1
        if request.param == "ahead" and calls.looks == UNDECIDED:
            calls._read_ahead()

    monkeypatch.setattr(feeder, "_CHECK_SECS", -math.inf)
    monkeypatch.setattr(feeder.BatchFeeder, "_check_waits", check_waits)
    yield request.param
    assert not any(thread.name == "jstep-prefetch" for thread in threading.enumerate())


class Watched(Counted):
    def __init__(self, on=None):
        super().__init__()
        self.on, self.in_thread = on or {}, []

    def __next__(self):
        if threading.current_thread() is not threading.main_thread():
            self.in_thread.append(self.at)
        if self.at in self.on:
            self.on[self.at]()
        return super().__next__()


@pytest.mark.thorough(except_for=["direct-1", "ahead-1"])
@pytest.mark.parametrize("steps_per_call", [1, 2])
def test_runs_are_identical(way, steps_per_call):
    wanted = train(40, DATA.__getitem__, steps_per_call=steps_per_call)
    source = Watched()
    assert same(train(40, source, steps_per_call=steps_per_call), wanted)
    one_thread = itertools.islice(iter(DATA), 40)
    assert same(train(40, (batch for batch in one_thread), steps_per_call=steps_per_call), wanted)
    assert bool(source.in_thread) == (way != "direct")
    assert all(at >= UNDECIDED for at in source.in_thread)


@pytest.mark.thorough(except_for=["ahead-15"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_loses_no_batch(way, number, tmp_path):
    stop = Watched({20: lambda: os.kill(os.getpid(), number)})
    with pytest.raises((KeyboardInterrupt, jstep.Preempted)):
        train(40, stop, checkpoint_dir=tmp_path)
    assert 18 <= jstep.Saver(tmp_path).latest_step() <= 21
    assert same(train(40, Watched(), checkpoint_dir=tmp_path), train(40, DATA))


def test_the_contexts_of_the_caller(way):
    seen = set()
    source = Watched(
        dict.fromkeys(range(40), lambda: seen.add(jax.config.jax_transfer_guard_host_to_device))
    )
    state = make_state()
    with jax.transfer_guard("disallow"):
        ended = train(40, source, state=state)
    assert seen == {"disallow"}
    assert int(ended.global_step) == 40


# A NamedTuple from a loader is one argument, wherever a plain tuple is passed as several.


class Batch(NamedTuple):
    x: np.ndarray
    weight: np.ndarray


@pytest.mark.thorough(except_for=["3"])
@pytest.mark.parametrize("steps_per_call", [1, 3])
def test_train_passes_one_argument(steps_per_call, tmp_path):
    def loss_fn(params, batch, scale=None):  # a batch of two fields would fit as two arguments, too
        assert type(batch) is Batch
        assert scale is None
        return jnp.mean(batch.weight * (batch.x @ params["w"] - 1.0) ** 2)

    def batch(step):
        return Batch(DATA[step]["x"], np.float32(0.5))

    step, by_hand = jstep.minimize(loss_fn, OPTIMIZER), make_state()
    for n in range(6):
        by_hand, _ = step(by_hand, batch(n))
    for last in (3, 6):
        state = train(
            last, batch, step=step, checkpoint_dir=tmp_path, steps_per_call=steps_per_call
        )
    np.testing.assert_allclose(state.params["w"], by_hand.params["w"], rtol=1e-6)


class Rows:
    """A data set of rows, as those of Hugging Face and PyTorch are: a length and items, perhaps an
    iterator."""

    def __init__(self, row):
        self.row = row

    def __len__(self):
        return 100

    def __getitem__(self, i):
        if i >= 100:
            raise IndexError(i)
        return self.row


class IterableRows(Rows):
    def __iter__(self):
        return iter([self.row] * 100)


class Dataset(Rows):
    """As `torch.utils.data.Dataset` and `datasets.Dataset`, known by this name among the bases."""


class TokenDataset(Dataset):
    pass


ROW, BATCH = {"x": np.ones((28, 28)), "y": np.int64(3)}, {"x": np.ones((4, 2)), "y": np.ones(4)}


@pytest.mark.parametrize(
    "batches",
    [
        *(
            kind(row)
            for kind in (Rows, IterableRows, TokenDataset)
            for row in (ROW, (1.0, 2.0), {"ids": [1, 2], "y": 3})
        ),
    ],
    ids=lambda batches: f"{type(batches).__name__} of {getattr(batches, 'row', None)}"[:40],
)
def test_rows_given_as_batches_are_refused(batches):
    with pytest.raises(
        ValueError,
        match=r"no common first axis: for rows give jstep\.batches\(dataset, batch_size\)",
    ):
        train(3, batches)


@pytest.mark.parametrize(
    ("batches", "warned"),
    [
        (TokenDataset(BATCH), 1),
        (Rows(BATCH), 0),
        *(
            (items, 0)
            for items in (
                [BATCH] * 9,
                [1] * 9,
                [{"x": jnp.float32(1)}] * 9,
                ([1.0, 2.0],) * 9,
                [ROW] * 9,
            )
        ),
    ],
)
def test_rows_that_may_be_batches_are_warned_about_if_their_class_is_a_dataset(
    batches, warned, caplog
):
    def step(state, batch):
        return jstep.increment_global_step(state), {}

    jstep.train(step, make_state(), batches, 3, progress=False)
    assert caplog.text.count("if it is a row, give jstep.batches(dataset, batch_size)") == warned
