"""Cyclical schedules: one-cycle and triangular."""

from __future__ import annotations

from fractions import Fraction
from typing import Any, Literal

import jax.numpy as jnp

from jstep.core.checks import one_of
from jstep.core.trees import Number, Schedule, Step
from jstep.schedules._arguments import count, period, scalar, steps
from jstep.schedules._arithmetic import between, cosine, since, split, straight


def one_cycle(
    max_value: Number,
    total_steps: int,
    pct_start: float = 0.3,
    div_factor: Number = 25.0,
    final_div_factor: Number = 1e4,
    anneal: Literal["cos", "linear"] = "cos",
) -> Schedule:
    """One-cycle schedule: from max/div_factor up to max, then down to max/div_factor/final_div_factor.

    The maximum is at step pct_start·total − 1, the end at step total − 1.

    Args:
        max_value: The highest value.
        total_steps: The number of updates; > 0.
        pct_start: The fraction of updates in the increasing phase, in [0, 1].
        div_factor: The first value is max_value / div_factor; > 0.
        final_div_factor: The last value is the first value / final_div_factor; > 0.
        anneal: "cos" or "linear".

    Returns:
        A function from the step to a scalar; constant from step total_steps − 1.

    Raises:
        TypeError: A value is not a number, or `total_steps` not an integer.
        ValueError: `total_steps` or a factor is not positive, or `pct_start` is not in [0, 1].

    Example:
        >>> import jstep
        >>> schedule = jstep.one_cycle(1.0, 100)
        >>> print([round(float(schedule(n)), 6) for n in (0, 29, 64, 99)])
        [0.04, 1.0, 0.500002, 4e-06]

    Source: Smith and Topin, "Super-Convergence" (2017); `torch.optim.lr_scheduler.OneCycleLR` with its two phases,
    whose `final_div_factor` also divides the first value. Optax's schedule ends at total_steps, one update later.
    """
    top, length = scalar("max_value", max_value), count("total_steps", total_steps, one_cycle)
    first = top / scalar("div_factor", div_factor, low=0, above=True, finite=True)
    last = first / scalar("final_div_factor", final_div_factor, low=0, above=True, finite=True)
    share = period("pct_start", pct_start, zero=True)
    if share > 1:
        raise ValueError(f"pct_start={pct_start}: must be ≤ 1, a fraction of total_steps, got {pct_start}")
    weight = {"cos": cosine, "linear": straight}[one_of(anneal, "anneal", ["cos", "linear"])]
    peak, end = share * length - 1, length - 1

    def schedule(step: Step, /) -> Any:
        step = steps(step)
        up = between(first, top, step, Fraction(0), peak, weight) if peak > 0 else None
        down = between(top, last, step, peak, end, weight) if end > peak else jnp.full(step.shape, top)
        return down if up is None else jnp.where(since(step, peak) <= 0, up, down)

    return schedule


def cyclical(base: Number, peak: Number, step_size_up: int, step_size_down: int | None = None) -> Schedule:
    """Triangular cyclical schedule: from `base` up to `peak` in step_size_up steps, down in step_size_down steps.

    Args:
        base: The lowest value of each cycle.
        peak: The highest value of each cycle.
        step_size_up: The number of increasing steps, > 0.
        step_size_down: The number of decreasing steps, > 0; None for step_size_up.

    Returns:
        A function from the step to a scalar.

    Raises:
        ValueError: A length is ≤ 0.

    Example:
        >>> import jstep
        >>> schedule = jstep.cyclical(0.0, 1.0, 4)
        >>> print([float(schedule(n)) for n in (0, 2, 4, 6, 8, 10)])
        [0.0, 0.5, 1.0, 0.5, 0.0, 0.5]

    Source: Smith, "Cyclical Learning Rates for Training Neural Networks" (2015);
    `torch.optim.lr_scheduler.CyclicLR` with mode="triangular".
    """
    foot, top = scalar("base", base), scalar("peak", peak)
    up = count("step_size_up", step_size_up, cyclical)
    down = up if step_size_down is None else count("step_size_down", step_size_down, cyclical)
    length = up + down

    def schedule(step: Step, /) -> Any:
        periods = split(steps(step), length)
        real = periods.fraction.dtype
        # The triangle is the minimum of two lines.
        rising = periods.fraction * jnp.asarray(float(length / up), real)
        falling = periods.remaining * jnp.asarray(float(length / down), real)
        height = jnp.minimum(jnp.minimum(rising, falling), 1.0)
        return foot + (top - foot) * height

    return schedule
