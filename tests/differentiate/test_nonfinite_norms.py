"""Norms that are not finite."""

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


CLIPPED = jstep.chain(jstep.clip_gradients(by_global_norm=1.0), jstep.adam(0.1))


@pytest.mark.parametrize("optimizer", [jstep.skip_nonfinite(jstep.adam(0.1)), CLIPPED], ids=["skip", "clip"])
def test_norms_do_not_copy_leaves(optimizer: jstep.Optimizer) -> None:
    params = {name: jax.ShapeDtypeStruct((1 << 18,), jnp.float32) for name in "abcd"}
    state = jax.eval_shape(lambda params: jstep.TrainState.create(params, optimizer), params)
    step = jax.jit(lambda state, grads: jstep.apply_gradients(state, grads, optimizer), donate_argnums=0)
    assert step.lower(state, params).compile().memory_analysis().temp_size_in_bytes < 1 << 14


def test_the_factor_of_a_loss_is_divided_out_before_squaring() -> None:
    """As for the gradient noise scale: float32 does not hold the square of a scaled gradient."""
    gradients, scale = [jnp.array([3e18, 4e18], jnp.float32), None], jnp.float32(1e18)
    assert np.isclose(squared_norm([gradients[0] * 10, None], scale), 2500.0, rtol=1e-5)
    assert np.isclose(squared_norm([gradients[0] / 1e18, None]), 25.0, rtol=1e-5)
