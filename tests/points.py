"""Points that follow their batches: problems for runs whose batches, hooks or files matter.

Their steps are shared by many modules, as it takes a tenth of a second to trace and to compile one.
"""

import functools

import jax.numpy as jnp

import jstep

OPTIMIZER = jstep.momentum(0.1, 0.9)
STEP = jstep.minimize(lambda params, x: jnp.sum((params["w"] - x) ** 2), OPTIMIZER)


def make_state():
    return jstep.TrainState.create({"w": jnp.zeros(2)}, OPTIMIZER)


@functools.cache
def number(rate=0.1):
    """Return an optimizer, and the step of a number `w` that follows numbers."""
    optimizer = jstep.gradient_descent(rate)
    return optimizer, jstep.minimize(lambda params, x: (params["w"] - x) ** 2, optimizer)


@functools.cache
def mean(rate):
    """Return an optimizer, and the step of an array `w` that follows arrays."""
    optimizer = jstep.gradient_descent(rate)
    return optimizer, jstep.minimize(lambda params, x: jnp.mean((params["w"] - x) ** 2), optimizer)


@functools.cache
def norm():
    """Return an optimizer, and the step that decays an array `w` without batches."""
    optimizer = jstep.sgd(0.1)
    return optimizer, jstep.minimize(lambda params: jnp.sum(params["w"] ** 2), optimizer)


class Remembering:
    """A source of batches, or a hook, whose position is all that it knows."""

    def state_dict(self):
        return vars(self)

    def load_state_dict(self, position):
        vars(self).update(position)
