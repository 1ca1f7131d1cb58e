"""Hyperball and NorMuon recipes as chains, compared over 30 steps with their float64 equations (equations.py)."""

import equations
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from golden import assert_close, gradients, initial_params, run_equation

import jstep

STEPS = 30
MATRICES = {"a": (3, 4), "b": (6, 4), "c": (4, 4)}
RATE = np.linspace(0.05, 0.005, STEPS)


def schedule(values):
    return lambda step: jnp.asarray(values)[step]


def nesterov():
    return jstep.trace(0.95, use_nesterov=True)


def normuonh(over):
    return jstep.chain(
        nesterov(),
        jstep.orthogonalize(scale=None),
        jstep.normalize_neurons(over=over),
        jstep.on_hyperball(schedule(RATE)),
    )


SHARED = {"lr": RATE, "momentum": 0.95, "beta1": 0.9, "beta2": 0.95, "epsilon": 1e-8}
CASES = {
    "AdamH": (
        lambda: jstep.chain(jstep.scale_by_adam(0.9, 0.95), jstep.on_hyperball(schedule(RATE))),
        equations.adamh,
        {},
    ),
    "NorMuonH-short": (lambda: normuonh("short"), equations.normuonh, {"over": "short"}),
}


@pytest.mark.thorough(except_for=["AdamH"])
@pytest.mark.parametrize("name", CASES)
def test_chains_match_their_equations(name):
    """In float64, where the rounding errors that the iteration amplifies do not matter."""
    make, rule, more = CASES[name]
    expected = run_equation(rule, SHARED | more, MATRICES, STEPS)
    with jax.enable_x64(True):
        optimizer = make()
        state = jstep.TrainState.create(jax.tree.map(jnp.float64, initial_params(MATRICES)), optimizer)
        step = jax.jit(lambda state, grads: jstep.apply_gradients(state, grads, optimizer))
        found = []
        for n in range(STEPS):
            state = step(state, jax.tree.map(jnp.float64, gradients(n, MATRICES)))
            found.append(jax.tree.map(np.asarray, state.params))
    assert_close(found, expected, rtol=1e-6, atol=1e-9)
