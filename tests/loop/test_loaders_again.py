"""A loader object that is passed to another run after one that has fetched more batches than it has
trained on."""

import logging
import math
import signal

import doubles
import numpy as np
import pytest
from positioned import Positioned
from waiting import wait_until

import jstep
from jstep.loop import feeder

LAST = 12
ALL = 2.0**LAST - 1
"""The sum of all batches, each of which is a power of two, so that a sum names its batches."""


class Loader(Positioned):
    """An iterator with a position; it fails once, at a batch."""

    def __init__(self, fails_at=None):
        super().__init__(lambda number: np.float32(2.0**number))
        self.fails_at = fails_at

    def __iter__(self):
        return self

    def __next__(self):
        if self.at == self.fails_at:
            self.fails_at = None
            raise OSError("no shard")
        return super().__next__()


class Unpositioned(Loader):
    get_state = set_state = None


def local(generator, name):
    return generator.gi_frame.f_locals[name]


def generated():
    for number in range(100):
        yield np.float32(2.0**number)


@pytest.fixture(params=[False, True], ids=["direct", "ahead"])
def is_ahead(request, monkeypatch):
    """Whether a thread reads ahead from the second call on."""
    monkeypatch.setattr(feeder, "_CHECK_SECS", -math.inf)

    def read_ahead(self, got):
        if request.param and self._thread is None:
            self._read_ahead()

    monkeypatch.setattr(feeder.BatchFeeder, "_check_waits", read_ahead)
    return request.param


OPTIMIZER = jstep.gradient_descent(1.0)


class Loss:
    """A loss whose update subtracts the batch, if its trace does not fail."""

    def __init__(self, fails=False):
        self.fails = fails

    def __call__(self, params, batch):
        if self.fails:
            raise ValueError("traced")
        return params["w"] * batch


def by_train(*args, **options):
    return jstep.train(*args, **options)


def by_loop(*args, **options):
    with jstep.Run(*args, **options) as run:
        for _ in run:
            pass
    return run.state


def total(batches, last=LAST, *, run=by_train, loss=Loss(), state=None, **options):  # noqa: B008
    """Return the sum of the batches that a run was trained on."""
    state = jstep.TrainState.create({"w": np.float32(0)}, OPTIMIZER) if state is None else state
    step = jstep.minimize(lambda params, batch: loss(params, batch), OPTIMIZER)
    state = run(step, state, batches, last, progress=False, save_checkpoint_secs=None, **options)
    return -float(state.params["w"])


def lost_batches(caplog):
    """Return the warnings of batches that are lost."""
    messages = [
        record.getMessage() for record in caplog.records if record.levelno == logging.WARNING
    ]
    caplog.clear()
    return [message for message in messages if "without being trained on" in message]


@pytest.mark.thorough(
    except_for=["direct-loader-train-4-False", "ahead-loss-loop-1-True", "ahead-loss-train-4-False"]
)
@pytest.mark.parametrize("saves", [False, True])
@pytest.mark.parametrize("steps_per_call", [1, 4])
@pytest.mark.parametrize("run", [by_train, by_loop], ids=["train", "loop"])
@pytest.mark.parametrize("cause", ["loader", "loss"])
def test_the_batches_of_a_first_call_that_failed(
    cause, run, steps_per_call, is_ahead, saves, tmp_path, caplog
):
    loader = Loader(fails_at=2 if cause == "loader" else None)
    loss = Loss(fails=cause == "loss")
    options = {"run": run, "loss": loss, "steps_per_call": steps_per_call}
    options |= {"checkpoint_dir": tmp_path} if saves else {}
    with pytest.raises(OSError if cause == "loader" else ValueError) as caught:
        total(loader, **options)
    state, loss.fails = caught.value.state, False
    assert int(state.global_step) == (2 if cause == "loader" and steps_per_call == 1 else 0)
    assert total(loader, state=state, **options) == ALL
    assert not lost_batches(caplog)


@pytest.mark.thorough(except_for=["ahead-4"])
@pytest.mark.parametrize("steps_per_call", [1, 4])
def test_the_batches_of_a_later_call_that_failed(steps_per_call, is_ahead, tmp_path, monkeypatch):
    monkeypatch.setattr("jstep.data.positions._QUICK", -1.0)  # so that it is read rarely
    loader = Loader()
    hooks = [jstep.every(6, doubles.raising(KeyError("six")))]
    with pytest.raises(KeyError) as caught:
        total(loader, hooks=hooks, steps_per_call=steps_per_call, checkpoint_dir=tmp_path / "first")
    assert int(caught.value.state.global_step) == loader.at == 6
    assert total(loader, state=caught.value.state, checkpoint_dir=tmp_path / "second") == ALL


