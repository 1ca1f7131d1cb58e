"""A small training run for tests of hooks, whose loss at step N is N."""

import jax.numpy as jnp
import numpy as np

import jstep

OPTIMIZER = jstep.gradient_descent(0.5)


def loss_fn(params, x):
    return x[0] + jnp.sum(params["w"]) * 0.0, {
        "batch": x[0].astype(jnp.int32),
        "vector": x,
        "half": x[0] > 2,
    }


STEP = jstep.minimize(loss_fn, OPTIMIZER, has_aux=True)


def batches(step):
    return np.full(3, step + 1, np.float32)


def train(
    last_step,
    hooks,
    start=0,
    *,
    batches=batches,
    step=STEP,
    optimizer=OPTIMIZER,
    w=(1.0, 1.0),
    **options,
):
    state = jstep.TrainState.create({"w": jnp.float32(w)}, optimizer, global_step=start)
    return jstep.train(
        step, state, batches, last_step, hooks=hooks, **{"progress": False} | options
    )
