"""Hyperparameters: numbers, arrays or schedules, checked when given and evaluated at a step."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from jstep.core import trees
from jstep.core.types import Array, ScalarOrSchedule, Step


def checked(
    name: str,
    value: ScalarOrSchedule,
    *,
    low: float = -math.inf,
    high: float = math.inf,
    above: bool = False,
    below: bool = False,
) -> Any:
    """A hyperparameter as given, refused where it cannot be right.

    Args:
        name: The argument's name, for the error.
        value: A number, a scalar array (a tracer too), or a schedule.
        low: The smallest value.
        high: The largest value.
        above: Whether `low` itself is refused.
        below: Whether `high` itself is refused.

    Raises:
        TypeError: The value is no real number and no schedule.
        ValueError: The value is no scalar, not finite, or out of range.
    """
    if callable(value):
        return value
    if isinstance(value, bool) or not (isinstance(value, int | float) or trees.is_array(value)):
        raise TypeError(f"{name}={value!r}: must be a number, an array or a schedule, got {type(value).__name__}")
    if np.ndim(value):
        raise ValueError(
            f"{name}: must be a scalar, got shape {np.shape(value)}; map over several values with jax.vmap"
        )
    if not (
        jnp.issubdtype(jnp.result_type(value), jnp.floating) or jnp.issubdtype(jnp.result_type(value), jnp.integer)
    ):
        raise TypeError(f"{name}: must be a real number, got dtype {jnp.result_type(value)}")
    number = trees.concrete(value)
    if number is not None:
        # A float32 array may lie a rounding below a bound such as 0; nothing here needs more than ≤ and <.
        fits = (number > low if above else number >= low) and (number < high if below else number <= high)
        if not (fits and np.isfinite(number)):
            signs = [f"{'>' if above else '≥'} {low:g}"] * (low > -math.inf)
            signs += [f"{'<' if below else '≤'} {high:g}"] * (high < math.inf)
            raise ValueError(f"{name}={number}: must be finite" + "".join(f" and {sign}" for sign in signs))
    return float(value) if isinstance(value, int | float | np.generic | np.ndarray) else value


def value_at(name: str, value: Any, step: Step) -> Any:
    """The value of a hyperparameter at a step: a Python float where it is constant, else a float scalar array.

    Raises:
        ValueError: A schedule returned something that is not a scalar.
    """
    if isinstance(value, float):
        return value
    number = value(step) if callable(value) else value
    if isinstance(number, bool | str) or not (isinstance(number, int | float) or trees.is_array(number)):
        raise TypeError(f"{name}: the schedule returned {number!r}; it must return a number")
    if np.ndim(number):
        raise ValueError(f"{name}: the schedule returned shape {np.shape(number)} at one step; it must be a scalar")
    return jnp.asarray(number).astype(trees.default_float())


def values_at(given: Mapping[str, Any], step: Step) -> dict[str, Any]:
    """The values of all hyperparameters at a step, by name."""
    return {name: value_at(name, value, step) for name, value in given.items()}


def report(given: Mapping[str, Any]) -> Callable[[Step], dict[str, Array]]:
    """The `hyperparameters` function of an optimizer with these hyperparameters.

    Under a trace constants come as NumPy scalars: what a compiled step need not compute, it need not
    return either (an output costs some 2 µs a call on a CPU), and `training` puts it back in outside.
    """

    def hyperparameters(step: Step, /) -> dict[str, Any]:
        make: Any = np.asarray if trees.is_traced(step) else jnp.asarray
        values = values_at(given, step)
        return {
            name: make(value, trees.default_float()) if isinstance(value, float) else value
            for name, value in values.items()
        }

    return hyperparameters
