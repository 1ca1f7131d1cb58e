"""Hyperparameters of Optax transformations are reported at Optax's own count of updates."""

import pickle
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jstep

RATE = optax.linear_schedule(0.0, 1.0, 10)
RATES = {"learning_rate": RATE}
DATA = [1.0, np.nan, np.nan, 1.0, 1.0, 1.0, 1.0, 1.0]
PARAMS = {"a": jnp.zeros(2), "aa": jnp.zeros(2), "n": jnp.int32(1)}


def loss(params: Any, x: Any) -> Any:
    return jnp.sum(params["a"] * x) + jnp.sum(params["aa"] * x)


def sgd(**given: Any) -> jstep.Optimizer:
    return jstep.from_optax(optax.sgd(RATE), hyperparameters=RATES, **given)


def labels(path: str, leaf: Any) -> str | None:
    return path if path != "n" else None


def by_label() -> jstep.Optimizer:
    """Two parts with one name of their slots, one of which updates every third step only."""
    return jstep.partition({"a": sgd(), "aa": jstep.update_every(3, sgd())}, labels)


AROUND: dict[str, tuple[Callable[[], jstep.Optimizer], dict[str, str]]] = {
    "guard": (lambda: jstep.skip_nonfinite(sgd()), {"a": "learning_rate"}),
    "every": (lambda: jstep.skip_nonfinite(jstep.update_every(2, sgd(), accumulate=True)), {"a": "learning_rate"}),
    "scope": (lambda: jstep.skip_nonfinite(jstep.scope("b/c", sgd(name="x/y"))), {"a": "b/c/learning_rate"}),
    "labels": (lambda: jstep.skip_nonfinite(by_label()), {"a": "a/learning_rate", "aa": "aa/learning_rate"}),
    "chain of two": (
        lambda: jstep.skip_nonfinite(
            jstep.chain(jstep.scope("first", jstep.from_optax(optax.scale_by_schedule(lambda n: 1.0))), sgd())
        ),
        {"a": "learning_rate"},
    ),
}


def run(optimizer: jstep.Optimizer, names: dict[str, str], **create: Any) -> list[tuple[float, float]]:
    """The logged and the used rates of the steps that made an update."""
    step = jstep.minimize(loss, optimizer)
    state = jstep.TrainState.create(PARAMS, optimizer, **create)
    found = []
    for x in DATA:
        before = {leaf: np.asarray(state.params[leaf]) for leaf in names}
        state, metrics = step(state, jnp.float32(x))
        for leaf, name in names.items():
            used = float((before[leaf] - np.asarray(state.params[leaf]))[1])
            found.append((float(metrics[name]), used, float(np.isfinite(x))))
    return [(logged, used) for logged, used, is_finite in found if used]


@pytest.mark.thorough(except_for=["0-guard", "5-labels"])
@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize("start", [0, 5])
def test_a_schedule_is_reported_at_the_count_of_updates(around: str, start: int) -> None:
    make, names = AROUND[around]
    found = run(make(), names, global_step=start)
    assert len(found) >= 2
    np.testing.assert_allclose(*zip(*found, strict=True), rtol=1e-5)


WITH_ONE_COUNT = {
    "adam": optax.adam(RATE),
    "a chain of several": optax.chain(
        optax.clip_by_global_norm(9.0), optax.adamw(RATE, mask={"a": True, "aa": False, "n": False})
    ),
    "injected": optax.inject_hyperparams(optax.adam)(learning_rate=RATE, b1=lambda n: 0.9),
    "beside a period": optax.chain(optax.apply_every(3), optax.sgd(RATE)),
    "compiled": optax.GradientTransformation(
        optax.adam(RATE).init, jax.jit(lambda g, s, p: optax.adam(RATE).update(g, s, p))
    ),
    "with extra arguments": optax.chain(optax.scale_by_polyak(), optax.sgd(RATE)),
}
WITH_OTHERS = {
    "none": optax.sgd(0.1),
    "accumulating": optax.MultiSteps(optax.adam(RATE), 2),
    "guarded": optax.apply_if_finite(optax.adam(RATE), 3),
    "at some steps": optax.transforms.conditionally_transform(optax.adam(RATE), lambda step: step % 2 == 0),
    "by label": optax.multi_transform({"x": optax.adam(RATE)}, {"a": "x", "aa": "x", "n": "x"}),
}


@pytest.mark.thorough(except_for=["injected"])
@pytest.mark.parametrize("name", WITH_ONE_COUNT)
def test_transformations_with_one_count(name: str) -> None:
    """After two skipped steps of four, the rate is that of the second update."""
    optimizer = jstep.skip_nonfinite(jstep.scope("x", jstep.from_optax(WITH_ONE_COUNT[name], RATES)))
    step = jstep.minimize(loss, optimizer)
    state = jstep.TrainState.create(PARAMS, optimizer)
    rates = []
    for x in DATA[:5]:
        state, metrics = step(state, jnp.float32(x))
        rates.append(float(metrics["x/learning_rate"]))
    np.testing.assert_allclose(rates, [0.0, 0.1, 0.1, 0.1, 0.2], rtol=1e-6)


