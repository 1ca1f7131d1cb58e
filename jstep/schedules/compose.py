"""Schedules made of others: constant, piecewise constant, warmup, join, shift."""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jstep.core import trees
from jstep.core.types import Number, ScalarOrSchedule, Schedule, Step
from jstep.schedules._arithmetic import period, scalar, steps


def constant(value: Number) -> Schedule:
    """The same value at every step.

    Example:
        >>> import jstep
        >>> print(jstep.constant(0.5)(1000))
        0.5
    """
    number = scalar("value", value)

    def schedule(step: Step, /) -> Any:
        return jnp.full(steps(step).shape, number, trees.default_float())

    return schedule


def _as_schedule(name: str, schedule: ScalarOrSchedule) -> Any:
    return schedule if callable(schedule) else constant(scalar(name, schedule))


def _floating(value: Any) -> Any:
    # What a user's schedule returns may be a Python number or an integer.
    array = jnp.asarray(value)
    return array if jnp.issubdtype(array.dtype, jnp.floating) else array.astype(trees.default_float())


def piecewise_constant(boundaries: Sequence[float], values: Sequence[Number]) -> Schedule:
    """values[0] up to and including step boundaries[0], then values[1] up to and including boundaries[1], and so on.

    Args:
        boundaries: Increasing steps.
        values: One more than there are boundaries.

    Returns:
        A function from the step to a scalar.

    Raises:
        TypeError: A boundary or a value is no number.
        ValueError: The boundaries do not increase, or the numbers of boundaries and values do not fit.

    Example:
        >>> import jstep
        >>> schedule = jstep.piecewise_constant([100, 200], [1.0, 0.5, 0.1])
        >>> print(schedule(100), schedule(101), schedule(201))
        1.0 0.5 0.1

    Source: `tf.train.piecewise_constant`.
    """
    edges = _increasing("boundaries", boundaries, integers=False)
    if len(values) != len(edges) + 1:
        raise ValueError(
            f"values: {len(values)} of them for {len(edges)} boundaries; there must be one more value than boundaries"
        )
    numbers = [scalar(f"values[{i}]", value) for i, value in enumerate(values)]

    def schedule(step: Step, /) -> Any:
        step = steps(step)
        table = jnp.stack([jnp.asarray(number, trees.default_float()) for number in numbers])
        if not edges:
            return jnp.broadcast_to(table[0], step.shape)
        return table[jnp.searchsorted(_edge_array(edges, step.dtype), step, side="left")]

    return schedule


def _increasing(name: str, values: Sequence[float], *, integers: bool) -> list[int]:
    if not isinstance(values, list | tuple | np.ndarray | jax.Array):
        raise TypeError(f"{name}={values!r}: must be a sequence of steps, got {type(values).__name__}")
    edges: list[int] = []
    for i, value in enumerate(values):
        if trees.is_traced(value) or isinstance(value, bool | str) or np.ndim(value):
            raise TypeError(f"{name}[{i}]={value!r}: must be a plain number")
        number = np.asarray(value).item()
        if integers and not isinstance(number, int):
            raise TypeError(f"{name}[{i}]={value!r}: must be an integer")
        if not math.isfinite(number):
            raise ValueError(f"{name}[{i}]={value!r}: must be finite")
        # For integer steps, step ≤ 2.5 says step ≤ 2.
        edges.append(math.floor(number))
        if i and not number > np.asarray(values[i - 1]).item():
            raise ValueError(f"{name}={list(values)}: must increase, but {values[i - 1]} comes before {value}")
    return edges


def _edge_array(edges: list[int], dtype: Any) -> Any:
    info = np.iinfo(dtype)
    return jnp.asarray(np.array([min(max(edge, -1), info.max) for edge in edges], dtype))


