"""Moving averages, compared with their equation in NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference

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
