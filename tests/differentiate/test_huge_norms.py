"""Norms whose squares overflow, and norms that are not finite."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jstep
from jstep.differentiate.microbatches import squared_norm

CLIPS = {
    "norm": lambda t, c: jstep.clip_by_norm(t, c),
    "rows": lambda t, c: jstep.clip_by_norm(t, c, axes=0),
    "average": lambda t, c: jstep.clip_by_average_norm(t, c),
    "global": lambda t, c: jstep.clip_by_global_norm(t, c)[0],
}


@pytest.mark.thorough(except_for="each value once")
@pytest.mark.parametrize("name", CLIPS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("size", [1e19, 1e30, 2e38])
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_huge_finite_gradients_are_clipped_and_not_zeroed(name: str, dtype: str, size: float, wrap: Any) -> None:
    x = jnp.array([size, -size / 4], jnp.float32).astype(dtype)
    clipped = np.asarray(wrap(CLIPS[name])(x, 2.0), np.float64)
    exact = np.asarray(x, np.float64)
    norm = np.linalg.norm(exact) / (2 if name == "average" else 1)
    np.testing.assert_allclose(clipped, exact * 2.0 / norm, rtol=1e-2 if dtype == "bfloat16" else 1e-5)


@pytest.mark.thorough
def test_the_global_norm_uses_the_whole_range_of_float32() -> None:
    tree = {"a": jnp.full((4,), 1e38), "b": jnp.array([1e20])}
    np.testing.assert_allclose(jstep.global_norm(tree), 2e38, rtol=1e-5)
    np.testing.assert_allclose(jstep.global_norm(jnp.full((3,), 1.0) * 1e-3), np.sqrt(3) * 1e-3, rtol=1e-6)
    assert float(jstep.global_norm({"a": jnp.array([3.0]), "b": jnp.array([3e38, 3e38])})) == np.inf
    np.testing.assert_allclose(
        jax.vmap(jstep.global_norm)(jnp.array([[3.0, 4.0], [3e30, 4e30]])), [5.0, 5e30], rtol=1e-6
    )
    rows = jstep.IndexedSlices(jnp.full((2, 1), 1e30), jnp.array([1, 1]), (4, 1))
    np.testing.assert_allclose(jstep.global_norm({"t": rows}), 2e30, rtol=1e-6)


@pytest.mark.thorough(except_for=["nan-global", "inf-rows", "-inf-global"])
@pytest.mark.parametrize("name", CLIPS)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_nonfinite_norms_turn_clipped_leaves_into_nan(name: str, bad: float) -> None:
    assert np.all(np.isnan(CLIPS[name](jnp.array([1.0, bad]), 1.0)))
    tree = CLIPS[name]({"a": jnp.array([1.0, bad]), "b": jnp.array([0.5])}, 1.0)
    assert np.isnan(tree["b"][0]) == (name == "global")


def test_clipping_with_debug_nans() -> None:
    with jax.debug_nans(True):
        for clip in CLIPS.values():
            clip({"a": jnp.array([3.0, 4.0])}, 1.0)
            clip({"a": jnp.array([3e30, 4.0])}, 1.0)


CLIPPED = jstep.chain(jstep.clip_gradients(by_global_norm=1.0), jstep.adam(0.1))


@pytest.mark.parametrize("optimizer", [jstep.skip_nonfinite(jstep.adam(0.1)), CLIPPED], ids=["skip", "clip"])
def test_norms_do_not_copy_leaves(optimizer: jstep.Optimizer) -> None:
    """This includes the second computation of a norm that overflowed, which leaves of one shape could share."""
    params = {name: jax.ShapeDtypeStruct((1 << 18,), jnp.float32) for name in "abcd"}
    state = jax.eval_shape(lambda params: jstep.TrainState.create(params, optimizer), params)
    step = jax.jit(lambda state, grads: jstep.apply_gradients(state, grads, optimizer), donate_argnums=0)
    # XLA of jaxlib 0.10.0 and 0.10.1 materializes the scaled gradients of the second computation: one copy and 33 kB.
    bound = 1 << 14 if jax.version.__version_info__ >= (0, 10, 2) else (4 << 20) + (1 << 16)
    assert step.lower(state, params).compile().memory_analysis().temp_size_in_bytes < bound


def test_the_factor_of_a_loss_is_divided_out_before_squaring() -> None:
    """As for the gradient noise scale: float32 does not hold the square of a scaled gradient."""
    gradients, scale = [jnp.array([3e18, 4e18], jnp.float32), None], jnp.float32(1e18)
    assert np.isclose(squared_norm([gradients[0] * 10, None], scale), 2500.0, rtol=1e-5)
    assert np.isclose(squared_norm([gradients[0] / 1e18, None]), 25.0, rtol=1e-5)
