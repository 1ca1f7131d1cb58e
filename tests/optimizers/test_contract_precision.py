"""Every optimizer in float64, float16 and bfloat16."""

import jax.numpy as jnp
import numpy as np
import pytest
from contract import avals, compiled_step, for_each, make_optimizer
from optimizer_table import TABLE

import jstep


@pytest.mark.usefixtures("x64")
@for_each(TABLE, ["adam"])
def test_x64_keeps_float64_and_float32_apart(name):
    optimizer = make_optimizer(name)
    params = {"a": np.array([1.0, 2.0]), "b": np.array([3.0], np.float32)}
    before = jstep.TrainState.create(params, optimizer)
    grads = {"a": np.array([0.1, 0.2]), "b": np.array([0.3], np.float32)}
    after = compiled_step(name)(before, grads)
    assert after.global_step.dtype == jnp.int64
    assert avals(before) == avals(after)
    assert after.params["a"].dtype == jnp.float64
    assert after.params["b"].dtype == jnp.float32
    for slot in jstep.get_slot_names(after):
        for path, dtype in (("a", jnp.float64), ("b", jnp.float32)):
            leaf = jstep.get_slot(after, slot, path)
            assert leaf is None or leaf.dtype == dtype


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
@for_each(TABLE, ["adam", "stochastic_rounding"])
def test_low_precision_params_are_updated_in_float32(name, dtype):
    """One update of a low-precision leaf is the float32 update, rounded once."""
    optimizer = make_optimizer(name)
    low, grad = jnp.array([1.0, -2.0, 0.375], dtype), jnp.array([0.5, 0.03125, -4.0], dtype)
    step = compiled_step(name)
    state = step(jstep.TrainState.create({"a": low}, optimizer), {"a": grad})
    wide = step(jstep.TrainState.create({"a": low.astype(jnp.float32)}, optimizer), {"a": grad.astype(jnp.float32)})
    assert state.params["a"].dtype == dtype
    np.testing.assert_allclose(
        state.params["a"].astype(jnp.float32), wide.params["a"], rtol=float(jnp.finfo(dtype).eps)
    )
    for slot in jstep.get_slot_names(state):
        leaf = jstep.get_slot(state, slot, "a")
        if leaf is not None:
            assert leaf.dtype == jnp.float32
            # Averages follow the rounded parameter; all other slots depend only on the gradient.
            follows = slot in TABLE[name].averages
            tolerance = float(jnp.finfo(dtype).eps) if follows else 1e-5
            np.testing.assert_allclose(leaf, wide.slots[slot]["a"], rtol=tolerance)
