"""All decays with their references, computed with exact quotients."""

import math

import numpy as np
import reference

import jstep

LAST = 2**31 - 1
EDGES = [
    0, 1, 2, 9, 10, 11, 99, 100, 101, 2**24 - 1, 2**24, 2**24 + 1, 2**24 + 3, 2**30, LAST - 1, LAST,
]  # fmt: skip

# Name → function, in jstep and in the reference, and its arguments after decay_steps.
CASES = {
    "exponential": ("exponential_decay", 0.5),
    "exponential-staircase": ("exponential_decay", 0.96, True),
    "exponential-growing": ("exponential_decay", 1.5),
    "natural_exp": ("natural_exp_decay", 0.3),
    "natural_exp-staircase": ("natural_exp_decay", 0.3, True),
    "inverse_time": ("inverse_time_decay", 0.5),
    "inverse_time-staircase": ("inverse_time_decay", 0.5, True),
    "polynomial": ("polynomial_decay",),
    "polynomial-square": ("polynomial_decay", 0.01, 2.0),
    "polynomial-root": ("polynomial_decay", 0.01, 0.5),
    "polynomial-cycle": ("polynomial_decay", 0.01, 1.0, True),
    "cosine": ("cosine_decay",),
    "cosine-alpha": ("cosine_decay", 0.2),
    "cosine_restarts": ("cosine_decay_restarts",),
    "cosine_restarts-equal": ("cosine_decay_restarts", 1.0, 1.0, 0.1),
    "cosine_restarts-lower": ("cosine_decay_restarts", 1.5, 0.8, 0.1),
    "linear_cosine": ("linear_cosine_decay",),
    "linear_cosine-periods": ("linear_cosine_decay", 3, 0.1, 0.01),
}


def _pair(function, *more):
    """Return the schedule by decay_steps, and the reference by step and decay_steps."""
    ours, expected = getattr(jstep, function), getattr(reference, function)
    return lambda d: ours(0.1, d, *more), lambda n, d: expected(n, 0.1, d, *more)


DECAYS = {name: _pair(*case) for name, case in CASES.items()}


def close(found, expected, scale=0.1, rtol=3e-6):
    """Compare up to float32 rounding: relative error for powers, absolute error for differences."""
    np.testing.assert_allclose(
        np.asarray(found, np.float64), np.clip(expected, None, np.inf), rtol=rtol, atol=5e-7 * scale
    )


def finite(value):
    try:
        number = value()
    except OverflowError:
        return math.inf
    return number if number < float(np.finfo(np.float32).max) else math.inf
