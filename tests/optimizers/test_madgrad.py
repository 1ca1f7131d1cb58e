"""MADGRAD: its initial parameters, low precision and missing gradients."""

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
