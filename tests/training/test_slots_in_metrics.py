"""State values in the metrics: loss scales, skipped steps, and held hyperparameters."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jstep

X = jnp.arange(1.0, 5.0)


def loss_fn(params: Any, x: jax.Array) -> jax.Array:
    return jnp.mean(params["w"] * x)


def fresh(optimizer: jstep.Optimizer) -> jstep.TrainState:
    return jstep.TrainState.create({"w": jnp.float32(2.0)}, optimizer)


@pytest.mark.thorough(except_for=["2"])
@pytest.mark.parametrize("n", [1, 2])
def test_loss_is_scaled_but_reported_unscaled(n: int) -> None:
    plain = jstep.gradient_descent(0.5)
    optimizer = jstep.dynamic_loss_scale(plain, initial=8.0, period=2)
    kwargs: Any = {"metrics": ("grad_norm", "update_norm"), "num_microbatches": n}
    want, want_metrics = jstep.minimize(loss_fn, plain, **kwargs)(fresh(plain), X)
    step = jstep.minimize(loss_fn, optimizer, **kwargs)
    state, metrics = step(fresh(optimizer), X)
    np.testing.assert_allclose(state.params["w"], want.params["w"])
    for name in want_metrics:
        np.testing.assert_allclose(metrics[name], want_metrics[name], rtol=1e-6)
    assert float(metrics["loss_scale"]) == 8.0
    state, metrics = step(state, X)
    assert (float(metrics["loss_scale"]), float(state.slots["loss_scale"])) == (8.0, 16.0)
    state, metrics = step(state, X.at[0].set(jnp.inf))
    assert (float(metrics["loss_scale"]), float(state.slots["loss_scale"])) == (16.0, 8.0)
    assert jstep.global_step(state) == 3


def test_skips_and_held_hyperparameters_are_metrics() -> None:
    optimizer = jstep.skip_nonfinite(jstep.gradient_descent(jstep.held("learning_rate", 0.5)))
    step = jstep.minimize(loss_fn, optimizer)
    state, metrics = step(fresh(optimizer), X)
    assert float(metrics["skipped"]) == 0
    assert float(metrics["learning_rate"]) == 0.5
    state = jstep.set_hyperparameter(state, "learning_rate", 0.25)
    state, metrics = step(state, X * jnp.nan)
    assert float(metrics["skipped"]) == 1
    assert float(metrics["learning_rate"]) == 0.25
    _, metrics = jstep.scan_steps(step)(state, jnp.stack([X, X * jnp.nan]))
    np.testing.assert_array_equal(metrics["skipped"], [0, 1])


@pytest.mark.parametrize(("gradient", "skipped"), [(1.0, 1.0), (1e30, 0.0)])
def test_an_update_is_not_skipped_if_a_slot_outside_of_the_guard_overflowed(gradient: float, skipped: float) -> None:
    """The update of "b" is finite, but not the sum of its squared gradients: a later update can't be right."""
    optimizer = jstep.partition(
        {"a": jstep.skip_nonfinite(jstep.gradient_descent(0.5)), "b": jstep.adagrad(0.5)}, lambda path, leaf: path
    )
    state = jstep.TrainState.create({"a": 1.0, "b": 1.0}, optimizer)
    step = jstep.minimize(lambda params, x: params["a"] * x[0] + params["b"] * x[1], optimizer)
    state, metrics = step(state, jnp.array([jnp.nan, gradient]))
    assert np.all(np.isfinite(jax.tree.leaves(state.params)))
    assert float(metrics["skipped"]) == skipped
