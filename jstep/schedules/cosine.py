"""Cosine decays of `tf.train`: single, with restarts, and linear cosine.

(1 + cos πx) / 2 is computed as sin²(π(1 − x) / 2), with 1 − x exact: the first form loses all precision near the end
of a decay.
"""

from __future__ import annotations

import itertools
import math
from fractions import Fraction
from typing import Any

import jax.numpy as jnp
import numpy as np

from jstep.core import trees
from jstep.core.checks import as_number
from jstep.core.trees import Number, Schedule, Step
from jstep.schedules._arguments import duration, period, scalar, steps
from jstep.schedules._arithmetic import half_cosine, power, split


def cosine_decay(learning_rate: Number, decay_steps: float, alpha: Number = 0.0) -> Schedule:
    """Cosine decay: learning_rate · ((1 − alpha) · (1 + cos(π · min(step, decay_steps) / decay_steps)) / 2 + alpha).

    Args:
        learning_rate: The value at step 0.
        decay_steps: The length of the decay in steps; ≥ 1, may be fractional.
        alpha: The value at the end, as a fraction of `learning_rate`.

    Returns:
        A function from the step to a scalar.

    Raises:
        ValueError: `decay_steps` ≤ 0.

    Example:
        >>> import jstep
        >>> schedule = jstep.cosine_decay(1.0, 100)
        >>> print(f"{schedule(0):.2f} {schedule(50):.2f} {schedule(100):.2f}")
        1.00 0.50 0.00

    Source: Loshchilov and Hutter, "SGDR" (2016); `tf.train.cosine_decay`.
    """
    start, length, floor = (
        scalar("learning_rate", learning_rate),
        duration("decay_steps", decay_steps, cosine_decay),
        scalar("alpha", alpha),
    )

    def schedule(step: Step, /) -> Any:
        periods = split(steps(step), length)
        remaining = periods.remaining
        cosine = jnp.where(periods.whole > 0, jnp.zeros_like(remaining), half_cosine(remaining))
        return start * ((1 - floor) * cosine + floor)

    return schedule


def cosine_decay_restarts(
    learning_rate: Number,
    first_decay_steps: float,
    t_mul: float = 2.0,
    m_mul: float = 1.0,
    alpha: Number = 0.0,
) -> Schedule:
    """Cosine decay with warm restarts: period i lasts first_decay_steps · t_mul^i and starts at m_mul^i.

    value = learning_rate · ((1 − alpha) · m_mul^i · (1 + cos(π · x)) / 2 + alpha), where x is the elapsed fraction of
    period i.

    Args:
        learning_rate: The value at step 0.
        first_decay_steps: The length of the first period in steps; ≥ 1, may be fractional.
        t_mul: The ratio of the length of each period to the previous one, ≥ 1.
        m_mul: The ratio of the initial value of each period to the previous one, ≥ 0.
        alpha: The value at the end of a period, as a fraction of `learning_rate`.

    Returns:
        A function from the step to a scalar.

    Raises:
        ValueError: `first_decay_steps` ≤ 0, `t_mul` < 1 (or so close to 1 that a run could have more than 100 000
            periods), or `m_mul` < 0.

    Example:
        >>> import jstep
        >>> schedule = jstep.cosine_decay_restarts(1.0, 10)
        >>> print([round(float(schedule(n)), 2) for n in (0, 5, 10, 20, 30)])
        [1.0, 0.5, 1.0, 0.5, 1.0]

    Source: Loshchilov and Hutter, "SGDR" (2016); `tf.train.cosine_decay_restarts`, which computes the period with a
    float logarithm and therefore misplaces restarts; here they are tabulated.
    """
    start, length, floor = (
        scalar("learning_rate", learning_rate),
        duration("first_decay_steps", first_decay_steps, cosine_decay_restarts),
        scalar("alpha", alpha),
    )
    stretch = period("t_mul", t_mul)
    height = as_number(m_mul, "m_mul", low=0, finite=False, expected="a plain number")
    if stretch < 1:
        raise ValueError(f"t_mul={t_mul}: must be ≥ 1, or the periods would shrink to nothing")

    def periodic(step: Step, /) -> Any:
        periods = split(steps(step), length)
        peak = 1.0 if height == 1.0 else power(height, None, periods, staircase=True)
        return start * ((1 - floor) * peak * half_cosine(periods.remaining) + floor)

    def growing(step: Step, /) -> Any:
        step = steps(step)
        real, last = trees.default_float(), int(np.iinfo(step.dtype).max)
        begins = _restarts(length, stretch, last)
        firsts = [math.ceil(begin) for begin in begins[1:-1]]
        index = jnp.searchsorted(jnp.asarray(np.array(firsts, step.dtype)), step, side="right")
        # remaining = (end − step) / length; the whole part of the end is subtracted in integers.
        whole_ends = [min(math.floor(end), last) for end in begins[1:]]
        rests = [float(end - whole) for end, whole in zip(begins[1:], whole_ends, strict=True)]
        lengths = [float(end - begin) for begin, end in itertools.pairwise(begins)]
        left = (jnp.asarray(np.array(whole_ends, step.dtype))[index] - step).astype(real)
        remaining = (left + jnp.asarray(rests, real)[index]) / jnp.asarray(lengths, real)[index]
        peaks = jnp.asarray(np.power(height, np.arange(len(lengths))), real)[index]
        return start * ((1 - floor) * peaks * half_cosine(remaining) + floor)

    if stretch == 1:
        return periodic
    _restarts(length, stretch, int(np.iinfo(trees.default_int()).max))
    return growing


