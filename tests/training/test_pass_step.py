"""`pass_step`: the loss gets the global step before the update."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jstep

WEIGHT = jstep.linear(0.0, 1.0, 4)
X = jnp.array([1.0, 2.0, 3.0, 6.0])


def annealed(params, x, step):
    return params["w"] * jnp.mean(x) * WEIGHT(step)


def rates(loss_fn, steps=6, **kwargs):
    """The gradients of the steps, by the way that the parameter goes."""
    optimizer = jstep.gradient_descent(1.0)
    train_step = jstep.minimize(loss_fn, optimizer, pass_step=True, **kwargs)
    state, found = jstep.TrainState.create({"w": 0.0, "v": 0.0}, optimizer), []
    for _ in range(steps):
        before = float(state.params["w"])
        state, _ = train_step(state, X)
        found.append(before - float(state.params["w"]))
    return found


EXPECTED = [3.0 * min(n / 4, 1.0) for n in range(6)]


@pytest.mark.parametrize(
    "kwargs",
    [{}, {"num_microbatches": 2}, {"jit": False}, {"lanes": 2}, {"sharpness": 0.0}],
    ids=lambda kwargs: "-".join(kwargs) or "plain",
)
def test_the_loss_gets_the_step(kwargs):
    np.testing.assert_allclose(rates(annealed, **kwargs), EXPECTED, rtol=1e-6)


def test_beside_a_key_and_averages_and_with_several_losses():
    def loss_fn(params, x, *, rng, averages, step):
        return annealed(params, x, step) + 0 * averages["w"] + 0 * jax.random.normal(rng)

    optimizer = jstep.with_moving_average(
        jstep.gradient_descent(1.0), jstep.ExponentialMovingAverage(0.5)
    )
    losses = {
        "w": (loss_fn, "w"),
        "v": (lambda params, x, rng, averages, step: params["v"] * jnp.float32(step), "v"),
    }
    options = {"rng": jax.random.key(0), "use_averages": True, "pass_step": True}
    train_step = jstep.minimize(losses, optimizer, **options)
    state = jstep.TrainState.create({"w": 0.0, "v": 0.0}, optimizer)
    for _ in range(6):
        state, _ = train_step(state, X)
    np.testing.assert_allclose(state.params["w"], -sum(EXPECTED), rtol=1e-6)
    np.testing.assert_allclose(state.params["v"], -15.0, rtol=1e-6)


def test_it_survives_a_restart_and_calls_of_several_steps(tmp_path):
    optimizer = jstep.gradient_descent(1.0)
    train_step = jstep.minimize(annealed, optimizer, pass_step=True)
    fresh = jstep.TrainState.create({"w": 0.0}, optimizer)
    for last in (3, 6):
        state = jstep.train(
            train_step, fresh, lambda n: X, last, checkpoint_dir=tmp_path, steps_per_call=3
        )
    np.testing.assert_allclose(state.params["w"], -sum(EXPECTED), rtol=1e-6)
