"""The age of slots, and bias correction by it."""

from typing import Any

import jax.numpy as jnp
import numpy as np

from jstep.core import trees
from jstep.core.trees import Array, Step


def new_start_step(global_step: Step) -> Array:
    """The scalar slot `start_step` of slots created at a step."""
    return jnp.array(global_step, dtype=trees.default_int(), copy=True)


def age_of(step: Step, start_step: Array) -> Array:
    """The age of slots at the update from `step` to step + 1: 1 at their first update, k at the k-th.

    `start_step` is the step minus the updates that the slots have had. It is constant while each step makes one update.
    """
    # If the step of a state was set back, start_step may be in the future; such slots count as new.
    step = jnp.asarray(step).astype(start_step.dtype)
    return jnp.maximum(step - start_step + 1, 1)


def bias_correction(beta: Any, age: Array) -> Array:
    """1 − beta^age, computed without cancellation for beta near 1."""
    real = trees.default_float()
    if isinstance(beta, float):
        log = jnp.asarray(np.log(beta) if beta > 0 else -np.inf, real)
    else:
        log = jnp.log(beta).astype(real)
    return -jnp.expm1(age.astype(real) * log)
