"""`verify_resume`: detected differences and reported causes."""

import copy
import itertools
import logging
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from points import Remembering
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


def make_later_state():
    return make_state(5)


@pytest.mark.parametrize("number", [7, 5])
def test_an_iterator_begins_at_a_later_initial_step(number):
    """Its first batch is that of the first step of the runs, as it would be in `train`."""
    given = []

    def step(state, batch):
        given.append(float(batch["x"][0, 0]))
        return STEP(state, batch)

    batches = (DATA[n] for n in range(number))
    if number < 7:
        with pytest.raises(ValueError, match="batches ended after 5 steps; steps=7 of them are needed"):
            verify(batches, step, make_later_state)
        return
    report = verify(batches, step, make_later_state)
    assert report.first_difference is None
    assert "get_state and set_state" in report.cause
    first = [float(DATA[n]["x"][0, 0]) for n in range(7)]
    assert given == [*first, *first[:3], *first[3:]]


def test_each_warning_of_a_loader_at_a_later_step_is_logged_once(caplog):
    logger = logging.getLogger("jstep")
    caplog.set_level(logging.INFO, logger.name)

    def step(state, batch):
        logger.info("a step")
        return STEP(state, batch)

    assert verify(Positioned(DATA.__getitem__, bytes), step, make_later_state)
    assert caplog.messages.count("a step") == 7 + 3 + 4  # of both runs and the restart
    warned = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert [text for text in warned if "no position" in text] == [
        "The run resumes at step 5, but there is no position for the Positioned in the checkpoint: its batches start "
        "from its current position."
    ]
    logger.warning(warned[0])
    assert caplog.messages[-1] == warned[0]  # the filter is gone


def test_generator_is_reported_although_values_agree():
    report = verify(DATA[n] for n in itertools.count())
    assert not report
    assert report.first_difference is None
    assert "get_state and set_state" in report.cause
    assert "a new process would continue with other batches" in str(report)


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


def test_an_unsaved_counter_of_the_model_state():
    calls = {}

    def make():
        calls["n"] = 0
        return jstep.TrainState.create({"w": jnp.ones(2)}, OPTIMIZER, model_state=jnp.float32(0))

    def step(state, batch):
        calls["n"] += 1
        return counting(state, {"x": batch["x"], "n": np.float32(calls["n"])})

    counting = jstep.minimize(
        lambda params, seen, batch: (jnp.mean((batch["x"] @ params["w"]) ** 2), seen + batch["n"]),
        OPTIMIZER,
        has_model_state=True,
    )
    report = verify(step=step, make_state=make)
    assert report.first_difference == "slots/model_state"
    assert report.cause.startswith("model_state differs first; something that the steps depend on")


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
    """`train` makes the first batch in a thread while it restores; a database connection may refuse that."""

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


@pytest.mark.parametrize("there", [5, 8])
def test_batches_that_end_with_a_closed_queue(there):
    queue = jstep.FIFOQueue(capacity=10)
    for step in range(there):
        queue.enqueue(DATA[step])
    queue.close()

    def dequeued():
        while True:
            yield queue.dequeue()

    if there == 8:
        assert "get_state and set_state" in jstep.verify_resume(make_state, STEP, dequeued(), at=3, steps=8).cause
        return
    with pytest.raises(ValueError, match="batches ended after 5 steps; steps=8"):
        jstep.verify_resume(make_state, STEP, dequeued(), at=3, steps=8)


def test_what_a_position_does_not_keep_is_found():
    """Two places share a generator in a first process; the first run of the comparison loads no position."""

    class World:
        def __init__(self):
            self.rng, self.loads = np.random.default_rng(0), 0
            self.environment = [self.rng]

        def __call__(self, step, state):
            return np.float32(self.environment[0].normal() + self.rng.normal())

        def state_dict(self):
            return {"rng": self.rng, "environment": self.environment}

        def load_state_dict(self, position):
            self.loads += 1
            self.rng, self.environment = position["rng"], position["environment"]

    class Copies(World):
        def load_state_dict(self, position):
            super().load_state_dict(position)
            self.environment = copy.deepcopy(self.environment)

    optimizer = jstep.gradient_descent(0.1)
    step = jstep.minimize(lambda params, x: (params["w"] - x) ** 2, optimizer)
    world, make = World(), lambda: jstep.TrainState.create({"w": 0.0}, optimizer)
    assert jstep.verify_resume(make, step, jstep.from_state(world), at=3, steps=6)
    assert world.loads == 2  # for the second run and for the restart, none for the first
    report = jstep.verify_resume(make, step, jstep.from_state(Copies()), at=3, steps=6)
    assert report.differing == ("params/w",)


@pytest.mark.thorough
def test_large_positions_resume():
    class Buffer(Remembering):
        def __init__(self):
            self.rows = np.zeros(40_000)

        def __call__(self, step, state):
            self.rows[step] += 1 + self.rows[step - 1]
            return np.float32(self.rows.sum())

    optimizer = jstep.gradient_descent(0.1)
    step = jstep.minimize(lambda params, x: (params["w"] - x) ** 2, optimizer)
    make = lambda: jstep.TrainState.create({"w": 0.0}, optimizer)  # noqa: E731
    assert jstep.verify_resume(make, step, jstep.from_state(Buffer()), at=3, steps=6)
