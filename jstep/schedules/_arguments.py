"""Validation of the arguments of schedules: numbers, exact numbers of steps, and steps themselves."""

import inspect
from collections.abc import Callable
from fractions import Fraction
from typing import Any, Unpack

import jax
import jax.numpy as jnp
import numpy as np

from jstep.core import trees
from jstep.core.checks import Bounds, as_bool, as_number, kind, shown
from jstep.core.placement import as_scalar
from jstep.core.trees import Array


def steps(step: Any) -> Array:
    """Convert a step (or an array of steps) to an integer array; traced negative steps become 0.

    Raises:
        TypeError: The step is not an integer.
        ValueError: A concrete step is negative, or does not fit the dtype of steps.
    """
    dtype = trees.default_int()
    kind = step.dtype if hasattr(step, "dtype") else np.asarray(step).dtype
    if not jnp.issubdtype(kind, jnp.integer):
        raise TypeError(f"step={step!r}: must be an integer or an array of integers, got dtype {kind}")
    value = trees.concrete(step)
    if value is not None and value.size:
        if value.min() < 0:
            raise ValueError(f"step={value.min()}: must be ≥ 0, it counts the updates applied")
        if value.max() > np.iinfo(dtype).max:
            raise ValueError(f"step={value.max()}: does not fit {np.dtype(dtype).name}; enable jax_enable_x64")
    if value is not None:
        step = value  # independent of the mesh of the step and of the current mesh
    # Clamp before the cast: an unsigned or wider type would otherwise wrap around.
    array = jnp.asarray(step)
    if array.dtype != dtype and np.iinfo(array.dtype).max > np.iinfo(dtype).max:
        array = jnp.minimum(array, np.iinfo(dtype).max)
    return jnp.maximum(array.astype(dtype), 0)


NO_STEP = "a schedule of jstep is made without the step, and called with it later: leave out TF's global_step"


def flag(name: str, value: Any) -> bool:
    """Validate a bool; numbers are rejected, because in TF's argument order a number is in this position.

    Raises:
        TypeError: The value is not a bool.
    """
    try:
        return as_bool(value, name)
    except TypeError as error:
        raise TypeError(f"{error}; {NO_STEP}") from None


def period(name: str, value: Any, *, zero: bool = False) -> Fraction:
    """Convert a positive, finite number of steps to a fraction.

    Args:
        name: The argument's name, for the error.
        value: The number.
        zero: Whether 0 is valid.

    Raises:
        TypeError: The value is not a number, or is traced.
        ValueError: The value is not positive and finite.
    """
    if trees.is_traced(value):
        raise TypeError(f"{name} is traced: must be a plain number, so that steps are divided exactly; {NO_STEP}")
    expected = "a number ≥ 0" if zero else "a positive number"
    hint = NO_STEP if isinstance(value, jax.Array) else ""
    number = as_number(value, name, low=0, above=not zero, expected=expected, meaning=hint)
    exact = np.asarray(value).item()
    # The decimal value: 0.1 is exactly 1/10, not the nearest float.
    return Fraction(exact) if isinstance(exact, int) else Fraction(repr(number))


def duration(name: str, value: Any, schedule: Callable[..., Any]) -> Fraction:
    """Convert the length of a decay in steps, at least one; less is a call in another library's order.

    Args:
        name: The argument's name, for the error.
        value: The length.
        schedule: The schedule function it was passed to, for the error.

    Raises:
        TypeError: The value is not a number, is traced, or is a fraction of a step; shows the order of the arguments.
        ValueError: The value is not positive and finite.
    """
    found = period(name, value)
    return found if found >= 1 else count(name, value, schedule)


def count(name: str, value: Any, schedule: Callable[..., Any], *, zero: bool = False) -> Fraction:
    """Validate a number of steps; a float, as from another library's argument order, is rejected.

    Args:
        name: The argument's name, for the error.
        value: The number.
        schedule: The schedule function it was passed to, for the error.
        zero: Whether 0 is valid, also as a float.

    Raises:
        TypeError: The value is not an integer, or is traced; shows the order of the arguments.
        ValueError: The value is not positive.
    """
    order = f"the arguments are {schedule.__name__}({', '.join(inspect.signature(schedule).parameters)})"
    is_float = isinstance(value, float) or (trees.is_array(value) and jnp.issubdtype(value.dtype, jnp.floating))
    if is_float and not (zero and not trees.is_traced(value) and not np.ndim(value) and value == 0):
        raise TypeError(f"{name}={shown(value)}: must be an integer, a number of steps, got {kind(value)}; {order}")
    try:
        return period(name, value, zero=zero)
    except TypeError as error:
        raise TypeError(f"{error}; {order}") from None


def scalar(name: str, value: Any, **bounds: Unpack[Bounds]) -> Any:
    """Convert a number to a Python float, or a scalar array (concrete or traced) to a float array.

    Args:
        name: The argument's name, for the error.
        value: The number.
        **bounds: The valid range; infinities are valid by default.

    Raises:
        TypeError: The value is not a real number.
        ValueError: The value is not a scalar, is NaN, or is out of range.
    """
    with_infinities: Bounds = {"finite": False, **bounds}
    number = as_scalar(value, name, **with_infinities)
    return number if isinstance(number, float) else jnp.asarray(number).astype(trees.default_float())
