"""Moving averages with a start step, an interval or a `var_list`."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jstep

PARAMS = {"w": jnp.array([1.0, 2.0]), "deep": {"b": jnp.array(3.0)}, "n": jnp.array(4)}


def run(optimizer: Any, steps: int, start: int = 0, skipped: tuple[int, ...] = ()) -> tuple[Any, list[Any]]:
    """Return the last state and the states after each step."""
    state = jstep.TrainState.create(PARAMS, optimizer, start)
    step = jax.jit(lambda s, g: jstep.apply_gradients(s, g, optimizer))
    states = []
    for i in range(steps):
        g = jnp.float32(jnp.nan if i in skipped else 1.0 + i)
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
