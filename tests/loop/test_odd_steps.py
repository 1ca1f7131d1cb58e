"""What happens at a step between two at which something is due: nothing of it is missed or comes
twice."""

import gc
import os
import signal
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jstep
from jstep.compiling import dispatch
from jstep.compiling.dispatch import Dispatch
from jstep.hooks.cadence import Cadence
from jstep.hooks.run_hook import RunHook

STEPS = 100
ODD = 37
"""The step at which something happens."""

optimizer = jstep.adam(0.1)
train_step = jstep.minimize(
    lambda params, x: jnp.mean((params["w"][None] - x["x"]) ** 2), optimizer
)


def new_state():
    return jstep.TrainState.create({"w": jnp.zeros(3)}, optimizer)


def batch(step, rows=2):
    return {"x": jnp.full((rows, 3), step / STEPS)}


@pytest.fixture
def calls(monkeypatch):
    """The first steps of the calls."""
    made = []
    call = Dispatch.__call__

    def counting(self, state, chunk):
        made.append(chunk.first)
        return call(self, state, chunk)

    monkeypatch.setattr(Dispatch, "__call__", counting)
    return made


class Every(jstep.Hook):
    """Notes when it is called, and with which loss."""

    def __init__(self, interval):
        self.interval = interval
        self.seen = []

    def next_due(self, step):
        return step - step % self.interval + self.interval

    def after_step(self, step, state, metrics):
        assert jstep.global_step(state) == step
        self.seen.append((step, float(metrics["loss"])))


def weights(state):
    return np.asarray(state.params["w"]).tobytes()


@pytest.fixture(scope="module")
def expected():
    """The weights after each step."""
    state = new_state()
    after = {0: weights(state)}
    for step in range(STEPS):
        state, _ = train_step(state, batch(step))
        after[step + 1] = weights(state)
    return after


def test_hooks_and_bodies_are_called_at_their_steps(expected):
    ten, thirty = Every(10), Every(30)
    bodies = []
    with jstep.Run(
        train_step, new_state(), batch, STEPS, hooks=[ten, thirty], progress=False
    ) as run:
        for step in run.every(25):
            bodies.append((step, weights(run.state) == expected[step]))
    assert [step for step, _ in ten.seen] == [*range(10, 101, 10)]
    assert [step for step, _ in thirty.seen] == [30, 60, 90]
    assert bodies == [(25, True), (50, True), (75, True), (100, True)]
    assert weights(run.state) == expected[STEPS]


@pytest.fixture
def bodies():
    """The steps at which the body ran."""
    return []


def test_a_body_follows_each_step_and_its_hooks(expected):
    order = []

    class Ordered(Every):
        def after_step(self, step, state, metrics):
            order.append(("hook", step))

    with jstep.Run(
        train_step, new_state(), batch, STEPS, hooks=[Ordered(30)], progress=False
    ) as run:
        for step in run:
            order.append(("body", step))
            assert run.step == step
            assert weights(run.state) == expected[step]
            assert run.metrics["loss"].shape == ()
    both = [(who, step) for step in range(1, STEPS + 1) for who in ("hook", "body")]
    assert order == [(who, step) for who, step in both if who == "body" or step % 30 == 0]


def test_a_state_that_the_body_assigns_is_trained():
    with jstep.Run(train_step, new_state(), batch, STEPS, progress=False) as run:
        for step in run:
            if step == ODD:
                run.state = run.state.replace(params={"w": jnp.ones(3)})
    reference = new_state()
    for step in range(STEPS):
        reference, _ = train_step(reference, batch(step))
        if step + 1 == ODD:
            reference = reference.replace(params={"w": jnp.ones(3)})
    assert weights(run.state) == weights(reference)


@pytest.mark.parametrize("how", ["break", "stop"])
def test_a_body_ends_the_run(how, bodies, expected, tmp_path):
    with jstep.Run(
        train_step, new_state(), batch, STEPS, checkpoint_dir=tmp_path, progress=False
    ) as run:
        for step in run:
            bodies.append(step)
            if step == ODD and how == "break":
                break
            if step == ODD:
                run.stop()
    assert bodies == [*range(1, ODD + 1)]
    assert weights(run.state) == expected[ODD]
    assert jstep.Saver(tmp_path).all_steps() == [ODD]


