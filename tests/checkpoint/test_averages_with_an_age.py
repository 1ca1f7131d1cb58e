"""Averages with zero_debias keep an age, which a target without averages does not have."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import jstep

EMA = jstep.ExponentialMovingAverage(0.5, zero_debias=True)


def loss(params: Any) -> Any:
    return jnp.sum((params["w"] - 1.0) ** 2)


@pytest.mark.parametrize("scope", [None, "a/b"])
@pytest.mark.parametrize(
    "inner", [jstep.gradient_descent(0.1), jstep.update_every(2, jstep.adam(0.1))], ids=["sgd", "own age"]
)
def test_restore_averages_into_a_plain_state(tmp_path: Any, inner: jstep.Optimizer, scope: str | None) -> None:
    averaged = jstep.with_moving_average(inner, EMA)
    optimizer = jstep.scope(scope, averaged) if scope else averaged
    state = jstep.TrainState.create({"w": jnp.zeros(3)}, optimizer)
    step = jstep.minimize(loss, optimizer)
    for _ in range(3):
        state, _ = step(state)
    slot = f"{scope}/{EMA.name}" if scope else EMA.name
    with jstep.Saver(tmp_path) as saver:
        saver.save(state)
    plain = jstep.TrainState.create({"w": jnp.zeros(3)}, jstep.scope(scope, inner) if scope else inner)
    restored = jstep.Saver(tmp_path).restore(plain, use_averages=slot)
    np.testing.assert_array_equal(restored.params["w"], state.slots[slot]["w"])
