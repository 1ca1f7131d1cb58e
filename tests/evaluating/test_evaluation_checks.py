"""What cannot be evaluated is an error before the first step, in `EvaluationHook.begin`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jstep
from jstep.core import processes
from jstep.evaluating.evaluation_batches import EvaluationBatches

X = np.arange(24.0, dtype=np.float32).reshape(12, 2)
OWN = jstep.batches(X, 4, shuffle=False, num_epochs=1)


def loss_fn(params, x):
    return jnp.mean((x @ params["w"] - 1.0) ** 2)


def metric_fn(params, x):
    return {"loss": (x @ params["w"] - 1.0) ** 2}


def run(evaluate, optimizer=None, last_step=4, state=None, hooks=(), **kwargs):
    optimizer = jstep.adam(0.1) if optimizer is None else optimizer
    state = jstep.TrainState.create({"w": jnp.ones(2)}, optimizer) if state is None else state
    step = jstep.minimize(loss_fn, optimizer)
    hook = jstep.EvaluationHook(evaluate, every_n_steps=4)
    return jstep.train(
        step, state, lambda n: X[:4], last_step, hooks=[hook, *hooks], log_steps=None, **kwargs
    ), hook


def refused(evaluate, error, words, **kwargs):
    steps = []
    with pytest.raises(error, match=words) as caught:
        run(
            evaluate,
            last_step=1000,
            hooks=[jstep.every(1, lambda step, *_: steps.append(step))],
            **kwargs,
        )
    assert steps == []
    return caught.value


class Loader:
    """A loader that counts the batches it gives."""

    def __init__(self):
        self.given = 0

    def __iter__(self):
        for start in range(0, 12, 4):
            self.given += 1
            yield X[start : start + 4]


SOURCES = {"batches": lambda: OWN, "slice": lambda: OWN[1:], "list": lambda: [X], "loader": Loader}


@pytest.mark.parametrize("source", SOURCES.values(), ids=SOURCES)
@pytest.mark.parametrize(
    ("fn", "error", "words"),
    [
        (
            lambda params, x, y: {"loss": x},
            TypeError,
            "missing 1 required positional argument: 'y'",
        ),
        (lambda params, x: {"loss": x @ jnp.ones(7)}, TypeError, "dot_general"),
        (lambda params, x: x, TypeError, "metric_fn returned .*: must be a mapping"),
        (lambda params, x: {"loss": x}, ValueError, "the metric 'loss' has shape"),
        (lambda params, x: {"loss": params["v"]}, KeyError, "v"),
    ],
    ids=["argument", "shape", "mapping", "metric", "name"],
)
def test_a_metric_function_that_fails(fn, error, words, source):
    refused(jstep.evaluator(fn, source()), error, words)


def test_a_batch_that_is_given_in_place_of_batches_is_named():
    def fn(params, x, y):
        return metric_fn(params, x) | {"error": y}

    y = np.ones(12, np.float32)
    error = refused(jstep.evaluator(fn, (X, y)), TypeError, "missing 1 required")
    assert any("give [(x, y)]" in line for line in error.__notes__)
    error = refused(
        jstep.evaluator(fn, ((X, y, y), (X, y, y))), TypeError, "takes 3 positional arguments"
    )
    assert not any("give [(x, y)]" in line for line in error.__notes__)
    run(jstep.evaluator(fn, ((X, y), (X, y))))


def test_averages_that_are_missing():
    words = r"use_averages='ema': .*ExponentialMovingAverage"
    optimizer = jstep.with_moving_average(jstep.adam(0.1), jstep.ExponentialMovingAverage(0.9))
    refused(
        jstep.evaluator(metric_fn, OWN, use_averages="ema"), ValueError, words, optimizer=optimizer
    )
    refused(jstep.evaluator(metric_fn, OWN, use_averages=True), ValueError, "use_averages=True")
    run(jstep.evaluator(metric_fn, OWN, use_averages=True), optimizer=optimizer)


def test_a_missing_model_state_is_named():
    optimizer = jstep.adam(0.1)
    state = jstep.TrainState.create(
        {"w": jnp.ones(2)}, optimizer, model_state={"mean": jnp.zeros(2)}
    )
    evaluate = jstep.evaluator(
        lambda params, model_state, x: metric_fn(params, x - model_state["mean"]), OWN
    )
    error = refused(evaluate, TypeError, "missing 1 required", state=state)
    assert any("has_model_state=True" in line for line in error.__notes__)
    with pytest.raises(TypeError, match="missing 1 required") as caught:
        evaluate(
            jstep.TrainState.create(
                {"w": jnp.ones(2)}, optimizer, model_state={"mean": jnp.zeros(2)}
            )
        )
    assert any("has_model_state=True" in line for line in caught.value.__notes__)
    refused(
        jstep.evaluator(metric_fn, OWN, has_model_state=True),
        ValueError,
        "the state has no model state",
    )


def test_the_check_runs_and_reads_nothing_twice():
    traced, called = [], []

    def fn(params, x):
        traced.append(1)
        jax.debug.callback(lambda: called.append(1))
        return metric_fn(params, x)

    loader = Loader()
    evaluate = jstep.evaluator(fn, loader)
    seen = []

    class Looks(jstep.Hook):
        def begin(self, state):
            seen.append((loader.given, len(called)))

    _, hook = run(evaluate, hooks=[Looks()])
    jax.effects_barrier()
    assert seen == [(1, 0)]
    assert loader.given == 3
    assert len(called) == 3
    assert len(traced) == 1
    by_list = run(jstep.evaluator(metric_fn, [X[:4], X[4:8], X[8:]]))[1]
    assert hook.results == by_list.results


def test_batches_of_several_processes(monkeypatch):
    """Rows of each process need a sharding; others are not read, since processes may have different
    numbers of them."""
    monkeypatch.setattr(processes, "is_single_process", lambda: False)
    state = jstep.TrainState.create({"w": jnp.ones(2)}, jstep.adam(0.1))
    own = jstep.evaluator(metric_fn, OWN)
    for call in (own, own.check):
        with pytest.raises(
            ValueError,
            match=r"batch_sharding=None: jstep\.batches gives each process its own rows",
        ):
            call(state)
    loader, traced = Loader(), []
    jstep.evaluator(lambda params, x: traced.append(1) or metric_fn(params, x), loader).check(state)
    assert (loader.given, traced) == (0, [])


@pytest.mark.thorough(except_for=["True-AxisType.Explicit"])
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("use_averages", [False, True])
def test_meshes(axis_type, use_averages):
    """A function that Explicit axes refuse is evaluated on Auto axes, in the check too."""
    mesh = jax.make_mesh((4,), ("data",), axis_types=(axis_type,))
    rows = NamedSharding(mesh, P("data"))
    optimizer = jstep.with_moving_average(jstep.adam(0.1), jstep.ExponentialMovingAverage(0.9))
    state = jstep.TrainState.create({"w": jnp.ones(2)}, optimizer)
    state = jstep.shard_state(state, mesh, P())

    def fn(params, x):
        return {
            "loss": (x @ params["w"] - 1.0) ** 2,
            "sorted": x.reshape(2, -1, 2).sum(axis=(0, 2)).mean(),
        }

    evaluate = jstep.evaluator(fn, [X[:4], X[4:8]], use_averages=use_averages, batch_sharding=rows)
    _, hook = run(evaluate, optimizer, state=state, batch_sharding=rows)
    assert np.isfinite(hook.results[4]["loss"])
    refused(
        jstep.evaluator(lambda params, x: {"loss": x @ jnp.ones(7)}, [X], batch_sharding=rows),
        TypeError,
        "dot_general",
        optimizer=optimizer,
        state=jstep.shard_state(jstep.TrainState.create({"w": jnp.ones(2)}, optimizer), mesh, P()),
        batch_sharding=rows,
    )


def test_the_hash_of_the_data_is_that_of_the_first_batch_while_an_evaluation_takes_it():
    """It is computed in another thread than the evaluation, which takes the batch right after it
    was looked for."""

    class Loader:
        def __iter__(self):
            return iter([np.arange(3.0), np.arange(3.0)])

    class Taken(EvaluationBatches):
        _is_taken = False

        @property
        def _read_ahead(self):
            begun = self.kept
            if self._is_taken:
                self.kept = None
            return begun

        @_read_ahead.setter
        def _read_ahead(self, begun):
            self.kept = begun

    batches = Taken(Loader())
    batches.first_shapes(None)
    expected = batches.first_hash()
    batches._is_taken = True
    assert batches.first_hash() == expected
    assert batches.first_hash() is None
