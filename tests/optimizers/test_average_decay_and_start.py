"""Moving averages with a decay that changes, and with initial values of their own."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jstep

PARAMS = {"w": jnp.array([1.0, 2.0]), "half": jnp.ones(2, jnp.bfloat16), "n": jnp.int32(3)}
ONES = {"w": jnp.ones(2), "half": jnp.ones(2, jnp.bfloat16), "n": None}


def averages_of(optimizer, steps=3, changes=None):
    """Return the averages of "w" at each step, and the parameters, after `changes(state, step)`."""
    state = jstep.TrainState.create(PARAMS, optimizer)
    averages, params = [state.slots[AVERAGES]["w"]], [state.params["w"]]
    for step in range(steps):
        state = changes(state, step) if changes else state
        state = jstep.apply_gradients(state, ONES, optimizer)
        averages.append(state.slots[AVERAGES]["w"])
        params.append(state.params["w"])
    return averages, params


AVERAGES = "ExponentialMovingAverage"
DECAYS = [0.0, 0.25, 0.75]


@pytest.mark.thorough(except_for=["False"])
@pytest.mark.parametrize("zero_debias", [False, True])
def test_a_schedule_is_read_at_the_step_of_the_update(zero_debias):
    schedule = jstep.piecewise_constant([0, 1], DECAYS)
    ema = jstep.ExponentialMovingAverage(schedule, zero_debias=zero_debias)
    optimizer = jstep.with_moving_average(jstep.gradient_descent(1.0), ema)
    averages, params = averages_of(optimizer)
    average = averages[0]
    alone = ema.init(PARAMS)["w"]
    for step, decay in enumerate(DECAYS):
        rate = (1 - decay) / (1 - decay ** (step + 1)) if zero_debias else 1 - decay
        average = average - rate * (average - params[step + 1])
        np.testing.assert_allclose(averages[step + 1], average, rtol=1e-6)
        alone = ema.apply({"w": alone}, {"w": params[step + 1]}, num_updates=step + 1)["w"]
        np.testing.assert_allclose(alone, average, rtol=1e-6)
    assert {name: float(value) for name, value in optimizer.hyperparameters(1).items()} == {
        "learning_rate": 1.0,
        "ExponentialMovingAverage/decay": 0.25,
    }
    with pytest.raises(
        ValueError, match=r"num_updates=None: an average with .* a schedule needs the number of updates"
    ):
        jstep.ExponentialMovingAverage(schedule).apply({"w": alone}, {"w": alone})


def test_a_held_decay_is_in_the_state():
    ema = jstep.ExponentialMovingAverage(jstep.held("teacher", 0.0))
    optimizer = jstep.with_moving_average(jstep.gradient_descent(1.0), ema)

    def changes(state, step):
        return jstep.set_hyperparameter(state, "teacher", DECAYS[step])

    averages, params = averages_of(optimizer, changes=changes)
    for step, decay in enumerate(DECAYS):
        np.testing.assert_allclose(averages[step + 1], decay * averages[step] + (1 - decay) * params[step + 1])
    step = jstep.minimize(lambda p: jnp.sum(p["w"]), optimizer)
    _, metrics = step(jstep.TrainState.create(PARAMS, optimizer))
    assert float(metrics["teacher"]) == 0
    with pytest.raises(
        TypeError, match=r"decay=held\('teacher', …\): its value is in the state: use jstep.with_moving"
    ):
        ema.apply(ema.init(PARAMS), PARAMS)


def moved_by(ema, change=lambda state: state):
    """Return how far the average of a parameter that stays 1 moves from 0 in one update."""
    optimizer = jstep.with_moving_average(
        jstep.gradient_descent(0.0), ema, initial=None if ema.zero_debias else lambda p: jax.tree.map(jnp.zeros_like, p)
    )
    state = change(jstep.TrainState.create({"w": jnp.ones(2)}, optimizer))
    state, metrics = jstep.minimize(lambda p: jnp.sum(p["w"]), optimizer)(state)
    return float(state.slots[ema.name]["w"][1]), metrics


@pytest.mark.thorough(except_for=["1e-07"])
@pytest.mark.parametrize("rate", [1.0, 1e-4, 1e-7, 0.0])
def test_a_rate_is_applied_as_it_is_given_where_a_decay_loses_digits(rate):
    exact = np.float32(rate)
    number, metrics = moved_by(jstep.ExponentialMovingAverage(rate=rate))
    assert number == exact
    assert "ExponentialMovingAverage/rate" not in metrics
    scheduled, metrics = moved_by(jstep.ExponentialMovingAverage(rate=lambda step: rate, name="mean"))
    assert scheduled == exact
    assert float(metrics["mean/rate"]) == exact
    held = jstep.ExponentialMovingAverage(rate=jstep.held("speed", 0.5))
    moved, metrics = moved_by(held, lambda state: jstep.set_hyperparameter(state, "speed", rate))
    assert moved == exact
    assert float(metrics["speed"]) == exact


def test_a_rate_with_num_updates_and_zero_debias():
    assert moved_by(jstep.ExponentialMovingAverage(rate=1e-7, num_updates=True))[0] == np.float32(9 / 11)
    assert moved_by(jstep.ExponentialMovingAverage(rate=0.95, num_updates=True))[0] == np.float32(0.95)
    assert moved_by(jstep.ExponentialMovingAverage(rate=1e-7, zero_debias=True))[0] == 1
    for rate in (1e-3, 0.0):
        given = jstep.ExponentialMovingAverage(rate=rate, zero_debias=True)
        same = jstep.ExponentialMovingAverage(1 - rate, zero_debias=True)
        for age in (1, 2, 50):
            np.testing.assert_allclose(given.weight(age), same.weight(age), rtol=1e-6)


@pytest.mark.parametrize("given", [lambda params: {**params, "w": params["w"] * 10}, {**PARAMS, "w": PARAMS["w"] * 10}])
def test_initial_values(given):
    ema = jstep.ExponentialMovingAverage(0.75)
    optimizer = jstep.with_moving_average(jstep.gradient_descent(1.0), ema, initial=given)
    averages, params = averages_of(optimizer, steps=1)
    assert averages[0].tolist() == [10.0, 20.0]
    assert averages[1].tolist() == (0.75 * averages[0] + 0.25 * params[1]).tolist()
    state = jstep.TrainState.create(PARAMS, optimizer)
    assert state.slots[AVERAGES]["half"].dtype == jnp.float32
    assert state.slots[AVERAGES]["n"] is None
    assert jax.eval_shape(lambda: jstep.TrainState.create(PARAMS, optimizer)).slots[AVERAGES]["w"].shape == (2,)
    step = jstep.minimize(lambda p: jnp.sum(p["w"]), optimizer)
    step(state)  # donates the averages, and neither params nor the initial values
    assert jstep.averaged_params(jstep.TrainState.create(PARAMS, optimizer))["w"].tolist() == [10.0, 20.0]


def test_invalid_initial_values():
    sgd = jstep.gradient_descent(1.0)
    for options in ({"zero_debias": True}, {"start_step": 3}):
        with pytest.raises(ValueError, match="initial: must be None for averages with"):
            jstep.with_moving_average(sgd, jstep.ExponentialMovingAverage(0.9, **options), initial=lambda p: p)
    for initial, message in (
        ({**PARAMS, "w": jnp.ones(3)}, r"initial: must have shape \(2,\) at 'w', got shape \(3,\)"),
        (lambda p: {**p, "w": None}, r"initial: must have shape \(2,\) at 'w', got nothing"),
        ({"w": jnp.ones(2)}, "initial does not have the structure of params; missing: 'half'"),
        (3, "initial does not have the structure of params; got an int"),
    ):
        optimizer = jstep.with_moving_average(sgd, jstep.ExponentialMovingAverage(0.9), initial=initial)
        with pytest.raises(ValueError, match=message):
            jstep.TrainState.create(PARAMS, optimizer)
