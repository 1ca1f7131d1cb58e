"""Warmup schedules of AdEMAMix for the weight and the decay of the slow average."""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp

from jstep.core.types import Number, Schedule, Step
from jstep.schedules._arguments import count, scalar
from jstep.schedules._arguments import steps as exact
from jstep.schedules._arithmetic import ramp


def ademamix_alpha(alpha: Number, steps: int) -> Schedule:
    """Warmup of AdEMAMix's alpha: min(t · alpha / steps, alpha) at the update t = step + 1.

    Args:
        alpha: The final weight of the slow average, ≥ 0.
        steps: The number of warmup steps, > 0.

    Returns:
        A function from the step to a scalar, for `ademamix(alpha=…)`.

    Raises:
        ValueError: `steps` ≤ 0, or `alpha` < 0.

    Example:
        >>> import jstep
        >>> schedule = jstep.ademamix_alpha(5.0, 100)
        >>> print(f"{schedule(0):.3g} {schedule(99):.3g} {schedule(1000):.3g}")
        0.05 5 5

    Source: Pagliardini et al., "The AdEMAMix Optimizer" (2024), which counts updates from 1.
    """
    height, length = scalar("alpha", alpha, low=0, finite=True), count("steps", steps, ademamix_alpha)

    def schedule(step: Step, /) -> Any:
        return height * ramp(exact(step), length)

    return schedule


def ademamix_beta3(beta1: Number, beta3: Number, steps: int) -> Schedule:
    """Warmup of AdEMAMix's β3: min(exp(ln β1 · ln β3 / ((1 − x) ln β3 + x ln β1)), β3), x = (step + 1) / steps.

    The half-life of the slow average grows linearly from that of β1 to that of β3.

    Args:
        beta1: The initial value, in (0, 1).
        beta3: The final value, in (0, 1).
        steps: The number of warmup steps, > 0.

    Returns:
        A function from the step to a scalar, for `ademamix(beta3=…)`.

    Raises:
        ValueError: `steps` ≤ 0, or a β outside (0, 1).

    Example:
        >>> import jstep
        >>> schedule = jstep.ademamix_beta3(0.9, 0.9999, 100)
        >>> print(f"{schedule(0):.4f} {schedule(98):.4f} {schedule(99):.4f}")
        0.9909 0.9999 0.9999

    Source: Pagliardini et al., "The AdEMAMix Optimizer" (2024), which counts updates from 1.
    """
    inside: Any = {"low": 0, "above": True, "high": 1, "below": True}
    first, last = scalar("beta1", beta1, **inside), scalar("beta3", beta3, **inside)
    length = count("steps", steps, ademamix_beta3)
    logs = [math.log(beta) if isinstance(beta, float) else jnp.log(beta) for beta in (first, last)]

    def schedule(step: Step, /) -> Any:
        x = ramp(exact(step), length)
        grown = jnp.exp(logs[0] * logs[1] / ((1 - x) * logs[1] + x * logs[0]))
        return jnp.where(x >= 1, last, jnp.minimum(grown, last))

    return schedule
