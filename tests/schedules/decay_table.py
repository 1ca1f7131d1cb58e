"""All decays with their references, computed with exact quotients."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import reference

import jstep

LAST = 2**31 - 1
EDGES = [0, 1, 2, 9, 10, 11, 99, 100, 101, 2**24 - 1, 2**24, 2**24 + 1, 2**24 + 3, 2**30, LAST - 1, LAST]

# Functions of decay_steps that return a schedule, with their references.
DECAYS: dict[str, tuple[Callable[[float], jstep.Schedule], Callable[[int, float], float]]] = {
    "exponential": (
        lambda d: jstep.exponential_decay(0.1, d, 0.5),
        lambda n, d: reference.exponential_decay(n, 0.1, d, 0.5),
    ),
    "exponential-staircase": (
        lambda d: jstep.exponential_decay(0.1, d, 0.96, staircase=True),
        lambda n, d: reference.exponential_decay(n, 0.1, d, 0.96, True),
    ),
    "exponential-growing": (
        lambda d: jstep.exponential_decay(0.1, d, 1.5),
        lambda n, d: reference.exponential_decay(n, 0.1, d, 1.5),
    ),
    "natural_exp": (
        lambda d: jstep.natural_exp_decay(0.1, d, 0.3),
        lambda n, d: reference.natural_exp_decay(n, 0.1, d, 0.3),
    ),
    "natural_exp-staircase": (
        lambda d: jstep.natural_exp_decay(0.1, d, 0.3, staircase=True),
        lambda n, d: reference.natural_exp_decay(n, 0.1, d, 0.3, True),
    ),
    "inverse_time": (
        lambda d: jstep.inverse_time_decay(0.1, d, 0.5),
        lambda n, d: reference.inverse_time_decay(n, 0.1, d, 0.5),
    ),
    "inverse_time-staircase": (
        lambda d: jstep.inverse_time_decay(0.1, d, 0.5, staircase=True),
        lambda n, d: reference.inverse_time_decay(n, 0.1, d, 0.5, True),
    ),
    "polynomial": (lambda d: jstep.polynomial_decay(0.1, d), lambda n, d: reference.polynomial_decay(n, 0.1, d)),
    "polynomial-square": (
        lambda d: jstep.polynomial_decay(0.1, d, 0.01, power=2.0),
        lambda n, d: reference.polynomial_decay(n, 0.1, d, 0.01, 2.0),
    ),
    "polynomial-root": (
        lambda d: jstep.polynomial_decay(0.1, d, 0.01, power=0.5),
        lambda n, d: reference.polynomial_decay(n, 0.1, d, 0.01, 0.5),
    ),
    "polynomial-cycle": (
        lambda d: jstep.polynomial_decay(0.1, d, 0.01, cycle=True),
        lambda n, d: reference.polynomial_decay(n, 0.1, d, 0.01, 1.0, True),
    ),
    "cosine": (lambda d: jstep.cosine_decay(0.1, d), lambda n, d: reference.cosine_decay(n, 0.1, d)),
    "cosine-alpha": (
        lambda d: jstep.cosine_decay(0.1, d, alpha=0.2),
        lambda n, d: reference.cosine_decay(n, 0.1, d, 0.2),
    ),
    "cosine_restarts": (
        lambda d: jstep.cosine_decay_restarts(0.1, d),
        lambda n, d: reference.cosine_decay_restarts(n, 0.1, d),
    ),
    "cosine_restarts-equal": (
        lambda d: jstep.cosine_decay_restarts(0.1, d, t_mul=1.0, alpha=0.1),
        lambda n, d: reference.cosine_decay_restarts(n, 0.1, d, 1.0, 1.0, 0.1),
    ),
    "cosine_restarts-lower": (
        lambda d: jstep.cosine_decay_restarts(0.1, d, t_mul=1.5, m_mul=0.8, alpha=0.1),
        lambda n, d: reference.cosine_decay_restarts(n, 0.1, d, 1.5, 0.8, 0.1),
    ),
    "linear_cosine": (
        lambda d: jstep.linear_cosine_decay(0.1, d),
        lambda n, d: reference.linear_cosine_decay(n, 0.1, d),
    ),
    "linear_cosine-periods": (
        lambda d: jstep.linear_cosine_decay(0.1, d, num_periods=3, alpha=0.1, beta=0.01),
        lambda n, d: reference.linear_cosine_decay(n, 0.1, d, 3, 0.1, 0.01),
    ),
}


def close(found: Any, expected: Any, scale: float = 0.1) -> None:
    """Compare up to float32 rounding: relative error for powers, absolute error for differences."""
    np.testing.assert_allclose(
        np.asarray(found, np.float64), np.clip(expected, None, np.inf), rtol=3e-6, atol=5e-7 * scale
    )


def finite(value: Callable[[], float]) -> float:
    try:
        number = value()
    except OverflowError:
        return math.inf
    return number if number < float(np.finfo(np.float32).max) else math.inf
