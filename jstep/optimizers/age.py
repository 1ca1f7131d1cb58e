"""How old slots are, and what follows from it."""

from typing import Any

import jax.numpy as jnp
import numpy as np

from jstep.core import trees
from jstep.core.types import Array, Step


def new_start_step(global_step: Step) -> Array:
    """The scalar slot `start_step` of slots created at a step."""
    return jnp.array(global_step, dtype=trees.default_int(), copy=True)


def age_of(step: Step, start_step: Array) -> Array:
    """The age of slots at the update `step` → step + 1: 1 at their first update."""
    # A state whose step was set back has slots from the future; they count as new.
    step = jnp.asarray(step).astype(start_step.dtype)
    return jnp.maximum(step - start_step + 1, 1)


def bias_correction(beta: Any, age: Array) -> Array:
    """1 − beta^age, without the cancellation that the formula has for beta near 1."""
    real = trees.default_float()
    if isinstance(beta, float):
        log = jnp.asarray(np.log(beta) if beta > 0 else -np.inf, real)
    else:
        log = jnp.log(beta).astype(real)
    return -jnp.expm1(age.astype(real) * log)
