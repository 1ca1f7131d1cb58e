"""Moving averages, compared with their equation in NumPy."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from hypothesis import given
from hypothesis import strategies as st
from thorough import examples

import jstep

VALUES = np.random.default_rng(0).normal(size=(15, 3))
EMA = "ExponentialMovingAverage"


@pytest.mark.thorough(except_for="each value once")
@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("num_updates", [False, True])
@pytest.mark.parametrize("zero_debias", [False, True])
@pytest.mark.parametrize("decay", [0.0, 0.3, 0.9, 0.999])
def test_apply(decay: float, num_updates: bool, zero_debias: bool) -> None:
    ema = jstep.ExponentialMovingAverage(decay, num_updates=num_updates, zero_debias=zero_debias)
    averages = ema.init({"w": VALUES[0]})
    expected = np.zeros(3) if zero_debias else VALUES[0]
    np.testing.assert_array_equal(averages["w"], expected)
    for n, value in enumerate(VALUES[1:], 1):
        averages = ema.apply(averages, {"w": value}, num_updates=n)
        expected = reference.moved_average(
            expected, value, decay, n, num_updates=num_updates, age=n if zero_debias else None
        )
        np.testing.assert_allclose(averages["w"], expected, rtol=1e-11)


@pytest.mark.usefixtures("x64")
@examples(30)
@given(st.floats(0.0, 0.99999), st.integers(1, 40))
def test_zero_debias_is_the_unbiased_average(decay: float, n: int) -> None:
    """It equals Σ d^(n−i)·xᵢ / Σ d^(n−i), the average without its initial value."""
    with jax.enable_x64(True):
        values = np.random.default_rng(1).normal(size=n)
        ema = jstep.ExponentialMovingAverage(decay, zero_debias=True)
        averages = ema.init({"w": np.float64(7.0)})
        for i, value in enumerate(values, 1):
            averages = ema.apply(averages, {"w": value}, num_updates=i)
        weights = decay ** np.arange(n - 1, -1, -1.0)
        np.testing.assert_allclose(averages["w"], np.sum(weights * values) / np.sum(weights), rtol=1e-8, atol=1e-12)


def test_a_decay_near_one_is_precise_in_float32() -> None:
    """In float32, 1 − 0.999999 is wrong in the second digit."""
    ema = jstep.ExponentialMovingAverage(0.999999)
    moved = ema.apply(ema.init({"w": jnp.float32(0)}), {"w": jnp.float32(1)})
    np.testing.assert_allclose(moved["w"], 1e-6, rtol=1e-5)
    debiased = jstep.ExponentialMovingAverage(0.999999, zero_debias=True)
    first = debiased.apply(debiased.init({"w": jnp.float32(0)}), {"w": jnp.float32(3)}, num_updates=1)
    np.testing.assert_allclose(first["w"], 3.0, rtol=1e-6)


def test_num_updates_takes_the_smaller_decay() -> None:
    ema = jstep.ExponentialMovingAverage(0.9, num_updates=True)
    zero, one = {"w": jnp.float32(0)}, {"w": jnp.float32(1)}
    for n in (0, 1, 5, 79, 80, 81, 10**6, 2**31 - 1):
        expected = 1 - min(0.9, (1 + n) / (10 + n))
        np.testing.assert_allclose(ema.apply(zero, one, num_updates=n)["w"], expected, rtol=1e-6)
        traced = jax.jit(lambda n: ema.apply(zero, one, num_updates=n))(n)
        np.testing.assert_allclose(traced["w"], expected, rtol=1e-6)


def test_init_copies_and_widens() -> None:
    params = {"f": jnp.ones(2), "h": jnp.ones(2, jnp.bfloat16), "i": jnp.ones(2, jnp.int32), "n": None}
    averages = jstep.ExponentialMovingAverage(0.9).init(params)
    assert averages["f"] is not params["f"]
    assert averages["h"].dtype == jnp.float32
    assert averages["i"] is None
    assert averages["n"] is None
    moved = jstep.ExponentialMovingAverage(0.9).apply(averages, params)
    assert moved["h"].dtype == jnp.float32
    assert moved["i"] is None


def test_names() -> None:
    ema = jstep.ExponentialMovingAverage(0.9)
    assert ema.name == EMA
    assert ema.average_name("dense/kernel") == "dense/kernel/ExponentialMovingAverage"
    assert jstep.ExponentialMovingAverage(0.9, name="avg").average_name("w") == "w/avg"


# With an optimizer.


def run(optimizer: jstep.Optimizer, steps: int, global_step: int = 0) -> tuple[jstep.TrainState, list[np.ndarray]]:
    state = jstep.TrainState.create({"w": VALUES[0].astype(np.float32)}, optimizer, global_step)
    step = jax.jit(lambda s, g: jstep.apply_gradients(s, g, optimizer))
    seen = []
    for i in range(steps):
        state = step(state, {"w": VALUES[i + 1].astype(np.float32)})
        seen.append(np.asarray(state.params["w"], np.float64))
    return state, seen


@pytest.mark.thorough(except_for="each value once")
@pytest.mark.parametrize("global_step", [0, 100])
@pytest.mark.parametrize("num_updates", [False, True])
@pytest.mark.parametrize("zero_debias", [False, True])
@pytest.mark.parametrize("inner", [jstep.adam(0.1), jstep.momentum(0.1, 0.9)], ids=["adam", "momentum"])
def test_with_moving_average(inner: Any, num_updates: bool, zero_debias: bool, global_step: int) -> None:
    """n is the step after the update; the age of debiased averages counts from start_step."""
    ema = jstep.ExponentialMovingAverage(0.95, num_updates, zero_debias)
    optimizer = jstep.with_moving_average(inner, ema)
    state, seen = run(optimizer, 6, global_step)
    expected = np.zeros(3) if zero_debias else VALUES[0].astype(np.float32).astype(np.float64)
    for i, value in enumerate(seen, 1):
        expected = reference.moved_average(
            expected, value, 0.95, global_step + i, num_updates=num_updates, age=i if zero_debias else None
        )
    np.testing.assert_allclose(state.slots[EMA]["w"], expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(jstep.averaged_params(state)["w"], state.slots[EMA]["w"])
    alone, plain = run(inner, 6, global_step)
    np.testing.assert_allclose(plain[-1], seen[-1], rtol=1e-6)  # the average does not change the parameters
    assert optimizer.hyperparameters(0).keys() == inner.hyperparameters(0).keys()
    assert sorted(state.slots) == sorted({*alone.slots, EMA, *(["start_step"] if zero_debias else [])})


def test_averaged_params_keep_dtypes_and_other_leaves() -> None:
    optimizer = jstep.with_moving_average(jstep.gradient_descent(1.0), jstep.ExponentialMovingAverage(0.5))
    params = {"f": jnp.zeros(2), "h": jnp.zeros(2, jnp.bfloat16), "i": jnp.arange(2), "n": None, "k": jax.random.key(0)}
    state = jstep.TrainState.create(params, optimizer)
    grads = {"f": -jnp.ones(2), "h": -jnp.ones(2, jnp.bfloat16), "i": None, "n": None, "k": None}
    state = jstep.apply_gradients(state, grads, optimizer)
    averaged = jstep.averaged_params(state)
    assert jax.tree.structure(averaged) == jax.tree.structure(state.params)
    np.testing.assert_array_equal(averaged["f"], [0.5, 0.5])
    assert averaged["h"].dtype == jnp.bfloat16
    np.testing.assert_array_equal(averaged["h"].astype(jnp.float32), [0.5, 0.5])
    np.testing.assert_array_equal(averaged["i"], [0, 1])
    assert averaged["k"].dtype == params["k"].dtype


def test_two_averages_with_different_names() -> None:
    optimizer = jstep.with_moving_average(
        jstep.with_moving_average(jstep.gradient_descent(1.0), jstep.ExponentialMovingAverage(0.5)),
        jstep.ExponentialMovingAverage(0.75, name="slow"),
    )
    state = jstep.TrainState.create({"w": 0.0}, optimizer)
    state = jstep.apply_gradients(state, {"w": jnp.float32(-1)}, optimizer)
    assert float(jstep.averaged_params(state)["w"]) == 0.5
    assert float(jstep.averaged_params(state, name="slow")["w"]) == 0.25
    with pytest.raises(ValueError, match=EMA):
        jstep.TrainState.create(
            {"w": 0.0},
            jstep.with_moving_average(
                jstep.with_moving_average(jstep.gradient_descent(1.0), jstep.ExponentialMovingAverage(0.5)),
                jstep.ExponentialMovingAverage(0.75),
            ),
        )


def test_skipped_updates_do_not_age_the_averages() -> None:
    ema = jstep.ExponentialMovingAverage(0.9, zero_debias=True)
    optimizer = jstep.skip_nonfinite(jstep.with_moving_average(jstep.gradient_descent(1.0), ema))
    state = jstep.TrainState.create({"w": 0.0}, optimizer)
    for g in (np.nan, -3.0):
        state = jstep.apply_gradients(state, {"w": jnp.float32(g)}, optimizer)
    assert jstep.global_step(state) == 2
    np.testing.assert_allclose(jstep.averaged_params(state)["w"], 3.0, rtol=1e-6)  # the first average is the value
