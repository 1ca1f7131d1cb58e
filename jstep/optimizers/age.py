"""How old slots are and what follows from it; and what a step must compute before it overwrites them."""

from typing import Any

import jax
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


def ordered_after(x: Array, first: Array) -> Array:
    """X itself, from a kernel that XLA has to run after the one that makes `first`.

    Where two kernels read a slot that one of them overwrites, XLA copies the slot unless the other is known to
    run earlier; only data says so. The condition is never true, which LLVM sees and XLA does not: nothing more
    is read from memory.
    """
    return jnp.where((first > 0) & (first < 0), first.astype(x.dtype), x)


def after_parameter(p: Array, u: Array, dtype: Any, *reads: Array) -> tuple[Array, ...]:
    """The new parameter, and what may be read once it is there: for slots that it needs as they were.

    The sum is the one that `apply_updates` makes, which XLA sees and makes once.

    Args:
        p: The parameter, as the rule has it.
        u: Its update.
        dtype: The dtype that the parameter is kept in.
        *reads: Arrays that are read again after it.
    """
    new: tuple[Array, ...] = jax.lax.optimization_barrier(((p + u).astype(dtype), *reads))
    return new