@pytest.mark.thorough(except_for=["by label"])
@pytest.mark.parametrize("name", WITH_OTHERS)
def test_without_a_count_that_is_known_there_is_no_metric(name: str, caplog: Any) -> None:
    given = {"learning_rate": RATE, "beta1": 0.5}
    for hyperparameters in (given, lambda step: {"learning_rate": RATE(step), "beta1": 0.5}):
        caplog.clear()
        optimizer = jstep.scope("x", jstep.from_optax(WITH_OTHERS[name], hyperparameters))
        state = jstep.TrainState.create(PARAMS, optimizer)
        for step in (jstep.minimize(loss, optimizer), jstep.minimize(loss, optimizer, metrics=("grad_norm",))):
            _, metrics = step(jax.tree.map(jnp.copy, state), jnp.float32(1.0))
            assert metrics.keys() - {"grad_norm"} == {"loss", "x/beta1"}
        (line,) = [record.getMessage() for record in caplog.records if record.name == "jstep"]
        assert line.startswith("from_optax: learning_rate is not reported, because")
        assert "jstep.chain(jstep.from_optax(optax.scale_by_…), jstep.scale_by_learning_rate(rate))" in line


def test_a_state_can_be_pickled() -> None:
    optimizer = jstep.skip_nonfinite(sgd())
    state = jstep.TrainState.create(PARAMS, optimizer)
    state, _ = jstep.minimize(loss, optimizer)(state, jnp.float32(1.0))
    again, metrics = jstep.minimize(loss, optimizer)(pickle.loads(pickle.dumps(state)), jnp.float32(1.0))
    assert float(metrics["learning_rate"]) == pytest.approx(0.1)
    assert int(again.global_step) == 2


def test_a_function_of_the_step_and_numbers(caplog: Any) -> None:
    both = jstep.from_optax(optax.sgd(RATE), lambda n: {"learning_rate": RATE(n), "momentum": 0.5})
    found = run(jstep.skip_nonfinite(both), {"a": "learning_rate"})
    np.testing.assert_allclose(*zip(*found, strict=True), rtol=1e-5)
    optimizer = jstep.from_optax(optax.sgd(0.5), {"learning_rate": 0.5})
    _, metrics = jstep.minimize(loss, optimizer)(jstep.TrainState.create(PARAMS, optimizer), jnp.float32(1.0))
    assert float(metrics["learning_rate"]) == 0.5
    assert not caplog.records


def test_the_recommended_chain_reports_the_rate_that_is_used() -> None:
    blocks = jstep.from_optax(optax.scale_by_sign())
    found = run(jstep.skip_nonfinite(jstep.chain(blocks, jstep.scale_by_learning_rate(RATE))), {"a": "learning_rate"})
    assert len(found) == 5
    np.testing.assert_allclose(*zip(*found, strict=True), rtol=1e-5)


ENDS = optax.linear_schedule(0.1, 0.0, 5)


def ends(transformation: Any = None) -> jstep.Optimizer:
    return jstep.from_optax(transformation or optax.sgd(ENDS), {"learning_rate": ENDS})


ZERO_FROM: dict[str, tuple[Callable[[], jstep.Optimizer], int, int | None]] = {
    "alone": (ends, 0, 5),
    "below a label": (lambda: jstep.partition({"a": ends(), "b": jstep.sgd(ENDS)}, lambda path, leaf: path[:1]), 2, 7),
    "a count that lags": (lambda: jstep.scope("x", jstep.update_every(3, ends())), 0, None),
    "an unknown count": (lambda: ends(optax.MultiSteps(optax.sgd(ENDS), 2)), 0, None),
    "no rate that is known": (
        lambda: jstep.partition({"a": ends(), "aa": jstep.from_optax(optax.sgd(0.1))}, labels), 0, None,
    ),
}  # fmt: skip


@pytest.mark.thorough(except_for=["below a label", "a count that lags"])
@pytest.mark.parametrize("name", ZERO_FROM)
def test_a_rate_that_is_0_up_to_the_end(name: str, caplog: Any) -> None:
    make, start, want = ZERO_FROM[name]
    optimizer = make()
    params = {"a": jnp.zeros(2), "aa": jnp.zeros(2)}
    state = jstep.TrainState.create(params, optimizer, global_step=start)
    jstep.train(jstep.minimize(loss, optimizer), state, lambda n: np.float32(1), 12, progress=False)
    found = [record.getMessage() for record in caplog.records if "learning rate is 0" in record.getMessage()]
    assert [line.split(" to the end")[0] for line in found] == [f"The learning rate is 0 from step {want}"] * bool(want)
