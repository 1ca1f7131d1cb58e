"""Checking hyperparameters (numbers, arrays, schedules or `held`) and evaluating them at a step."""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import jax.numpy as jnp
import numpy as np

from jstep.core import trees
from jstep.core.checks import Bounds, kind, shown
from jstep.core.placement import as_scalar
from jstep.core.trees import Array, Held, ScalarOrSchedule, Slots, Step
from jstep.optimizers.held import HELD

Hyper: TypeAlias = dict[str, Any]
"""The values of hyperparameters at a step, by name."""


def checked(
    name: str,
    value: ScalarOrSchedule,
    *,
    low: float = -math.inf,
    high: float = math.inf,
    above: bool = False,
    below: bool = False,
) -> Any:
    """Check a hyperparameter and return it.

    Args:
        name: The argument's name, for the error.
        value: A number, a scalar array (which may be traced), a schedule, or the result of `held`, whose initial value
            is checked like a number.
        low: The lower bound.
        high: The upper bound.
        above: Whether the value must be strictly greater than `low`.
        below: Whether the value must be strictly less than `high`.

    Raises:
        ValueError: The value is not a scalar, not finite, or out of range.
    """
    if isinstance(value, Held):
        first = checked(name, value.value, low=low, high=high, above=above, below=below)
        return dataclasses.replace(value, value=first)
    given: Any = value
    if isinstance(given, type):
        raise TypeError(f"{name}={given.__name__}: must be a number, an array or a schedule, got a class")
    if callable(given):
        return given
    bounds: Bounds = {"low": low, "high": high, "above": above, "below": below}
    return as_scalar(given, name, expected="a number, an array or a schedule", **bounds)


def constant(name: str, value: Any, **bounds: Any) -> float:
    """Check a number that is fixed when the optimizer is created: like `checked`, without schedules or `held`.

    Raises:
        ValueError: It is not finite, or out of range.
    """
    if callable(value) or isinstance(value, Held) or trees.is_traced(value):
        kind = (
            "a held value" if isinstance(value, Held) else "a traced array" if trees.is_array(value) else "a function"
        )
        raise TypeError(
            f"{name}={value!r}: must be a plain number, got {kind}; it is fixed when the optimizer is created"
        )
    return float(checked(name, value, **bounds))


def low_dtype(argument: str, dtype: Any) -> Any:
    """A floating dtype for a slot, or None."""
    if dtype is None:
        return None
    try:
        found = jnp.dtype(dtype)
    except TypeError:
        found = None
    if found is None or not jnp.issubdtype(found, jnp.floating):
        raise TypeError(f"{argument}={shown(dtype)}: must be a floating dtype such as jnp.bfloat16, got {kind(dtype)}")
    return found


def deprecated_m_dtype(dtype: Any) -> Any:
    """The argument `m_dtype` of an optimizer, with a warning if it is given."""
    found = low_dtype("m_dtype", dtype)
    if found is not None:
        text = "m_dtype is deprecated and will be removed: jstep.compact(optimizer) stores m in 8 bits"
        warnings.warn(text, DeprecationWarning, stacklevel=3)
    return found


def value_at(name: str, value: Any, step: Step, slots: Slots | None = None) -> Any:
    """The value of a hyperparameter at a step: a Python float if it is constant, else a float scalar array.

    Args:
        name: The argument's name, for the error.
        value: The value returned by `checked`.
        step: The step.
        slots: The slots of the optimizer, from which held values are read.

    Raises:
        ValueError: A schedule did not return a scalar, or the slots have no such held value.
    """
    if isinstance(value, float):
        return value
    if isinstance(value, Held):
        slot = f"{HELD}/{value.name}"
        if slots is None or slot not in slots:
            raise ValueError(
                f"{name}=held({value.name!r}, …): the state has no slot {slot!r}, it has {sorted(slots or {})}; create "
                "it with this optimizer: TrainState.create(params, optimizer)"
            )
        return slots[slot].astype(trees.default_float())
    number = value(step) if callable(value) else value
    if isinstance(number, bool | str) or not (isinstance(number, int | float) or trees.is_array(number)):
        raise TypeError(f"{name}: the schedule returned {number!r}; it must return a number")
    if np.ndim(number):
        raise ValueError(f"{name}: the schedule returned shape {np.shape(number)} at one step; it must be a scalar")
    return jnp.asarray(number).astype(trees.default_float())


def values_at(given: Mapping[str, Any], step: Step, slots: Slots | None = None) -> dict[str, Any]:
    """The values of all hyperparameters at a step, by name."""
    return {name: value_at(name, value, step, slots) for name, value in given.items()}


def as_schedule(value: ScalarOrSchedule, name: str = "value") -> Callable[[Step], Any]:
    """Convert a number, an array or a schedule to a function of the step, for hyperparameters of custom optimizers.

    Args:
        value: A number, a scalar array or a schedule.
        name: Its name, for errors.

    Returns:
        `schedule(step)`, a scalar; a plain number stays a Python float, which is exact and free in a compiled step.

    Raises:
        TypeError: It is not a number, an array or a schedule. `held` is not supported, because a held value depends on
            the state.
        ValueError: It is not a scalar, or not finite.

    Example:
        >>> import jstep
        >>> jstep.as_schedule(0.1)(7), float(jstep.as_schedule(jstep.exponential_decay(1.0, 1, 0.5))(2))
        (0.1, 0.25)
    """
    given = checked(name, value)
    if isinstance(given, Held):
        raise TypeError(f"{name}: must be a number, an array or a schedule; held hyperparameters need jstep.leafwise")
    return lambda step: value_at(name, given, step)


def report(given: Mapping[str, Any]) -> Callable[[Step], dict[str, Array]]:
    """The `hyperparameters` function of an optimizer with these hyperparameters, without held ones.

    Under a trace, constants are NumPy scalars. A compiled step then does not return them (an output costs about 2 µs
    per call on a CPU), and `training` adds them outside of it.
    """
    given = {name: value for name, value in given.items() if not isinstance(value, Held)}

    return lambda step, /: as_arrays(values_at(given, step), step)


def as_arrays(values: Mapping[str, Any], step: Step) -> dict[str, Any]:
    """Convert the numbers among values at a step to scalar arrays, under a trace to those of NumPy; see `report`."""
    make: Any = np.asarray if trees.is_traced(step) else jnp.asarray
    return {
        name: make(value, trees.default_float()) if isinstance(value, int | float | np.generic) else value
        for name, value in values.items()
    }
