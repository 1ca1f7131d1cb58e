"""Training steps with an injected fault: one bit flips in one execution of one step."""

import collections

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback

import jstep

OPTIMIZER = jstep.momentum(0.1, 0.9)
DATA = jstep.batches(np.linspace(-1.0, 1.0, 48, dtype=np.float32).reshape(16, 3), batch_size=4, seed=2)


def loss_fn(params, x):
    return jnp.mean((x * params["w"][None] + params["b"]) ** 2)


def make_state(**kwargs):
    return jstep.TrainState.create({"w": jnp.ones(3), "b": jnp.float32(0.5)}, OPTIMIZER, **kwargs)


class Faulty:
    """Flips the lowest bit of `params/w[1]` in one execution (0: none) of a step, and counts all of them."""

    def __init__(self, step=-1, execution=2, loss=loss_fn, donate=True, **kwargs):
        self.executions = collections.Counter()
        pure = jstep.minimize(loss, OPTIMIZER, jit=False, **kwargs)

        def bits(n):
            self.executions[int(n)] += 1
            return np.uint32((int(n), self.executions[int(n)]) == (step, execution))

        def faulty(state, *args):
            new, metrics = pure(state, *args)
            flip = io_callback(bits, jax.ShapeDtypeStruct((), jnp.uint32), state.global_step)
            words = jax.lax.bitcast_convert_type(new.params["w"], jnp.uint32)
            words = words ^ jnp.where(jnp.arange(3) == 1, flip, jnp.uint32(0))
            w = jax.lax.bitcast_convert_type(words, jnp.float32)
            return new.replace(params={**new.params, "w": w}), metrics

        self.train_step = jstep.TrainStep(faulty, donate=donate)


def train(train_step, last_step, *hooks, state=None, **kwargs):
    state = make_state() if state is None else state
    return jstep.train(train_step, state, DATA, last_step, hooks=hooks, progress=False, **kwargs)