def _restarts(length: Fraction, stretch: Fraction, last: int) -> list[Fraction]:
    """Return the starts of the periods, up to the first beyond `last`."""
    begins = [Fraction(0)]
    while begins[-1] <= last:
        if len(begins) > 100_000:
            raise ValueError(f"t_mul={float(stretch)}: more than 100 000 periods in {last} steps; use t_mul=1.0")
        begins.append(begins[-1] + length)
        # A millionth of a step is enough; the exact fraction would grow without bound.
        length = Fraction(round(length * stretch * 2**20), 2**20)
    return begins


def linear_cosine_decay(
    learning_rate: Number,
    decay_steps: float,
    num_periods: Number = 0.5,
    alpha: Number = 0.0,
    beta: Number = 0.001,
) -> Schedule:
    """Linear cosine decay: learning_rate · ((alpha + 1 − x) · (1 + cos(2π · num_periods · x)) / 2 + beta).

    Here x = min(step / decay_steps, 1).

    Args:
        learning_rate: The value at step 0 if `alpha` and `beta` are 0.
        decay_steps: The length of the decay in steps; ≥ 1, may be fractional.
        num_periods: The number of cosine periods in the decay.
        alpha: Added to the linear factor.
        beta: Added to the product.

    Returns:
        A function from the step to a scalar.

    Raises:
        ValueError: `decay_steps` ≤ 0.

    Example:
        >>> import jstep
        >>> print(jstep.linear_cosine_decay(1.0, 100)(50))
        0.251

    Source: Bello et al., "Neural Optimizer Search with Reinforcement Learning" (2017);
    `tf.train.linear_cosine_decay`.
    """
    start, length = scalar("learning_rate", learning_rate), duration("decay_steps", decay_steps, linear_cosine_decay)
    count, above, floor = scalar("num_periods", num_periods), scalar("alpha", alpha), scalar("beta", beta)

    def schedule(step: Step, /) -> Any:
        periods = split(steps(step), length)
        over, fraction, remaining = periods.whole > 0, periods.fraction, periods.remaining
        fraction = jnp.where(over, jnp.ones_like(fraction), fraction)
        remaining = jnp.where(over, jnp.zeros_like(remaining), remaining)
        cosine = 0.5 * (1 + jnp.cos(2 * math.pi * count * fraction))
        return start * ((above + remaining) * cosine + floor)

    return schedule
