"""The decays of `tf.train`: exponential, natural exponential, inverse time, polynomial; and the plain line."""

import math
from fractions import Fraction
from typing import Any

import jax.numpy as jnp

from jstep.core.types import Number, Schedule, Step
from jstep.schedules._arithmetic import Periods, between, count, exp, flag, period, power, scalar, split, straight
from jstep.schedules._arithmetic import steps as exact


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
        TypeError: `staircase` is not a bool.
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
    staircase = flag("staircase", staircase)

    def schedule(step: Step, /) -> Any:
        return start * power(rate, None, split(exact(step), length), staircase=staircase)

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
    """learning_rate / (1 + decay_rate · step / decay_steps); with staircase the quotient is rounded down.

    Args:
        learning_rate: The value at step 0.
        decay_steps: The unit of time in steps; > 0, may be fractional.
        decay_rate: The rate of decay per unit of time, ≥ 0.
        staircase: Whether to decay at whole multiples of `decay_steps` only.

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
        _nonnegative("decay_rate", decay_rate),
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
        period("decay_steps", decay_steps),
        scalar("end_learning_rate", end_learning_rate),
        _nonnegative("power", power),
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
    # 1 − step / (decay_steps · ⌈step / decay_steps⌉), the ceiling being 1 at step 0 as in TF.
    at_end = (periods.fraction == 0) & (step > 0)
    return jnp.where(at_end, 0.0, periods.remaining / (periods.whole + 1))


def linear(init_value: Number, end_value: Number, steps: int) -> Schedule:
    """Line: init_value + (end_value − init_value) · step / steps, and end_value from `steps` on.

    Args:
        init_value: The value at step 0.
        end_value: The value at step `steps` and later.
        steps: How long it takes, > 0.

    Returns:
        A function from the step to a scalar.

    Raises:
        ValueError: `steps` ≤ 0.

    Example:
        >>> import jstep
        >>> schedule = jstep.linear(0.0, 1.0, 4)
        >>> print([float(schedule(n)) for n in (0, 1, 4, 9)])
        [0.0, 0.25, 1.0, 1.0]

    Source: `optax.linear_schedule`, `torch.optim.lr_scheduler.LinearLR`. As a warm-up it begins with an update of
    rate 0 where init_value is 0; `linear_warmup` does not.
    """
    start, end = scalar("init_value", init_value), scalar("end_value", end_value)
    length = count("steps", steps, linear)

    def schedule(step: Step, /) -> Any:
        return between(start, end, exact(step), Fraction(0), length, straight)

    return schedule
