"""A point that follows its batches by momentum: the problem of runs whose batches or hooks have states of their own."""

import jax.numpy as jnp

import jstep

OPTIMIZER = jstep.momentum(0.1, 0.9)
STEP = jstep.minimize(lambda params, x: jnp.sum((params["w"] - x) ** 2), OPTIMIZER)


def make_state():
    return jstep.TrainState.create({"w": jnp.zeros(2)}, OPTIMIZER)


class Remembering:
    """A source of batches, or a hook, whose position is all that it knows."""

    def state_dict(self):
        return vars(self)

    def load_state_dict(self, position):
        vars(self).update(position)
