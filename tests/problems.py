"""Small problems that tests of several rooms train on: a linear one with noise, and one whose state
holds keys."""

import jax
import jax.numpy as jnp
import numpy as np

import jstep

# A linear loss with noise by key, Adam with a schedule and averages, and batches as a function of
# the step.

OPTIMIZER = jstep.with_moving_average(
    jstep.adam(jstep.exponential_decay(0.1, 10, 0.9)), jstep.ExponentialMovingAverage(0.9)
)
DATA = jstep.batches({"x": np.arange(40.0, dtype=np.float32).reshape(20, 2)}, batch_size=4, seed=3)


def loss_fn(params, batch, rng):
    noise = jax.random.normal(rng, params["w"].shape)
    return jnp.mean((batch["x"] @ params["w"] - 1.0) ** 2) + jnp.sum(noise * params["w"])


STEP = jstep.minimize(loss_fn, OPTIMIZER, rng=jax.random.key(7))


def make_state(step=0):
    return jstep.TrainState.create({"w": jnp.ones(2)}, OPTIMIZER, global_step=step)


# A loss that draws with keys of the model state, and returns their successors.

ROWS = np.linspace(-1.0, 1.0, 32, dtype=np.float32).reshape(8, 4)
