"""Adaptive clipping by its equation at its borders: the least norms of a parameter and of a gradient."""

import jax.numpy as jnp
import numpy as np
import pytest

import jstep


@pytest.mark.parametrize(
    ("ratio", "of_p", "of_g", "expected"),
    [
        (0.01, 1.0, 0.01, 0.01),  # at the limit
        (0.01, 1.0, 0.1, 0.01),
        (0.01, 1e-4, 0.1, 1e-5),  # a parameter counts as 0.001 at least
        (0.01, 0.0, 1e-5, 1e-5),
        (1e-4, 0.0, 5e-7, 5e-8),  # a gradient as 1e-6 at least: 1e-7 / 1e-6 of it
        (1e-4, 0.0, 0.0, 0.0),
    ],
)
def test_the_norm_of_a_clipped_gradient(ratio: float, of_p: float, of_g: float, expected: float) -> None:
    unit = np.array([0.6, 0.0, 0.8, 0.0], np.float32)
    optimizer = jstep.chain(jstep.clip_gradients(adaptive=ratio), jstep.gradient_descent(1.0))
    params = {"w": jnp.asarray(of_p * unit[::-1].copy())}
    state = jstep.TrainState.create(params, optimizer)
    new = jstep.apply_gradients(state, {"w": jnp.asarray(of_g * unit)}, optimizer)
    moved = np.asarray(params["w"]) - np.asarray(new.params["w"])
    np.testing.assert_allclose(moved, expected * unit, rtol=2e-5 if of_p < 1 else 2e-4, atol=1e-12)
