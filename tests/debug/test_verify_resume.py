"""`verify_resume`: detected differences and reported causes."""

import itertools
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from positioned import Positioned
from problems import DATA, OPTIMIZER, STEP, make_state

import jstep


class Loader:
    """An iterable that starts from scratch each time, without a position."""

    def __iter__(self):
        return (DATA[n] for n in range(100))


def verify(batches=DATA, step=STEP, make_state=make_state, at=3, steps=7):
    return jstep.verify_resume(make_state, step, batches, at, steps)


@pytest.mark.thorough(except_for=["position"])
@pytest.mark.parametrize(
    "batches",
    [DATA, DATA.__getitem__, [DATA[n] for n in range(7)], Positioned(DATA.__getitem__, bytes)],
    ids=["indexed", "function", "list", "position"],
)
def test_identical_runs(batches):
    report = verify(batches)
    assert report
    assert report.ok is True
    assert (report.first_difference, report.cause, report.differing) == (None, "", ())
    assert "both runs end in the same state, bit for bit" in str(report)


def test_a_loader_that_resumes_one_batch_off():
    class Misaligned(Positioned):
        def set_state(self, state):
            super().set_state(state + 1)

    report = verify(Misaligned(DATA.__getitem__, int))
    assert not report
    assert "a loader that resumes beside its position" in report.cause


def test_too_few_batches():
    with pytest.raises(ValueError, match="batches ended after 5 steps; steps=7 of them are needed"):
        verify([DATA[n] for n in range(5)])


def test_an_iterator_without_a_position_is_refused():
    with pytest.raises(ValueError, match="is an iterator without a position"):
        verify(DATA[n] for n in itertools.count())


def test_iterable_that_starts_from_scratch():
    report = verify(Loader())
    assert not report
    # the first one in path order; global_step is identical
    assert report.first_difference == report.differing[0] == "params/w"
    assert "slots/m/w" in report.differing
    assert "global_step" not in report.differing
    assert "starts from scratch after a restart" in report.cause
    assert "'params/w'" in str(report)


def test_counter_outside_the_state():
    """It is neither reset by make_state nor saved, so that two uninterrupted runs differ."""
    counter = itertools.count()

    def step(state, batch):
        return STEP(state, {"x": batch["x"] + np.float32(next(counter))})

    report = verify(step=step)
    assert report.first_difference == "params/w"
    assert "two uninterrupted runs differ as well" in report.cause


def test_unsaved_counter_that_make_state_resets():
    counter = {}

    def make():
        counter["n"] = 0
        return make_state()

    def step(state, batch):
        counter["n"] += 1
        return STEP(state, {"x": batch["x"] * np.float32(counter["n"])})

    report = verify(step=step, make_state=make)
    assert report.first_difference == "params/w"
    assert report.cause.startswith("something that the steps depend on is not in the state")
    assert "batches[N]" in report.cause


def test_make_state_that_is_not_reproducible():
    rng = np.random.default_rng()

    def make():
        return jstep.TrainState.create({"w": rng.normal(size=2).astype("f")}, OPTIMIZER)

    report = verify(make_state=make)
    assert "make_state" in report.cause


def test_make_state_that_returns_the_same_state():
    state = make_state()
    with pytest.raises(RuntimeError, match="donated"):
        verify(make_state=lambda: state)


def test_a_loader_that_train_cannot_resume_is_not_reported_as_fine():
    """`train` makes the first batch in a thread while it restores; a database connection may refuse
    that."""

    class OfOneThread(Positioned):
        thread = threading.get_ident()

        def __next__(self):
            if threading.get_ident() != self.thread:
                raise RuntimeError("created in another thread")
            return super().__next__()

    with pytest.raises(RuntimeError, match="created in another thread"):
        verify(OfOneThread(DATA.__getitem__, bytes))


def test_a_step_that_advances_the_global_step_by_two_is_an_error():
    def step(state, batch):
        state, metrics = STEP(state, batch)
        return jstep.increment_global_step(state), metrics

    with pytest.raises(ValueError, match=r"global_step is 2 after the update that makes step 1: "):
        verify(step=step)


@pytest.mark.thorough
def test_typed_keys_and_stages_resume():
    def loss(params, key, batch):
        noise = jax.random.normal(key, params["w"].shape)
        return jnp.mean((batch["x"] @ (params["w"] + noise)) ** 2), jax.random.split(key)[0]

    steps = [jstep.minimize(loss, OPTIMIZER, has_model_state=True) for _ in range(2)]

    def make():
        return jstep.TrainState.create({"w": jnp.ones(2)}, OPTIMIZER, model_state=jax.random.key(0))

    for step in (steps[0], {0: steps[0], 2: steps[1]}, {0: steps[0], 5: steps[1]}):
        assert verify(step=step, make_state=make)


def test_what_a_position_does_not_keep_is_found():
    """Two places share a list in a first process; the first run of the comparison loads no
    position."""

    class World:
        def __init__(self):
            self.counts, self.loads = [0], 0
            self.shown = self.counts

        def __call__(self, step, state):
            self.counts[0] += 1
            return np.float32(self.shown[0])

        def state_dict(self):
            return {"counts": self.counts, "shown": self.shown}

        def load_state_dict(self, position):
            self.loads += 1
            self.counts, self.shown = position["counts"], position["shown"]

    optimizer = jstep.gradient_descent(0.1)
    step = jstep.minimize(lambda params, x: (params["w"] - x) ** 2, optimizer)
    world, make = World(), lambda: jstep.TrainState.create({"w": 0.0}, optimizer)
    report = jstep.verify_resume(make, step, jstep.from_state(world), at=3, steps=6)
    assert report.differing == ("params/w",)
    # Loaded for the second run, the restart and the search for the cause, not for the first.
    assert world.loads == 3