def test_an_error_of_the_body_saves_nothing(bodies, expected, tmp_path):
    def fail_in_body():
        with jstep.Run(
            train_step,
            new_state(),
            batch,
            STEPS,
            checkpoint_dir=tmp_path,
            save_checkpoint_steps=20,
            progress=False,
        ) as run:
            for step in run:
                bodies.append(step)
                if step == ODD:
                    raise ValueError("in the body")

    with pytest.raises(ValueError, match="in the body") as caught:
        fail_in_body()
    assert bodies == [*range(1, ODD + 1)]
    assert weights(caught.value.state) == expected[ODD]
    assert jstep.Saver(tmp_path).all_steps() == [20]


def test_a_signal_in_the_body_is_obeyed_after_it(bodies, expected, tmp_path):
    def run_once():
        with jstep.Run(
            train_step, new_state(), batch, STEPS, checkpoint_dir=tmp_path, progress=False
        ) as run:
            for step in run:
                if step == ODD and ODD not in bodies:
                    os.kill(os.getpid(), signal.SIGTERM)
                bodies.append(step)
        return run.state

    with pytest.raises(jstep.Preempted, match=f"after step {ODD}"):
        run_once()
    assert jstep.Saver(tmp_path).all_steps() == [ODD]
    assert weights(run_once()) == expected[STEPS]
    assert bodies == [*range(1, STEPS + 1)]


def test_a_body_follows_a_hook_that_is_due_by_time():
    order = []
    seconds = [0.0]

    def batches(step):
        seconds[0] += 1.0
        return batch(step)

    class TimedInOrder(Timed):
        def _when_due(self, step, state, metrics):
            order.append(("hook", step))

    hook = TimedInOrder(lambda: seconds[0])
    with jstep.Run(train_step, new_state(), batches, 60, hooks=[hook], progress=False) as run:
        for step in run:
            order.append(("body", step))
    assert [step for who, step in order if who == "hook"] == [10, 20, 30, 40, 50, 60]
    assert [step for who, step in order if who == "body"] == [*range(1, 61)]
    assert all(
        order[i + 1] == ("body", step) for i, (who, step) in enumerate(order) if who == "hook"
    )


def test_a_hook_of_each_step_is_called_after_each_call(calls):
    jstep.train(train_step, new_state(), batch, 20, hooks=[Every(1)], progress=False)
    assert calls == [*range(20)]


class Alive:
    """Counts those of some objects that are still referred to."""

    def __init__(self):
        self.references = []

    def add(self, value):
        self.references.append(weakref.ref(value))

    def count(self):
        return sum(reference() is not None for reference in self.references)


