"""Hyperparameters of Optax transformations are reported at the global step; a chain reports those at any count."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import optax

import jstep

RATE = optax.linear_schedule(0.0, 1.0, 10)
PARAMS = {"a": jnp.zeros(2), "n": jnp.int32(1)}


def rates(optimizer: jstep.Optimizer, data: list[float], start: int = 0) -> list[tuple[float, float]]:
    """The logged and the used rates of the steps that made an update."""
    step = jstep.minimize(lambda params, x: jnp.sum(params["a"] * x), optimizer)
    state = jstep.TrainState.create(PARAMS, optimizer, global_step=start)
    found = []
    for x in data:
        before = np.asarray(state.params["a"])
        state, metrics = step(state, jnp.float32(x))
        if used := float((before - np.asarray(state.params["a"]))[1]):
            found.append((float(metrics["learning_rate"]), used))
    return found


def test_a_schedule_is_reported_at_the_step() -> None:
    given: list[Any] = [{"learning_rate": RATE}, lambda n: {"learning_rate": RATE(n), "momentum": 0.5}]
    for hyperparameters in given:
        found = rates(jstep.from_optax(optax.sgd(RATE), hyperparameters), [1.0] * 4)
        np.testing.assert_allclose(*zip(*found, strict=True), rtol=1e-5)


def test_the_recommended_chain_reports_the_rate_that_is_used() -> None:
    chained = jstep.chain(jstep.from_optax(optax.scale_by_sign()), jstep.scale_by_learning_rate(RATE))
    found = rates(jstep.skip_nonfinite(chained), [1.0, np.nan, np.nan, 1.0, 1.0, 1.0], start=5)
    assert len(found) == 4
    np.testing.assert_allclose(*zip(*found, strict=True), rtol=1e-5)
