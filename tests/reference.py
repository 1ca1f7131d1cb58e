"""Reference implementations of optimizers, schedules and averages in NumPy float64, from their
published equations.

They can be compared with the papers line by line and share no code with the package: no jax, no
jstep. A rule is `rule(g, p, slots, h, t) -> (new p, new slots)` for one array; h holds the current
hyperparameters, t is the age.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction

import numpy as np

Slots = dict[str, np.ndarray]
Rule = Callable[[np.ndarray, np.ndarray, Slots, Mapping[str, float], int], tuple[np.ndarray, Slots]]


def gradient_descent(g, p, s, h, t):
    return p - h["learning_rate"] * g, {}


def momentum(g, p, s, h, t):
    a = h["momentum"] * s["momentum"] + g
    return p - h["learning_rate"] * a, {"momentum": a}


def nesterov(g, p, s, h, t):
    a = h["momentum"] * s["momentum"] + g
    return p - h["learning_rate"] * (g + h["momentum"] * a), {"momentum": a}


def adagrad(g, p, s, h, t):
    a = s["accumulator"] + g**2
    return p - h["learning_rate"] * g / np.sqrt(a), {"accumulator": a}


def adam(g, p, s, h, t):
    b1, b2 = h["beta1"], h["beta2"]
    m = b1 * s["m"] + (1 - b1) * g
    v = b2 * s["v"] + (1 - b2) * g**2
    rate = h["learning_rate"] * math.sqrt(1 - b2**t) / (1 - b1**t)
    return p - rate * m / (np.sqrt(v) + h["epsilon"]), {"m": m, "v": v}


def rmsprop(g, p, s, h, t):
    r = h["decay"] * s["rms"] + (1 - h["decay"]) * g**2
    mom = h["momentum"] * s["momentum"] + h["learning_rate"] * g / np.sqrt(r + h["epsilon"])
    return p - mom, {"rms": r, "momentum": mom}


def rmsprop_centered(g, p, s, h, t):
    r = h["decay"] * s["rms"] + (1 - h["decay"]) * g**2
    mg = h["decay"] * s["mg"] + (1 - h["decay"]) * g
    mom = h["momentum"] * s["momentum"] + h["learning_rate"] * g / np.sqrt(r - mg**2 + h["epsilon"])
    return p - mom, {"rms": r, "momentum": mom, "mg": mg}


def ftrl(g, p, s, h, t):
    lr, power = h["learning_rate"], h["learning_rate_power"]
    l1, l2 = h["l1_regularization_strength"], h["l2_regularization_strength"]
    a = s["accum"]
    new_a = a + g**2
    shrunk = g + 2 * h["l2_shrinkage_regularization_strength"] * p
    linear = s["linear"] + shrunk - (new_a**-power - a**-power) / lr * p
    quadratic = new_a**-power / lr + 2 * (l2 + h["beta"] / (2 * lr))
    inside = np.abs(linear) <= l1
    safe = np.where(inside, 1.0, quadratic)
    return np.where(inside, 0.0, (np.sign(linear) * l1 - linear) / safe), {
        "accum": new_a,
        "linear": linear,
    }


def values(hyper, n):
    """Return the hyperparameters at step n; a sequence holds the values of a schedule."""
    return {
        k: float(v[n]) if isinstance(v, Sequence | np.ndarray) else float(v)
        for k, v in hyper.items()
    }


def trajectory(rule, initial, params, gradients, hyper, *, first_step=0, start_step=None):
    """Return the parameters after each step from `first_step` on, with slots of `start_step`, and
    the last slots."""
    start = first_step if start_step is None else start_step
    p = np.asarray(params, np.float64)
    slots = {name: np.full(p.shape, value, np.float64) for name, value in initial.items()}
    path = []
    for i, g in enumerate(gradients):
        n = first_step + i
        p, slots = rule(np.asarray(g, np.float64), p, slots, values(hyper, n), n + 1 - start)
        path.append(p)
    return path, slots


# Schedules: exact quotients by Fraction, the rest in double precision.


def quotient(step, decay_steps):
    """Return the integer and the fractional part of step / decay_steps, computed exactly."""
    exact = Fraction(step) / Fraction(decay_steps)
    whole = math.floor(exact)
    return whole, float(exact - whole)


def exponential_decay(step, lr, decay_steps, rate, staircase=False):
    whole, rest = quotient(step, decay_steps)
    return lr * rate ** (whole if staircase else whole + rest)


def natural_exp_decay(step, lr, decay_steps, rate, staircase=False):
    whole, rest = quotient(step, decay_steps)
    return lr * math.exp(-rate * (whole if staircase else whole + rest))


def inverse_time_decay(step, lr, decay_steps, rate, staircase=False):
    whole, rest = quotient(step, decay_steps)
    return lr / (1 + rate * (whole if staircase else whole + rest))


def polynomial_decay(step, lr, decay_steps, end=0.0001, power=1.0, cycle=False):
    length = Fraction(decay_steps)
    if cycle:
        length *= max(1, math.ceil(Fraction(step) / length))
    passed = min(Fraction(step), length)
    return (lr - end) * float(1 - passed / length) ** power + end


def cosine_decay(step, lr, decay_steps, alpha=0.0):
    x = min(Fraction(step) / Fraction(decay_steps), Fraction(1))
    return lr * ((1 - alpha) * 0.5 * (1 + math.cos(math.pi * float(x))) + alpha)


def cosine_decay_restarts(step, lr, first, t_mul=2.0, m_mul=1.0, alpha=0.0):
    begin, length, i = Fraction(0), Fraction(first), 0
    if t_mul == 1:
        i = math.floor(Fraction(step) / length)
        begin = i * length
    else:
        while begin + length <= step:
            begin, length, i = begin + length, length * Fraction(t_mul), i + 1
    x = float((step - begin) / length)
    return lr * ((1 - alpha) * m_mul**i * 0.5 * (1 + math.cos(math.pi * x)) + alpha)


def linear_cosine_decay(step, lr, decay_steps, num_periods=0.5, alpha=0.0, beta=0.001):
    x = float(min(Fraction(step) / Fraction(decay_steps), Fraction(1)))
    return lr * ((alpha + 1 - x) * 0.5 * (1 + math.cos(2 * math.pi * num_periods * x)) + beta)


def piecewise_constant(step, boundaries, values):
    for boundary, value in zip(boundaries, values, strict=False):
        if step <= boundary:
            return value
    return values[-1]
