"""Schedules with a warmup: cosine, warmup-stable-decay, inverse square root, and those of AdEMAMix."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np

from jstep.core.checks import one_of
from jstep.core.trees import Array, Number, Schedule, Step
from jstep.schedules._arguments import count, scalar, steps
from jstep.schedules._arguments import steps as exact
from jstep.schedules._arithmetic import between, cosine, ramp, since, straight

SHAPES = {
    "linear": straight,
    "cosine": cosine,
    # 1 − √x without the cancellation near x = 1.
    "sqrt": lambda passed, left: (left / (1 + jnp.sqrt(passed)), jnp.sqrt(passed)),
}
"""Name → function that returns the weights of a decay's first and last value."""


def warmup_cosine_decay(
    peak: Number,
    warmup_steps: int,
    decay_steps: int,
    init_value: Number = 0.0,
    end_value: Number = 0.0,
) -> Schedule:
    """Linear warmup init_value + (peak − init_value) · step / warmup_steps, then cosine decay to end_value.

    Args:
        peak: The value at step `warmup_steps`.
        warmup_steps: The number of warmup steps, ≥ 0.
        decay_steps: The length of the whole schedule, warmup included; > warmup_steps.
        init_value: The value at step 0. If it is 0, as in Optax, the first update is zero; `linear_warmup` of a
            `cosine_decay` has a first rate above zero.
        end_value: The value from step `decay_steps`.

    Returns:
        A function from the step to a scalar.

    Raises:
        TypeError: A number of steps is not an integer.
        ValueError: `warmup_steps` < 0, or `decay_steps` ≤ `warmup_steps`.

    Example:
        >>> import jstep
        >>> schedule = jstep.warmup_cosine_decay(1.0, 10, 110)
        >>> print([round(float(schedule(n)), 3) for n in (0, 5, 10, 60, 110)])
        [0.0, 0.5, 1.0, 0.5, 0.0]

    Source: `optax.warmup_cosine_decay_schedule`.
    """
    top, begin, end = scalar("peak", peak), scalar("init_value", init_value), scalar("end_value", end_value)
    warm = count("warmup_steps", warmup_steps, warmup_cosine_decay, zero=True)
    length = count("decay_steps", decay_steps, warmup_cosine_decay)
    if length <= warm:
        raise ValueError(
            f"decay_steps={decay_steps}: must be > warmup_steps={warmup_steps}, got {decay_steps}; "
            "it is the length of the whole schedule, warmup included"
        )

    def schedule(step: Step, /) -> Any:
        step = steps(step)
        later = between(top, end, step, warm, length, cosine)
        if not warm:
            return later
        return jnp.where(step >= _first_at(step, warm), later, between(begin, top, step, Fraction(0), warm, straight))

    return schedule


def warmup_stable_decay(
    peak: Number,
    warmup_steps: int,
    stable_steps: int,
    decay_steps: int,
    end_value: Number = 0.0,
    shape: Literal["linear", "cosine", "sqrt"] = "linear",
) -> Schedule:
    """Warmup-stable-decay (WSD): peak · min(1, (step + 1) / warmup_steps), then peak, then a decay to end_value.

    With x = (step − warmup_steps − stable_steps) / decay_steps the decay is end_value + (peak − end_value) · s(x),
    s(x) = 1 − x, (1 + cos πx) / 2 or 1 − √x. To start the decay from any checkpoint of the plateau, change
    `stable_steps`: all earlier values stay the same.

    Args:
        peak: The value of the plateau.
        warmup_steps: The number of warmup steps, ≥ 0; the first update has a rate above zero.
        stable_steps: The number of steps at the peak, ≥ 0.
        decay_steps: The number of decay steps, > 0.
        end_value: The value after the decay.
        shape: "linear", "cosine", or "sqrt" for 1 − √x.

    Returns:
        A function from the step to a scalar.

    Raises:
        TypeError: A number of steps is not an integer.
        ValueError: A length is out of range, or `shape` is not one of the three.

    Example:
        >>> import jstep
        >>> schedule = jstep.warmup_stable_decay(1.0, 4, 4, 10)
        >>> print([round(float(schedule(n)), 3) for n in (0, 3, 8, 13, 18)])
        [0.25, 1.0, 1.0, 0.5, 0.0]

    Source: Hu et al., "MiniCPM" (2024); Hägele et al., "Scaling Laws and Compute-Optimal Training Beyond Fixed
    Training Durations" (2024), for 1 − √x; `get_wsd_schedule` of Hugging Face, whose warmup is step / warmup_steps.
    """
    top, end = scalar("peak", peak), scalar("end_value", end_value)
    warm = count("warmup_steps", warmup_steps, warmup_stable_decay, zero=True)
    stable = count("stable_steps", stable_steps, warmup_stable_decay, zero=True)
    length = count("decay_steps", decay_steps, warmup_stable_decay)
    weight = SHAPES[one_of(shape, "shape", list(SHAPES))]

    def schedule(step: Step, /) -> Any:
        step = steps(step)
        return ramp(step, warm) * between(top, end, step, warm + stable, warm + stable + length, weight)

    return schedule


def inverse_sqrt_decay(peak: Number, warmup_steps: int) -> Schedule:
    """Warmup and inverse square root decay: peak · min(1, (step + 1) / w) · √(w / max(step, w)), w = warmup_steps.

    Args:
        peak: The highest value, at the updates number w and w + 1.
        warmup_steps: The number of warmup steps, and the time scale of the decay; > 0.

    Returns:
        A function from the step to a scalar.

    Raises:
        TypeError: `warmup_steps` is not an integer.
        ValueError: `warmup_steps` ≤ 0.

    Example:
        >>> import jstep
        >>> schedule = jstep.inverse_sqrt_decay(1.0, 100)
        >>> print([round(float(schedule(n)), 3) for n in (0, 99, 100, 400, 10_000)])
        [0.01, 1.0, 1.0, 0.5, 0.1]

    Source: Vaswani et al., "Attention Is All You Need" (2017); `get_inverse_sqrt_schedule` of Hugging Face, whose
    warmup is step / w.
    """
    top, length = scalar("peak", peak), count("warmup_steps", warmup_steps, inverse_sqrt_decay)

    def schedule(step: Step, /) -> Any:
        step = steps(step)
        past = jnp.maximum(since(step, Fraction(0)), float(length))
        return top * ramp(step, length) * jnp.sqrt(jnp.asarray(float(length), past.dtype) / past)

    return schedule


def _first_at(step: Array, edge: Fraction) -> Array:
    """Return the first step ≥ edge, or the largest representable step."""
    return jnp.full_like(step, min(math.ceil(edge), int(np.iinfo(step.dtype).max)))


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
