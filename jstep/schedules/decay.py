"""Decays of `tf.train` (exponential, natural exponential, inverse time, polynomial) and the linear schedule."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import jax.numpy as jnp

from jstep.core.trees import Number, Schedule, Step
from jstep.schedules._arguments import count, duration, flag, period, scalar
from jstep.schedules._arguments import steps as exact
from jstep.schedules._arithmetic import Periods, between, exp, power, split, straight


def exponential_decay(
    learning_rate: Number, decay_steps: float, decay_rate: Number, staircase: bool = False
) -> Schedule:
    """Exponential decay: learning_rate · decay_rate^(step / decay_steps).

    Args:
        learning_rate: The value at step 0.
        decay_steps: The number of steps in which the value decays by the factor `decay_rate`; > 0, may be fractional.
        decay_rate: The factor, ≥ 0.
        staircase: Whether to round the exponent down, so that the value changes only at multiples of `decay_steps`.

    Returns:
        A function from the step to a scalar.

    Raises:
        TypeError: `staircase` is not a bool.
        ValueError: `decay_steps` ≤ 0 or `decay_rate` < 0.

    Example:
        >>> import jstep
        >>> schedule = jstep.exponential_decay(0.1, 10, 2.0)
        >>> print(schedule(10))
        0.2

    Source: `tf.train.exponential_decay`. The quotient is computed in integers and is exact at every step; TF divides
    in floats, which cannot represent every step from 2^24.
    """
    start, length, rate = (
        scalar("learning_rate", learning_rate),
        period("decay_steps", decay_steps),
        scalar("decay_rate", decay_rate, low=0, finite=True),
    )
    staircase = flag("staircase", staircase)

    def schedule(step: Step, /) -> Any:
        return start * power(rate, None, split(exact(step), length), staircase=staircase)

    return schedule


def natural_exp_decay(
    learning_rate: Number, decay_steps: float, decay_rate: Number, staircase: bool = False
) -> Schedule:
    """Natural exponential decay: learning_rate · exp(−decay_rate · step / decay_steps).

    Args:
        learning_rate: The value at step 0.
        decay_steps: The unit of time in steps; > 0, may be fractional.
        decay_rate: The rate of decay per unit of time.
        staircase: Whether to round step / decay_steps down, so that the value changes only at multiples of
            `decay_steps`.

    Returns:
        A function from the step to a scalar.

    Raises:
        TypeError: `staircase` is not a bool.
        ValueError: `decay_steps` ≤ 0.

    Example:
        >>> import jstep
        >>> print(jstep.natural_exp_decay(1.0, 10, 0.5)(20))
        0.36787945

    Source: `tf.train.natural_exp_decay`.
    """
    start, length, rate = (
        scalar("learning_rate", learning_rate),
        period("decay_steps", decay_steps),
        scalar("decay_rate", decay_rate),
    )
    staircase = flag("staircase", staircase)

    def schedule(step: Step, /) -> Any:
        base, log = (exp(-rate), -rate) if isinstance(rate, float) else (jnp.exp(-rate), None)
        return start * power(base, log, split(exact(step), length), staircase=staircase)

    return schedule


def inverse_time_decay(
    learning_rate: Number, decay_steps: float, decay_rate: Number, staircase: bool = False
) -> Schedule:
    """Inverse time decay: learning_rate / (1 + decay_rate · step / decay_steps).

    Args:
        learning_rate: The value at step 0.
        decay_steps: The unit of time in steps; > 0, may be fractional.
        decay_rate: The rate of decay per unit of time, ≥ 0.
        staircase: Whether to round step / decay_steps down, so that the value changes only at multiples of
            `decay_steps`.

    Returns:
        A function from the step to a scalar.

    Raises:
        TypeError: `staircase` is not a bool.
        ValueError: `decay_steps` ≤ 0 or `decay_rate` < 0.

    Example:
        >>> import jstep
        >>> print(jstep.inverse_time_decay(1.0, 10, 0.5)(20))
        0.5

    Source: `tf.train.inverse_time_decay`.
    """
    start, length, rate = (
        scalar("learning_rate", learning_rate),
        period("decay_steps", decay_steps),
        scalar("decay_rate", decay_rate, low=0, finite=True),
    )
    staircase = flag("staircase", staircase)

    def schedule(step: Step, /) -> Any:
        periods = split(exact(step), length)
        return start / (1 + rate * (periods.whole if staircase else periods.whole + periods.fraction))

    return schedule


def polynomial_decay(
    learning_rate: Number,
    decay_steps: float,
    end_learning_rate: Number = 0.0001,
    power: Number = 1.0,
    cycle: bool = False,
) -> Schedule:
    """Polynomial decay: (learning_rate − end) · (1 − step / decay_steps)^power + end; constant from decay_steps.

    Args:
        learning_rate: The value at step 0.
        decay_steps: The length of the decay in steps; ≥ 1, may be fractional.
        end_learning_rate: The value at the end.
        power: The exponent, ≥ 0; 1 is a linear decay.
        cycle: Whether to repeat the decay: decay_steps is extended to its smallest multiple ≥ step.

    Returns:
        A function from the step to a scalar.

    Raises:
        TypeError: `cycle` is not a bool.
        ValueError: `decay_steps` ≤ 0 or `power` < 0.

    Example:
        >>> import jstep
        >>> print(jstep.polynomial_decay(1.0, 100, end_learning_rate=0.0)(25))
        0.75

    Source: `tf.train.polynomial_decay`.
    """
    start, length, end, exponent = (
        scalar("learning_rate", learning_rate),
        duration("decay_steps", decay_steps, polynomial_decay),
        scalar("end_learning_rate", end_learning_rate),
        scalar("power", power, low=0, finite=True),
    )
    cycle = flag("cycle", cycle)

    def schedule(step: Step, /) -> Any:
        step = exact(step)
        periods = split(step, length)
        left = _cycled(step, periods) if cycle else jnp.where(periods.whole > 0, 0.0, periods.remaining)
        left = left.astype(periods.remaining.dtype)
        return (start - end) * (
            left if isinstance(exponent, float) and exponent == 1.0 else jnp.power(left, exponent)
        ) + end

    return schedule


def _cycled(step: Any, periods: Periods) -> Any:
    # 1 − step / (decay_steps · ⌈step / decay_steps⌉); the ceiling is 1 at step 0, as in TF.
    at_end = (periods.fraction == 0) & (step > 0)
    return jnp.where(at_end, 0.0, periods.remaining / (periods.whole + 1))


def linear(init_value: Number, end_value: Number, steps: int) -> Schedule:
    """Linear schedule: init_value + (end_value − init_value) · step / steps; constant from `steps`.

    Args:
        init_value: The value at step 0.
        end_value: The value at step `steps` and later.
        steps: The number of steps, > 0.

    Returns:
        A function from the step to a scalar.

    Raises:
        ValueError: `steps` ≤ 0.

    Example:
        >>> import jstep
        >>> schedule = jstep.linear(0.0, 1.0, 4)
        >>> print([float(schedule(n)) for n in (0, 1, 4, 9)])
        [0.0, 0.25, 1.0, 1.0]

    Source: `optax.linear_schedule`, `torch.optim.lr_scheduler.LinearLR`. As a warmup from init_value 0 its first update
    has rate 0; `linear_warmup` has a first rate above zero.
    """
    start, end = scalar("init_value", init_value), scalar("end_value", end_value)
    length = count("steps", steps, linear)

    def schedule(step: Step, /) -> Any:
        return between(start, end, exact(step), Fraction(0), length, straight)

    return schedule