def linear_warmup(schedule: ScalarOrSchedule, warmup_steps: float) -> Schedule:
    """schedule(step) · min(1, (step + 1) / warmup_steps).

    The first update already has a rate above zero, and update number `warmup_steps` is the first at full rate.

    Args:
        schedule: What to warm up to: a schedule or a number.
        warmup_steps: How many steps it takes, ≥ 0; 0 leaves the schedule as it is.

    Returns:
        A function from the step to a scalar.

    Raises:
        TypeError: An argument is of the wrong type.
        ValueError: `warmup_steps` is negative or not finite.

    Example:
        >>> import jstep
        >>> warm = jstep.linear_warmup(1.0, 4)
        >>> print([float(warm(n)) for n in range(5)])
        [0.25, 0.5, 0.75, 1.0, 1.0]
    """
    inner = _as_schedule("schedule", schedule)
    plain = not isinstance(warmup_steps, bool | str) and not trees.is_traced(warmup_steps)
    if plain and np.ndim(warmup_steps) == 0 and warmup_steps == 0:
        return inner
    length = float(period("warmup_steps", warmup_steps))
    # The first step N with N + 1 ≥ warmup_steps; N + 1 itself could overflow.
    full = math.ceil(length) - 1

    def warm(step: Step, /) -> Any:
        value = _floating(inner(step))
        step = steps(step)
        early = jnp.minimum(step, min(full, np.iinfo(step.dtype).max - 1)) + 1
        factor = early.astype(value.dtype) / jnp.asarray(length, value.dtype)
        return value * jnp.where(step >= min(full, np.iinfo(step.dtype).max), jnp.ones_like(factor), factor)

    return warm


def shift(schedule: ScalarOrSchedule, start_step: int) -> Schedule:
    """schedule(max(0, step − start_step)): a schedule that begins at `start_step`.

    Args:
        schedule: A schedule or a number.
        start_step: The step at which it begins, an integer ≥ 0.

    Returns:
        A function from the step to a scalar.

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
    (start,) = _increasing("start_step", [start_step], integers=True)
    if start < 0:
        raise ValueError(f"start_step={start}: must be ≥ 0")

    def shifted(step: Step, /) -> Any:
        step = steps(step)
        return inner(jnp.maximum(step, start) - start if start <= np.iinfo(step.dtype).max else jnp.zeros_like(step))

    return shifted


def join(schedules: Sequence[ScalarOrSchedule], boundaries: Sequence[int]) -> Schedule:
    """Schedules one after another: number i for boundaries[i−1] ≤ step < boundaries[i].

    Each sees the steps since it began: step − boundaries[i−1].

    Args:
        schedules: Schedules or numbers, one more than there are boundaries.
        boundaries: Increasing integers > 0: the step at which each later schedule begins.

    Returns:
        A function from the step to a scalar.

    Raises:
        TypeError: A boundary is not an integer.
        ValueError: The boundaries do not increase, or the numbers of schedules and boundaries do not fit.

    Example:
        >>> import jstep
        >>> both = jstep.join([1.0, jstep.exponential_decay(1.0, 10, 0.5)], [100])
        >>> print(both(99), both(100), both(110))
        1.0 1.0 0.5
    """
    edges = _increasing("boundaries", boundaries, integers=True)
    if len(schedules) != len(edges) + 1:
        raise ValueError(
            f"schedules: {len(schedules)} of them for {len(edges)} boundaries; there must be one more schedule "
            "than boundaries"
        )
    if edges and edges[0] <= 0:
        raise ValueError(f"boundaries[0]={edges[0]}: must be > 0, or the first schedule would never be used")
    parts = [_as_schedule(f"schedules[{i}]", part) for i, part in enumerate(schedules)]
    parts = [parts[0], *(shift(part, edge) for part, edge in zip(parts[1:], edges, strict=True))]

    def joined(step: Step, /) -> Any:
        step = steps(step)
        value = _floating(parts[0](step))
        for part, edge in zip(parts[1:], edges, strict=True):
            if edge <= np.iinfo(step.dtype).max:
                later = _floating(part(step))
                value = jnp.where(step >= edge, later.astype(value.dtype), value)
        return value

    return joined