@pytest.mark.parametrize(
    "make", [Unpositioned, generated, Loader], ids=["iterator", "generator", "loader"]
)
def test_batches_that_are_lost_are_a_warning(make, is_ahead, caplog):
    """Without a checkpoint_dir, a loader is not asked for its position after each batch."""
    batches = make()

    def stop(*_):
        if is_ahead:  # let the thread fetch the next batch
            wait_until(
                lambda: (
                    (batches.at if isinstance(batches, Loader) else local(batches, "number") + 1)
                    > 6
                )
            )
        return True

    total(batches, hooks=[jstep.every(6, stop)])
    count = int(np.log2(next(batches))) - 6
    assert (count > 0) == is_ahead
    caplog.clear()
    total(batches)
    lost = lost_batches(caplog)
    assert len(lost) == is_ahead
    kind = type(batches).__name__
    assert all(
        text.startswith(f"batches: {count} of this {kind} were fetched by an earlier run ")
        for text in lost
    )
    total(batches)
    assert not lost_batches(caplog)


def test_the_batches_of_a_failed_call_of_an_iterator_are_lost(caplog):
    batches = Unpositioned(fails_at=2)
    with pytest.raises(OSError, match="no shard"):
        total(batches, steps_per_call=4)
    assert total(batches, steps_per_call=4) == 4.0 * ALL
    (message,) = lost_batches(caplog)
    assert message.startswith(
        "batches: 2 of this Unpositioned were fetched by an earlier run without being trained on"
    )


fail = doubles.raising(OSError("no shard"))


class Shards(Positioned):
    """An iterator that has advanced when it fails."""

    def __init__(self):
        super().__init__(lambda number: np.float32(2.0**number) if number != 2 else fail())


class Iterable:
    """The same without `__next__`."""

    def __init__(self):
        self.shards = Shards()

    def __iter__(self):
        return (next(self.shards) for _ in range(100))

    def state_dict(self):
        return self.shards.get_state()

    def load_state_dict(self, state):
        self.shards.set_state(state)


FETCHED = (
    "batches: an earlier run ended while this {} fetched one, which may be lost: "
    "this run begins where it is now"
)
WITHOUT = (
    "The run begins at step 2, and there is no checkpoint with a position of the {}: "
    "it starts where it is now"
)


@pytest.mark.parametrize(("make", "line"), [(Shards, FETCHED), (Iterable, WITHOUT)])
@pytest.mark.parametrize("run", [by_train, by_loop], ids=["train", "loop"])
def test_a_batch_that_could_not_be_fetched_is_a_warning(run, make, line, caplog):
    """Without a checkpoint_dir it is lost, and the next run speaks of no checkpoint."""
    batches = make()
    with pytest.raises(OSError, match="no shard") as caught:
        total(batches, run=run)
    caplog.clear()
    assert total(batches, state=caught.value.state, run=run) == ALL + 2.0**LAST - 2.0**2
    assert caplog.messages[0].startswith(line.format(make.__name__))


def test_a_run_fetches_no_batch_after_its_last_step(is_ahead, caplog):
    for batches in (generated(), Loader(), Unpositioned()):
        total(batches, 6)
        assert total(batches, 6) == ALL - (2.0**6 - 1)
    assert not lost_batches(caplog)


def test_a_loader_that_rejects_its_position_is_a_warning(caplog):
    class Rejects(Loader):
        def set_state(self, state):
            raise KeyError(state)

    loader = Rejects()
    with pytest.raises(ValueError, match="traced"):
        total(loader, loss=Loss(fails=True))
    total(loader)
    assert "batches: 1 of this Rejects " in lost_batches(caplog)[0]


@pytest.mark.parametrize("steps_per_call", [1, 4])
def test_a_signal_sets_the_loader_back(steps_per_call, is_ahead, tmp_path):
    loader, hooks = Loader(), [jstep.every(6, lambda *_: signal.raise_signal(signal.SIGTERM))]
    with pytest.raises(jstep.Preempted):
        total(loader, hooks=hooks, checkpoint_dir=tmp_path, steps_per_call=steps_per_call)
    assert loader.at == 6
