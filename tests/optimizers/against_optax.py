"""Run the same gradients with Optax and with jstep."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jstep

_RNG = np.random.default_rng(0)


def _tree(scale=1.0):
    shapes = {"w": (3, 4), "c": (2, 3, 4), "b": (4,), "k": (2, 2, 3, 2), "r": (1, 4)}
    return {
        name: jnp.asarray(scale * _RNG.normal(size=shape), jnp.float32)
        for name, shape in shapes.items()
    }


PARAMS = _tree()
GRADS = [_tree(scale) for scale in (1.0, 0.1, 3.0, 1.0, 0.5)]


def run_jstep(optimizer, grads=GRADS, params=PARAMS):
    state = jstep.TrainState.create(params, optimizer)
    step = jax.jit(lambda s, g: jstep.apply_gradients(s, g, optimizer), donate_argnums=0)
    for g in grads:
        state = step(state, g)
    return state


def run_optax(transformation, grads=GRADS, params=PARAMS):
    """Return the parameters after each step."""
    found = []
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        opt_state, update = transformation.init(params), jax.jit(transformation.update)
        for g in grads:
            updates, opt_state = update(g, opt_state, params)
            params = optax.apply_updates(params, updates)
            found.append(params)
    return found


def assert_close(a, b, rtol=1e-5):
    for one, other in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(one, other, rtol=rtol, atol=1e-6)
