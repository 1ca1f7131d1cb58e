"""MADGRAD: its initial parameters, low precision and missing gradients."""

from typing import Any

import equations
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from golden import assert_close, gradients, initial_params, run_equation

import jstep

HYPER = {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.0, "epsilon": 1e-6}


@pytest.mark.parametrize("copy", [True, False])
def test_initial_params_survive_donation(copy: bool) -> None:
    optimizer = jstep.madgrad(0.05)
    params = jax.tree.map(jnp.float32, initial_params())
    state = jstep.TrainState.create(params, optimizer, copy=copy)
    step = jax.jit(lambda state, grads: jstep.apply_gradients(state, grads, optimizer), donate_argnums=0)
    for n in range(3):
        state = step(state, jax.tree.map(jnp.float32, gradients(n)))
    jax.tree.map(np.testing.assert_array_equal, state.slots["initial"], jax.tree.map(np.float32, initial_params()))
    assert_close([state.params], run_equation(equations.madgrad, HYPER)[2:3])


def test_low_precision_and_zero_or_missing_gradients() -> None:
    optimizer = jstep.madgrad(0.1, momentum=0.5, epsilon=0.0)
    params = {"w": jnp.bfloat16([1.0, 2.0]), "n": jnp.int32(3), "none": None, "x": jnp.ones(2)}
    state = jstep.TrainState.create(params, optimizer)
    assert state.slots["initial"]["w"].dtype == state.slots["s"]["w"].dtype == jnp.float32
    grads: Any = {"w": jnp.bfloat16([0.0, 1.0]), "n": None, "none": None, "x": None}
    new = jstep.apply_gradients(state, grads, optimizer)
    assert new.params["w"].dtype == jnp.bfloat16
    assert float(new.params["w"][0]) == 1.0  # ε = 0 and no gradient yet: no NaN
    assert float(new.params["w"][1]) < 2.0
    np.testing.assert_array_equal(new.params["x"], 1.0)
    np.testing.assert_array_equal(new.slots["s"]["x"], 0.0)
