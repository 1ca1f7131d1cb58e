"""Composition of schedules: constant, piecewise constant, warmup, join, shift, times."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jstep.core import trees
from jstep.core.checks import as_int, describe_type, format_value
from jstep.core.trees import Number, ScalarOrSchedule, Schedule, Step
from jstep.schedules import arithmetic


@arithmetic.makes_schedule(1)
def constant(value: Number) -> Schedule:
    """Constant schedule: the same value at every step.

    Example:
        >>> import jstep
        >>> print(jstep.constant(0.5)(1000))
        0.5
    """
    number = arithmetic.as_float_or_array("value", value)

    def schedule(step: Step, /) -> Any:
        return jnp.full(arithmetic.as_steps(step).shape, number, trees.default_float())

    return schedule


def _as_schedule(name: str, schedule: ScalarOrSchedule) -> Any:
    return (
        schedule if callable(schedule) else constant(arithmetic.as_float_or_array(name, schedule))
    )


def _listed(name: str, values: object) -> list[Any]:
    # Strings are sequences, too, and numbers are not: both would raise a misleading error later.
    if (
        not isinstance(values, list | tuple | np.ndarray | jax.Array)
        or getattr(values, "ndim", 1) == 0
    ):
        raise TypeError(
            f"{name}={format_value(values)}: must be a list, got {describe_type(values)}"
        )
    return list(values)


def _floating(value: object) -> Any:
    # A user's schedule may return a Python number or an integer.
    array = jnp.asarray(value)
    return (
        array if jnp.issubdtype(array.dtype, jnp.floating) else array.astype(trees.default_float())
    )


@arithmetic.makes_schedule(2)
def piecewise_constant(boundaries: Sequence[int], values: Sequence[Number]) -> Schedule:
    """Piecewise constant schedule: values[0] through step boundaries[0], then values[1], etc.

    Args:
        boundaries: Increasing steps.
        values: The values, one more than boundaries.

    Raises:
        TypeError: A boundary is not an integer, or a value not a number.
        ValueError: The boundaries do not increase, or the numbers of boundaries and values do not
            match.

    Example:
        >>> import jstep
        >>> schedule = jstep.piecewise_constant([100, 200], [1.0, 0.5, 0.1])
        >>> print(schedule(100), schedule(101), schedule(201))
        1.0 0.5 0.1

    Source: `tf.train.piecewise_constant`.
    """
    edges = _increasing(boundaries)
    values = _listed("values", values)
    if len(values) != len(edges) + 1:
        raise ValueError(
            f"values: must be {len(edges) + 1} values, one more than boundaries, got {len(values)}"
        )
    numbers = [
        arithmetic.as_float_or_array(f"values[{i}]", value) for i, value in enumerate(values)
    ]

    def schedule(step: Step, /) -> Any:
        step = arithmetic.as_steps(step)
        dtype = trees.default_float()
        if all(isinstance(number, float) for number in numbers):
            # One constant of the program, not one for each number.
            table = jnp.asarray(numbers, dtype)
        else:
            table = jnp.stack([jnp.asarray(number, dtype) for number in numbers])
        largest = np.iinfo(step.dtype).max
        # Boundaries that no step can have become the nearest that the dtype of the step has.
        clipped = jnp.asarray(np.array([min(max(edge, -1), largest) for edge in edges], step.dtype))
        return table[jnp.searchsorted(clipped, step, side="left")]

    return schedule


def _increasing(boundaries: Sequence[int]) -> list[int]:
    boundaries = _listed("boundaries", boundaries)
    edges = [as_int(boundary, f"boundaries[{i}]") for i, boundary in enumerate(boundaries)]
    for edge, following in itertools.pairwise(edges):
        if not following > edge:
            raise ValueError(
                f"boundaries={boundaries}: must increase, but {edge} comes before {following}"
            )
    return edges


@arithmetic.makes_schedule(1)
def linear_warmup(schedule: ScalarOrSchedule, warmup_steps: int) -> Schedule:
    """Linear warmup of a schedule: schedule(step) · min(1, (step + 1) / warmup_steps).

    The first update has 1 / warmup_steps of the value; with `warmup_cosine_decay` it has
    `init_value`, 0 by default, and the peak is reached one step later.

    Args:
        schedule: The schedule or number to warm up to.
        warmup_steps: The number of warmup steps, ≥ 0; 0 leaves the schedule unchanged.

    Raises:
        TypeError: `warmup_steps` is not an integer.
        ValueError: `warmup_steps` is negative.

    Example:
        >>> import jstep
        >>> warm = jstep.linear_warmup(1.0, 4)
        >>> print([float(warm(n)) for n in range(5)])
        [0.25, 0.5, 0.75, 1.0, 1.0]
    """
    inner = _as_schedule("schedule", schedule)
    length = arithmetic.as_step_count("warmup_steps", warmup_steps, linear_warmup, zero=True)
    if not length:
        return inner

    def warm(step: Step, /) -> Any:
        value = _floating(inner(step))
        return value * arithmetic.ramp(arithmetic.as_steps(step), length).astype(value.dtype)

    return warm


@arithmetic.makes_schedule(1)
def shift(schedule: ScalarOrSchedule, start_step: int) -> Schedule:
    """Delay a schedule until `start_step`: schedule(max(0, step − start_step)).

    Args:
        schedule: A schedule or a number.
        start_step: The step at which the schedule begins, an integer ≥ 0.

    Raises:
        TypeError: `start_step` is not an integer.
        ValueError: `start_step` is negative.

    Example:
        >>> import jstep
        >>> late = jstep.shift(jstep.exponential_decay(1.0, 10, 0.5), 100)
        >>> print(late(0), late(100), late(110))
        1.0 1.0 0.5
    """
    inner = _as_schedule("schedule", schedule)
    start = as_int(start_step, "start_step", at_least=0)

    def shifted(step: Step, /) -> Any:
        step = arithmetic.as_steps(step)
        if start > np.iinfo(step.dtype).max:
            # No step reaches it.
            return inner(jnp.zeros_like(step))
        return inner(jnp.maximum(step, start) - start)

    return shifted


@arithmetic.makes_schedule(1)
def join(schedules: Sequence[ScalarOrSchedule], boundaries: Sequence[int]) -> Schedule:
    """Join schedules in sequence: schedules[i] applies for boundaries[i−1] ≤ step < boundaries[i].

    Each schedule is called with the number of steps since its start: step − boundaries[i−1].

    Args:
        schedules: Schedules or numbers, one more than boundaries.
        boundaries: Increasing integers > 0: the steps at which the second and later schedules
            begin.

    Raises:
        TypeError: `schedules` or `boundaries` is not a list, or a boundary is not an integer.
        ValueError: The boundaries do not increase, or the numbers of schedules and boundaries do
            not match.

    Example:
        >>> import jstep
        >>> both = jstep.join([1.0, jstep.exponential_decay(1.0, 10, 0.5)], [100])
        >>> print(both(99), both(100), both(110))
        1.0 1.0 0.5
    """
    schedules = _listed("schedules", schedules)
    edges = _increasing(boundaries)
    if len(schedules) != len(edges) + 1:
        raise ValueError(
            f"schedules: must be {len(edges) + 1} schedules, one more than boundaries, "
            f"got {len(schedules)}"
        )
    if edges and edges[0] <= 0:
        raise ValueError(
            f"boundaries[0]={edges[0]}: must be > 0, or the first schedule would never be used"
        )
    segments = [_as_schedule(f"schedules[{i}]", entry) for i, entry in enumerate(schedules)]
    segments = [
        segments[0],
        *(shift(segment, edge) for segment, edge in zip(segments[1:], edges, strict=True)),
    ]

    def joined(step: Step, /) -> Any:
        step = arithmetic.as_steps(step)
        value = _floating(segments[0](step))
        for segment, edge in zip(segments[1:], edges, strict=True):
            if edge <= np.iinfo(step.dtype).max:
                value = jnp.where(step >= edge, _floating(segment(step)).astype(value.dtype), value)
        return value

    return joined


@arithmetic.makes_schedule()
def times(*schedules: ScalarOrSchedule) -> Schedule:
    """Product of schedules and numbers: `schedules[0](step) · schedules[1](step) · …`.

    Args:
        schedules: Schedules or numbers, at least one.

    Raises:
        TypeError: One of the schedules is neither a schedule nor a number.
        ValueError: No schedules are given.

    Example:
        >>> import jstep
        >>> schedule = jstep.times(0.5, jstep.cosine_decay(1.0, 100), jstep.linear_warmup(1.0, 10))
        >>> print(f"{schedule(0):.3g} {schedule(50):.3g}")
        0.05 0.25
    """
    if not schedules:
        raise ValueError("schedules: must be at least one schedule or number, got none")
    factors = [_as_schedule(f"schedules[{i}]", entry) for i, entry in enumerate(schedules)]

    def product(step: Step, /) -> Any:
        step = arithmetic.as_steps(step)
        value = _floating(factors[0](step))
        for factor in factors[1:]:
            value = value * _floating(factor(step)).astype(value.dtype)
        return value

    return product
