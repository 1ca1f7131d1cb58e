"""Moving averages: their equation in NumPy, and those with an interval, a `var_list` or another name."""

from typing import Any

import equations
import jax
import jax.numpy as jnp
import numpy as np
import pytest

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
    np.testing.assert_array_equal(averages["w"], np.zeros(3) if zero_debias else VALUES[0])
    expected = [equations.averages(ema, column[0], enumerate(column[1:])) for column in VALUES.T]
    for n, value in enumerate(VALUES[1:], 1):
        averages = ema.apply(averages, {"w": value}, num_updates=n)
        np.testing.assert_allclose(averages["w"], [one[n - 1] for one in expected], rtol=1e-11)


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


PARAMS = {"w": jnp.array([1.0, 2.0]), "deep": {"b": jnp.array(3.0)}, "n": jnp.array(4)}


def run(optimizer: Any, steps: int, start: int = 0) -> tuple[Any, list[Any]]:
    """Return the last state and the states after each step."""
    state = jstep.TrainState.create(PARAMS, optimizer, start)
    step = jax.jit(lambda s, g: jstep.apply_gradients(s, g, optimizer))
    states = []
    for i in range(steps):
        g = jnp.float32(1.0 + i)
        state = step(state, {"w": jnp.full(2, g), "deep": {"b": g}, "n": None})
        states.append(state)
    return state, states


def test_apply_with_every_requires_num_updates() -> None:
    ema = jstep.ExponentialMovingAverage(0.5, every=2)
    averages = ema.init({"w": jnp.float32(0.0)})
    with pytest.raises(ValueError, match="num_updates=None"):
        ema.apply(averages, {"w": jnp.float32(1.0)})
    for n, want in ((1, 0.0), (2, 0.5), (3, 0.5), (4, 0.75)):
        averages = ema.apply(averages, {"w": jnp.float32(1.0)}, num_updates=n)
        assert float(averages["w"]) == want


def test_nonfinite_params_between_updates_are_ignored() -> None:
    """Between two updates the parameters do not enter the average, not even as 0 · ∞."""
    ema = jstep.ExponentialMovingAverage(0.5, every=2)
    averages = ema.apply(ema.init({"w": jnp.float32(1.0)}), {"w": jnp.float32(jnp.inf)}, num_updates=1)
    assert float(averages["w"]) == 1.0


@pytest.mark.parametrize(
    "var_list", [["w"], "w*", lambda path, leaf: path == "w", {"w": True, "deep": False, "n": False}]
)
def test_var_list_selects_the_averaged_params(var_list: Any) -> None:
    ema = jstep.ExponentialMovingAverage(0.5)
    state, _ = run(jstep.with_moving_average(jstep.gradient_descent(0.1), ema, var_list), 3)
    assert jstep.get_slot(state, ema.name, "deep/b") is None
    averaged = jstep.averaged_params(state)
    np.testing.assert_array_equal(averaged["deep"]["b"], state.params["deep"]["b"])
    assert not np.array_equal(averaged["w"], state.params["w"])


def test_averaged_params_with_invalid_arguments() -> None:
    with pytest.raises(TypeError, match="state=None: must be a TrainState"):
        jstep.averaged_params(None)  # type: ignore[arg-type]
    ema = jstep.ExponentialMovingAverage(0.5)
    state = run(jstep.scope("x", jstep.with_moving_average(jstep.gradient_descent(0.1), ema)), 1)[0]
    assert jstep.averaged_params(state)["w"] is not None
    with pytest.raises(ValueError, match=r"nearest: 'x/ExponentialMovingAverage'"):
        jstep.averaged_params(state, "x/ExponentialMovingAverages")


EVERY_SECOND = jstep.ExponentialMovingAverage(1.0, zero_debias=True, every=2)


def test_averages_that_wait_have_an_age_of_their_own_which_a_checkpoint_keeps(tmp_path: Any) -> None:
    optimizer = jstep.with_moving_average(jstep.adam(0.1), EVERY_SECOND)
    state, states = run(optimizer, 7, start=3)
    assert int(state.slots["start_step"]) == 3
    assert int(state.slots["with_moving_average/ExponentialMovingAverage/start_step"]) == 10 - 4  # steps 4, 6, 8, 10
    with jstep.Saver(tmp_path) as saver:
        saver.save(states[2])
        resumed = saver.restore(jstep.TrainState.create(PARAMS, optimizer))
    for i in range(3, 7):
        g = jnp.float32(1.0 + i)
        resumed = jstep.apply_gradients(resumed, {"w": jnp.full(2, g), "deep": {"b": g}, "n": None}, optimizer)
    np.testing.assert_allclose(jstep.averaged_params(resumed)["w"], jstep.averaged_params(state)["w"], rtol=1e-6)
    plain = jstep.with_moving_average(jstep.adam(0.1), jstep.ExponentialMovingAverage(0.9, zero_debias=True))
    assert "with_moving_average/ExponentialMovingAverage/start_step" not in jstep.TrainState.create(PARAMS, plain).slots


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
