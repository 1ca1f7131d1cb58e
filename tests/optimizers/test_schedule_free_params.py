"""`schedule_free_params` finds its slots in nested optimizers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jstep

PARAMS = {"kernel": jnp.ones((4, 3)), "bias": jnp.zeros(3), "count": jnp.int32(3), "none": None}
GRADS = {"kernel": jnp.full((4, 3), 0.3), "bias": jnp.ones(3), "count": None, "none": None}


def free() -> jstep.Optimizer:
    return jstep.schedule_free_adamw(jstep.linear_warmup(0.1, 3))


def run(optimizer: jstep.Optimizer, dtype=jnp.float32) -> jstep.TrainState:
    def cast(tree):
        return jax.tree.map(lambda x: x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x, tree)

    state = jstep.TrainState.create(cast(PARAMS), optimizer)
    step = jax.jit(lambda state, grads: jstep.apply_gradients(state, grads, optimizer))
    for _ in range(5):
        state = step(state, cast(GRADS))
    return state


@pytest.mark.thorough(except_for=["bfloat16-scalar"])
@pytest.mark.parametrize("kind", ["tree", "scalar", "other"])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_other_slots_named_master_are_ignored(dtype, kind: str) -> None:
    def init(params, global_step=0):
        values = {"tree": jax.tree.map(lambda p: jnp.full(p.shape, 7.0), params), "scalar": jnp.float32(7.0)}
        return {"master": values.get(kind, {"odd": jnp.zeros(2)})}

    other = jstep.Optimizer(init, lambda updates, slots, params, step: (updates, dict(slots)), lambda step: {})
    free_below = jstep.scope("net", free())
    found = jstep.schedule_free_params(run(jstep.chain(other, free_below), dtype))
    want = jstep.schedule_free_params(run(free_below, dtype))
    for key in ("kernel", "bias"):
        np.testing.assert_array_equal(found[key], want[key])
    inside = jstep.schedule_free_params(
        run(jstep.master_weights(jstep.scope("a", jstep.chain(other, free_below))), dtype)
    )
    exact = jstep.schedule_free_params(run(free()))
    np.testing.assert_allclose(inside["kernel"], exact["kernel"].astype(dtype), rtol=0.01)
