"""The decays of `tf.train`: exponential, natural exponential, inverse time, polynomial."""

import math
from typing import Any

import jax.numpy as jnp

from jstep.core.types import Number, Schedule, Step
from jstep.schedules._arithmetic import Periods, exp, period, power, scalar, split, steps


def _nonnegative(name: str, value: Any) -> Any:
    number = scalar(name, value)
    if isinstance(number, float) and not 0 <= number < math.inf:
        raise ValueError(f"{name}={number}: must be finite and ≥ 0")
    return number


def exponential_decay(
    learning_rate: Number, decay_steps: float, decay_rate: Number, staircase: bool = False
) -> Schedule:
    """learning_rate · decay_rate^(step / decay_steps); with staircase the exponent is rounded down.

    Args:
        learning_rate: The value at step 0.
        decay_steps: In how many steps the value is multiplied by `decay_rate` once; > 0, may be fractional.
        decay_rate: The factor, ≥ 0.
        staircase: Whether to decay at whole multiples of `decay_steps` only.

    Returns:
        A function from the step to a scalar.

    Raises:
        TypeError: An argument is no number.
        ValueError: `decay_steps` ≤ 0 or `decay_rate` < 0.

    Example:
        >>> import jstep
        >>> schedule = jstep.exponential_decay(0.1, 10, 2.0)
        >>> print(schedule(10))
        0.2

    Source: `tf.train.exponential_decay`. The quotient is split in integers, so that it is right at every
    step; TF divides in floats, which confuses steps from 2^24 on.
    """
    start, length, rate = (
        scalar("learning_rate", learning_rate),
        period("decay_steps", decay_steps),
        _nonnegative("decay_rate", decay_rate),
    )

    def schedule(step: Step, /) -> Any:
        return start * power(rate, None, split(steps(step), length), staircase=staircase)

    return schedule


def natural_exp_decay(
    learning_rate: Number, decay_steps: float, decay_rate: Number, staircase: bool = False
) -> Schedule:
    """learning_rate · exp(−decay_rate · step / decay_steps); with staircase the quotient is rounded down.

    Args:
        learning_rate: The value at step 0.
        decay_steps: The unit of time in steps; > 0, may be fractional.
        decay_rate: The rate of decay per unit of time.
        staircase: Whether to decay at whole multiples of `decay_steps` only.

    Returns:
        A function from the step to a scalar.

    Raises:
        TypeError: An argument is no number.
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

    def schedule(step: Step, /) -> Any:
        base, log = (exp(-rate), -rate) if isinstance(rate, float) else (jnp.exp(-rate), None)
        return start * power(base, log, split(steps(step), length), staircase=staircase)

    return schedule


def inverse_time_decay(
    learning_rate: Number, decay_steps: float, decay_rate: Number, staircase: bool = False
) -> Schedule:
    """learning_rate / (1 + decay_rate · step / decay_steps); with staircase the quotient is rounded down.

    Args:
        learning_rate: The value at step 0.
        decay_steps: The unit of time in steps; > 0, may be fractional.
        decay_rate: The rate of decay per unit of time, ≥ 0.
        staircase: Whether to decay at whole multiples of `decay_steps` only.

    Returns:
        A function from the step to a scalar.

    Raises:
        TypeError: An argument is no number.
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
        _nonnegative("decay_rate", decay_rate),
    )

    def schedule(step: Step, /) -> Any:
        periods = split(steps(step), length)
        return start / (1 + rate * (periods.whole if staircase else periods.whole + periods.fraction))

    return schedule


def polynomial_decay(
    learning_rate: Number,
    decay_steps: float,
    end_learning_rate: Number = 0.0001,
    power: Number = 1.0,
    cycle: bool = False,
) -> Schedule:
    """(learning_rate − end) · (1 − step / decay_steps)^power + end, and end from decay_steps on.

    Args:
        learning_rate: The value at step 0.
        decay_steps: How long the decay takes; > 0, may be fractional.
        end_learning_rate: The value at the end.
        power: The exponent, ≥ 0; 1 is a line.
        cycle: Whether to start again: decay_steps is stretched to its next multiple that is ≥ step.

    Returns:
        A function from the step to a scalar.

    Raises:
        TypeError: An argument is no number.
        ValueError: `decay_steps` ≤ 0 or `power` < 0.

    Example:
        >>> import jstep
        >>> print(jstep.polynomial_decay(1.0, 100, end_learning_rate=0.0)(25))
        0.75

    Source: `tf.train.polynomial_decay`.
    """
    start, length, end, exponent = (
        scalar("learning_rate", learning_rate),
        period("decay_steps", decay_steps),
        scalar("end_learning_rate", end_learning_rate),
        _nonnegative("power", power),
    )

    def schedule(step: Step, /) -> Any:
        step = steps(step)
        periods = split(step, length)
        left = _cycled(step, periods) if cycle else jnp.where(periods.whole > 0, 0.0, periods.remaining)
        left = left.astype(periods.remaining.dtype)
        return (start - end) * (
            left if isinstance(exponent, float) and exponent == 1.0 else jnp.power(left, exponent)
        ) + end

    return schedule


def _cycled(step: Any, periods: Periods) -> Any:
    # 1 − step / (decay_steps · ⌈step / decay_steps⌉), the ceiling being 1 at step 0 as in TF.
    at_end = (periods.fraction == 0) & (step > 0)
    return jnp.where(at_end, 0.0, periods.remaining / (periods.whole + 1))
