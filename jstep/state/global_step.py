"""The one clock: the number of updates that have been applied."""

import operator
from typing import Any

import jax.numpy as jnp
import numpy as np

from jstep.core import trees
from jstep.core.meshes import own_work
from jstep.core.types import Array, Step


@own_work()
def create_global_step(value: Step = 0) -> Array:
    """A global step: the integer scalar that counts the updates applied.

    Args:
        value: Where to start, ≥ 0; an integer or an integer scalar array, traced or not.

    Returns:
        An int32 scalar (int64 under `jax_enable_x64`), a buffer of its own.

    Raises:
        TypeError: `value` is not an integer.
        ValueError: `value` is negative, no scalar, or larger than the dtype holds.

    Example:
        >>> import jstep
        >>> jstep.create_global_step(7)
        Array(7, dtype=int32)
    """
    dtype = trees.default_int()
    if isinstance(value, bool) or not jnp.issubdtype(_dtype_of(value), jnp.integer):
        raise TypeError(f"global_step={value!r}: must be an integer, got {type(value).__name__}")
    if np.ndim(value) != 0:
        raise ValueError(f"global_step: must be a scalar, got shape {np.shape(value)}")
    if not trees.is_traced(value):
        number = operator.index(np.asarray(value).item())
        if number < 0:
            raise ValueError(f"global_step={number}: must be ≥ 0, it counts the updates applied")
        if number > np.iinfo(dtype).max:
            raise ValueError(
                f"global_step={number}: does not fit {np.dtype(dtype).name}; enable jax_enable_x64 for int64 steps"
            )
    return jnp.array(value, dtype=dtype, copy=True)


def _dtype_of(value: Any) -> Any:
    return value.dtype if hasattr(value, "dtype") else np.asarray(value).dtype


def get_global_step(state: Any) -> Array | None:
    """The global step of a state as an array, or None where the state has none.

    Example:
        >>> import jstep
        >>> print(jstep.get_global_step(jstep.TrainState.create({"w": 1.0}, jstep.adam())))
        0
    """
    return getattr(state, "global_step", None)


def get_or_create_global_step(state: Any) -> Array:
    """The global step of a state as an array, or a zero where the state has none.

    Example:
        >>> import jstep
        >>> state = jstep.TrainState({"w": 1.0}, {}, global_step=None)
        >>> print(jstep.get_or_create_global_step(state))
        0
    """
    step = get_global_step(state)
    return create_global_step(0) if step is None else step


def global_step(state: Any) -> int:
    """The global step as a Python int. Waits for the device: keep it out of the training loop.

    Raises:
        ValueError: The state has no global step.

    Example:
        >>> import jstep
        >>> jstep.global_step(jstep.TrainState.create({"w": 1.0}, jstep.gradient_descent(0.1)))
        0
    """
    step = get_global_step(state)
    if step is None:
        raise ValueError(
            "the state has no global step: give it one with state.replace(global_step=create_global_step())"
        )
    return int(step)


@own_work()
def increment_global_step(state: Any, amount: Step = 1) -> Any:
    """A new state whose global step is larger by `amount`.

    Args:
        state: The state; one without a global step starts from zero.
        amount: An integer ≥ 0, traced or not.

    Raises:
        TypeError: `amount` is not an integer.
        ValueError: `amount` is negative.

    Example:
        >>> import jstep
        >>> state = jstep.TrainState.create({"w": 1.0}, jstep.gradient_descent(0.1))
        >>> jstep.global_step(jstep.increment_global_step(state, 5))
        5
    """
    try:
        more = create_global_step(amount)
    except (TypeError, ValueError) as error:
        raise type(error)(str(error).replace("global_step", "amount", 1)) from None
    step = get_or_create_global_step(state)
    before, by = trees.concrete(step), trees.concrete(more)
    if before is not None and by is not None and int(before) + int(by) > np.iinfo(step.dtype).max:
        raise ValueError(f"amount={by}: step {before} + {by} does not fit {step.dtype}; enable jax_enable_x64")
    return state.replace(global_step=step + more.astype(step.dtype))