@pytest.mark.parametrize("steps_per_call", [1, 4])
@pytest.mark.parametrize("flat", [True, False], ids=["flat", "nested"])
def test_one_batch_and_one_state_are_held(flat, steps_per_call):
    """Those of the latest step, also while the next batch is made; a call of several steps has them
    stacked."""
    batches = Alive()
    states = Alive()
    at_fetch = []
    in_body = []

    def loss(params, x):
        return jnp.mean((params["w"][None] - (x if flat else x["x"][0])) ** 2)

    def make(step):
        at_fetch.append(batches.count())
        x = jnp.full((2, 3), step / STEPS)
        batches.add(x)
        return x if flat else {"x": (x,)}

    step_fn = jstep.minimize(loss, optimizer)
    with jstep.Run(
        step_fn, new_state(), make, 24, steps_per_call=steps_per_call, progress=False
    ) as run:
        gc.disable()  # no cycle may keep them
        try:
            for _ in run:
                states.add(run.state)
                in_body.append((batches.count(), states.count()))
        finally:
            gc.enable()
    assert in_body == [(1, 1)] * (24 // steps_per_call)
    assert at_fetch[steps_per_call::steps_per_call] == [1] * (24 // steps_per_call - 1)


KINDS = {
    "array": lambda x: x,
    "tuple": lambda x: (x,),
    "dict": lambda x: {"x": x},
    "nested": lambda x: {"a": [(x,)]},
    "numpy": np.asarray,
    "numpy dict": lambda x: {"x": np.asarray(x)},
    "both": lambda x: (x, np.ones(2)),
    "number": lambda x: (np.asarray(x), 2.0),
    "fortran": np.asfortranarray,
    "doubles": lambda x: np.asarray(x, np.float64),
    "big endian": lambda x: np.asarray(x, ">f4"),
}


@pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)
def test_batches_of_each_kind_are_taken(make, expected):
    def loss(params, *args, **named):
        x = next(leaf for leaf in jax.tree.leaves((args, named)) if jnp.ndim(leaf) == 2)
        return jnp.mean((params["w"][None] - x) ** 2)

    step = jstep.minimize(loss, optimizer)
    state = jstep.train(step, new_state(), lambda n: make(batch(n)["x"]), 50, progress=False)
    assert weights(state) == expected[50]


def test_batches_of_a_data_set_are_taken():
    rows = np.arange(300, dtype=np.float32).reshape(100, 3)
    state = jstep.train(
        train_step, new_state(), jstep.batches({"x": rows}, 2, seed=1), 70, progress=False
    )
    reference = new_state()
    for step, one in zip(range(70), jstep.batches({"x": rows}, 2, seed=1), strict=False):
        assert step == jstep.global_step(reference)
        reference, _ = train_step(reference, one)
    assert weights(state) == weights(reference)


@pytest.mark.parametrize("container", [list, tuple, dict], ids=["list", "tuple", "dict"])
def test_a_buffer_that_the_loader_writes_again_is_copied(container, expected):
    """A call may read the batch later than the loader writes the next one."""

    def loss(params, *args, **named):
        (x,) = jax.tree.leaves((args, named))
        return jnp.mean((params["w"][None] - x) ** 2)

    buffer = np.empty((2, 3), np.float32)
    one = {"x": buffer} if container is dict else container([buffer])

    def batches():
        for step in range(STEPS):
            buffer[:] = batch(step)["x"]
            yield one

    state = jstep.train(
        jstep.minimize(loss, optimizer), new_state(), batches(), STEPS, progress=False
    )
    assert weights(state) == expected[STEPS]


@pytest.mark.parametrize(
    "wrong", [np.full((2, 3), 2**40), np.array([["a", "b", "c"]] * 2)], ids=["wide", "text"]
)
def test_a_batch_that_cannot_be_trained_on_is_refused_at_its_step(wrong, expected, tmp_path):
    def failing(step):
        return wrong if step == ODD else np.full((2, 3), step)

    def loss(params, x):
        return jnp.mean((params["w"][None] - x / STEPS) ** 2)

    step = jstep.minimize(loss, optimizer)
    with pytest.raises((OverflowError, TypeError), match="batch: ") as caught:
        jstep.train(step, new_state(), failing, STEPS, checkpoint_dir=tmp_path, progress=False)
    assert caught.value.state.global_step == ODD
    assert any(f"while batch {ODD} was fetched" in note for note in caught.value.__notes__)
    assert jstep.Saver(tmp_path).all_steps()[-1] == ODD


@pytest.mark.parametrize("rows", [2, 3])
def test_a_stop_while_a_batch_is_made_comes_after_its_step(rows, caplog):
    def batches():
        for step in range(STEPS):
            if step == ODD:
                run.stop()
            yield batch(step, rows if step >= ODD else 2)

    source = batches()
    with jstep.Run(train_step, new_state(), source, STEPS, progress=False) as run:
        steps = [*run]
    assert steps == [*range(1, ODD + 2)]
    # No batch of the generator is lost.
    state = jstep.train(train_step, new_state(), source, STEPS, progress=False)
    assert state.global_step == STEPS - ODD - 1
    assert "lost" not in caplog.text


@pytest.mark.parametrize("other", [3, 5])
def test_other_shapes_are_called_as_they_come(other):
    def varying(step):
        return batch(step, rows=other if step >= ODD and step % 20 > 3 else 2)

    state = jstep.train(train_step, new_state(), varying, STEPS, progress=False)
    reference = new_state()
    for step in range(STEPS):
        reference, _ = train_step(reference, varying(step))
    assert weights(state) == weights(reference)


def test_a_program_for_another_sharding_is_reported(caplog):
    """The types of these batches are the same, but JAX compiles another program for them."""
    caplog.set_level("INFO", "jstep")
    step = jstep.minimize(lambda params, x: jnp.mean((params["w"][None] - x["x"]) ** 2), optimizer)
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))

    def resharded(number):
        spec = jax.P("data") if number >= ODD else jax.P()
        return jax.device_put(batch(number), jax.NamedSharding(mesh, spec))

    state = jstep.train(step, jstep.shard_state(new_state(), mesh), resharded, 60)
    assert int(state.global_step) == 60
    lines = [record.message for record in caplog.records if "again" in record.message]
    assert len(lines) == 1
    assert "the placement of its batch differs (x: " in lines[0]


