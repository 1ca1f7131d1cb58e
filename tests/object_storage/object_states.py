"""States to save, and their comparison."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

import jstep


@functools.cache
def state_at(step, value=None):
    fill = float(step if value is None else value)
    params = {
        "w": np.full((4, 3), fill, np.float32),
        "b": np.arange(3, dtype=np.float32) + np.float32(fill),
    }
    state = jstep.TrainState.create(params, jstep.momentum(0.1, 0.9))
    return state.replace(global_step=jnp.int32(step))


def same(a, b):
    return jax.tree.structure(a) == jax.tree.structure(b) and all(
        bool(jnp.array_equal(x, y))
        for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    )