def test_shapes_may_vary_all_the_time(calls):
    state = jstep.train(
        train_step, new_state(), lambda n: batch(n, rows=2 + n % 3 // 2), 3000, progress=False
    )
    assert int(state.global_step) == 3000
    assert calls == [*range(3000)]


class Examples(RunHook):
    """Reads the examples of the run, each 20 steps."""

    _cadence = Cadence(20)

    def __init__(self):
        self.seen = []

    def _when_due(self, step, state, metrics):
        self.seen.append((step, self._run.examples))


def test_examples_are_counted():
    hook = Examples()
    jstep.train(
        train_step,
        new_state(),
        lambda n: batch(n, 2 + n // 50),
        STEPS,
        hooks=[hook],
        progress=False,
    )
    assert hook.seen == [(n, (2 * n + max(0, n - 50), 0)) for n in (20, 40, 60, 80, 100)]


@pytest.mark.parametrize("kind", ["function", "generator", "list"])
def test_the_batches_end(kind, expected):
    def until(step):
        if step == ODD:
            raise jstep.OutOfRangeError("no more")
        return batch(step)

    batches = {
        "function": until,
        "generator": (batch(step) for step in range(ODD)),
        "list": [batch(step) for step in range(ODD)],
    }[kind]
    state = jstep.train(train_step, new_state(), batches, STEPS, progress=False)
    assert int(state.global_step) == ODD
    assert weights(state) == expected[ODD]


def test_an_error_of_the_batches_has_the_state_of_its_step(expected, tmp_path):
    def failing(step):
        if step == ODD:
            raise ValueError("broken record")
        return batch(step)

    with pytest.raises(ValueError, match="broken record") as caught:
        jstep.train(
            train_step, new_state(), failing, STEPS, checkpoint_dir=tmp_path, progress=False
        )
    assert weights(caught.value.state) == expected[ODD]
    assert any(f"while batch {ODD} was fetched" in note for note in caught.value.__notes__)
    assert jstep.Saver(tmp_path).all_steps()[-1] == ODD


def test_a_signal_while_a_batch_is_made(expected, tmp_path):
    made = []

    def batches(step):
        made.append(step)
        if step == ODD and made.count(step) == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return batch(step)

    with pytest.raises(jstep.Preempted, match=f"after step {ODD}"):
        jstep.train(
            train_step, new_state(), batches, STEPS, checkpoint_dir=tmp_path, progress=False
        )
    assert jstep.Saver(tmp_path).all_steps() == [ODD]
    state = jstep.train(
        train_step, new_state(), batches, STEPS, checkpoint_dir=tmp_path, progress=False
    )
    assert weights(state) == expected[STEPS]
    assert made.count(ODD) == 2
    assert made.count(ODD - 1) == 1


def test_a_stop_from_elsewhere_ends_the_iteration(expected):
    def batches(step):
        if step == ODD:
            run.stop()
        return batch(step)

    with jstep.Run(train_step, new_state(), batches, STEPS, progress=False) as run:
        steps = [*run.every(50)]
    assert steps == [ODD + 1]
    assert weights(run.state) == expected[ODD + 1]


class Timed(RunHook):
    """Is due each 10 seconds of a clock."""

    def __init__(self, clock):
        self._cadence = Cadence(None, 10.0, clock)
        self.seen = []

    def _when_due(self, step, state, metrics):
        self.seen.append(step)


def test_a_clock_is_read_at_each_step(expected):
    seconds = [0.0]

    def batches(step):
        seconds[0] += 1.0
        return batch(step)

    timed = Timed(lambda: seconds[0])
    state = jstep.train(train_step, new_state(), batches, 60, hooks=[timed], progress=False)
    assert timed.seen == [10, 20, 30, 40, 50, 60]
    assert weights(state) == expected[60]


def test_a_state_that_a_hook_returns_is_trained():
    class Restart(Every):
        def after_step(self, step, state, metrics):
            return state.replace(params={"w": jnp.ones(3)})

    state = jstep.train(train_step, new_state(), batch, 60, hooks=[Restart(20)], progress=False)
    reference = new_state()
    for step in range(60):
        reference, _ = train_step(reference, batch(step))
        if step % 20 == 19:
            reference = reference.replace(params={"w": jnp.ones(3)})
    assert weights(state) == weights(reference)


def test_a_profile_that_begins_sees_each_step(monkeypatch, calls):
    made = []

    def batches(step):
        made.append(step)
        return batch(step)

    monkeypatch.setattr(dispatch, "is_profiling", lambda: len(made) > ODD)
    jstep.train(train_step, new_state(), batches, 60, progress=False)
    assert calls[-(60 - ODD - 1) :] == [*range(ODD + 1, 60)]
