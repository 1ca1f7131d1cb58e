"""Errors for invalid sparse gradients, clipping, averages and schedules."""

import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from bad_input import PARAMS, Case, adam, check, create, rows, sparse

import jstep


def with_norm(norm: Any) -> Any:
    return jstep.clip_by_global_norm({"a": jnp.ones(2)}, 1.0, use_norm=norm)


CASES: dict[str, Case] = {
    # Sparse gradients.
    "rows of a float index": (lambda: sparse(rows(indices=(0.0, 1.0))), TypeError, ("'table'", "integers", "float32")),
    "rows out of range": (lambda: sparse(rows(indices=(0, 4))), ValueError, ("'table'", "4", "4 rows")),
    "rows negative": (lambda: sparse(rows(indices=(-1, 0))), ValueError, ("'table'", "-1")),
    "rows of another width": (lambda: sparse(rows(values=(2, 3))), ValueError, ("'table'", "(2, 1)", "(2, 3)")),
    "rows fewer than indices": (lambda: sparse(rows(values=(1, 1))), ValueError, ("'table'", "(2, 1)", "(1, 1)")),
    "rows of another table": (lambda: sparse(rows(shape=(5, 1))), ValueError, ("'table'", "(5, 1)", "(4, 1)")),
    "rows of integers": (
        lambda: sparse(jstep.IndexedSlices(jnp.ones((1, 1), jnp.int32), jnp.array([0]), (4, 1))),
        TypeError,
        ("'table'", "int32"),
    ),
    "rows of a matrix of indices": (lambda: sparse(rows(indices=[[0, 1]])), ValueError, ("'table'", "(1, 2)")),
    # gradients().
    "gradients of integers": (lambda: jstep.gradients(lambda x: x, jnp.arange(3)), TypeError, ("xs", "int32")),
    "gradients to integers": (
        lambda: jstep.gradients(lambda x: x.astype(jnp.int32), jnp.ones(3)),
        TypeError,
        ("fn", "int32"),
    ),
    "grad_ys of another structure": (
        lambda: jstep.gradients(lambda x: (x, x), jnp.ones(2), grad_ys=jnp.ones(2)),
        ValueError,
        ("grad_ys",),
    ),
    "grad_ys of another shape": (
        lambda: jstep.gradients(lambda x: {"a": x}, jnp.ones(2), grad_ys={"a": jnp.ones(3)}),
        ValueError,
        ("grad_ys", "'a'", "(3,)", "(2,)"),
    ),
    # Clipping.
    "clip_by_norm zero": (lambda: jstep.clip_by_norm(jnp.ones(2), 0.0), ValueError, ("clip_norm", "0")),
    "clip_by_norm negative": (lambda: jstep.clip_by_norm(jnp.ones(2), -1), ValueError, ("clip_norm", "-1")),
    "clip_by_norm nan": (lambda: jstep.clip_by_norm(jnp.ones(2), np.nan), ValueError, ("clip_norm", "nan")),
    "clip_by_norm str": (lambda: jstep.clip_by_norm(jnp.ones(2), "1"), TypeError, ("clip_norm", "'1'")),
    "clip_by_norm vector": (lambda: jstep.clip_by_norm(jnp.ones(2), jnp.ones(2)), ValueError, ("clip_norm", "(2,)")),
    "clip_by_norm of integers": (
        lambda: jstep.clip_by_norm({"a": {"b": jnp.arange(2)}}, 1.0),
        TypeError,
        ("'a/b'", "int32"),
    ),
    "clip_by_average_norm": (lambda: jstep.clip_by_average_norm(jnp.ones(2), 0), ValueError, ("clip_norm", "0")),
    "clip_by_average_norm of integers": (
        lambda: jstep.clip_by_average_norm({"a": jnp.arange(2)}, 1.0),
        TypeError,
        ("'a'", "int32"),
    ),
    "clip_by_global_norm": (lambda: jstep.clip_by_global_norm([jnp.ones(2)], -3), ValueError, ("clip_norm", "-3")),
    "clip_by_global_norm zero": (lambda: jstep.clip_by_global_norm([jnp.ones(2)], 0), ValueError, ("clip_norm", "0")),
    "clip_by_global_norm of integers": (
        lambda: jstep.clip_by_global_norm({"a": jnp.arange(2)}, 1.0),
        TypeError,
        ("'a'", "int32"),
    ),
    "clip_by_global_norm of a function": (
        lambda: jstep.clip_by_norm({"a": {"f": jnp.tanh}}, 1.0),
        TypeError,
        ("'a/f'", "not an array"),
    ),
    "clip_by_value reversed": (lambda: jstep.clip_by_value(jnp.ones(2), 2, 1), ValueError, ("min", "2", "max", "1")),
    "clip_by_value str": (lambda: jstep.clip_by_value(jnp.ones(2), "a", 1), TypeError, ("min", "'a'")),
    "clip_by_value None": (lambda: jstep.clip_by_value(jnp.ones(2), None, 1), TypeError, ("min", "None")),
    "clip_by_value nan": (lambda: jstep.clip_by_value(jnp.ones(2), np.nan, 1), ValueError, ("min", "nan")),
    "clip_by_value of a function": (lambda: jstep.clip_by_value({"a": {"f": jnp.tanh}}, -1, 1), TypeError, ("'a/f'",)),
    "global_norm of a string": (lambda: jstep.global_norm({"a": {"s": "x"}}), TypeError, ("'a/s'",)),
    "use_norm a vector": (lambda: with_norm(jnp.ones(2)), ValueError, ("use_norm", "(2,)")),
    "use_norm negative": (lambda: with_norm(-1.0), ValueError, ("use_norm", "-1")),
    "use_norm str": (lambda: with_norm("1"), TypeError, ("use_norm", "'1'")),
    "axes beyond the rank": (
        lambda: jstep.clip_by_norm({"kernel": jnp.ones((2, 2)), "bias": jnp.ones(2)}, 1.0, axes=1),
        ValueError,
        ("axes", "'bias'"),
    ),
    # Averages.
    "ema decay too large": (lambda: jstep.ExponentialMovingAverage(1.1), ValueError, ("decay", "1.1")),
    "ema decay negative": (lambda: jstep.ExponentialMovingAverage(-0.1), ValueError, ("decay", "-0.1")),
    "ema decay str": (lambda: jstep.ExponentialMovingAverage("0.9"), TypeError, ("decay", "'0.9'")),
    "ema num_updates a number": (
        lambda: jstep.ExponentialMovingAverage(0.9, num_updates=100),
        TypeError,
        ("num_updates", "100", "apply"),
    ),
    "ema name": (lambda: jstep.ExponentialMovingAverage(0.9, name=""), ValueError, ("name", "''")),
    "ema without num_updates": (
        lambda: jstep.ExponentialMovingAverage(0.9, num_updates=True).apply({"w": jnp.ones(1)}, {"w": jnp.ones(1)}),
        ValueError,
        ("num_updates", "None", "global_step"),
    ),
    "ema num_updates negative": (
        lambda: jstep.ExponentialMovingAverage(0.9, num_updates=True).apply(
            {"w": jnp.ones(1)}, {"w": jnp.ones(1)}, num_updates=-1
        ),
        ValueError,
        ("num_updates", "-1"),
    ),
    "ema num_updates negative where it is not needed": (
        lambda: jstep.ExponentialMovingAverage(0.9).apply({"w": jnp.ones(1)}, {"w": jnp.ones(1)}, num_updates=-3),
        ValueError,
        ("num_updates", "-3"),
    ),
    "ema of another tree": (
        lambda: jstep.ExponentialMovingAverage(0.9).apply({"w": jnp.ones(1)}, {"w": jnp.ones(1), "b": jnp.ones(1)}),
        ValueError,
        ("averages", "'b'"),
    ),
    "with_moving_average of a number": (
        lambda: jstep.with_moving_average(adam, 0.9),
        TypeError,
        ("ema", "0.9", "ExponentialMovingAverage"),
    ),
    "averaged_params without averages": (
        lambda: jstep.averaged_params(create(PARAMS, adam)),
        ValueError,
        ("'ExponentialMovingAverage'", "with_moving_average"),
    ),
    "averaged_params with a typo": (
        lambda: jstep.averaged_params(
            create(PARAMS, jstep.with_moving_average(adam, jstep.ExponentialMovingAverage(0.9, name="avg"))), "avgg"
        ),
        ValueError,
        ("'avgg'", "'avg'"),
    ),
    # Schedules.
    "exponential_decay rate": (lambda: jstep.exponential_decay(0.1, 10, -0.5), ValueError, ("decay_rate", "-0.5")),
    "inverse_time_decay rate": (lambda: jstep.inverse_time_decay(0.1, 10, -0.5), ValueError, ("decay_rate", "-0.5")),
    "polynomial_decay power": (lambda: jstep.polynomial_decay(0.1, 10, power=-1), ValueError, ("power", "-1")),
    "schedule of a str": (lambda: jstep.exponential_decay("0.1", 10, 0.5), TypeError, ("learning_rate", "'0.1'")),
    "schedule of a vector": (lambda: jstep.cosine_decay(jnp.ones(2), 10), ValueError, ("learning_rate", "(2,)")),
    "schedule of nan": (lambda: jstep.constant(float("nan")), ValueError, ("value", "nan")),
    "restarts t_mul": (lambda: jstep.cosine_decay_restarts(0.1, 10, t_mul=0.5), ValueError, ("t_mul", "0.5")),
    "restarts m_mul": (lambda: jstep.cosine_decay_restarts(0.1, 10, m_mul=-1), ValueError, ("m_mul", "-1")),
    "piecewise values": (
        lambda: jstep.piecewise_constant([10, 20], [1.0, 0.5]),
        ValueError,
        ("values", "2", "boundaries"),
    ),
    "boundaries a number": (lambda: jstep.piecewise_constant(10, [1.0, 2.0]), TypeError, ("boundaries", "10")),
    "piecewise order": (
        lambda: jstep.piecewise_constant([20, 10], [1.0, 0.5, 0.1]),
        ValueError,
        ("boundaries", "20", "10", "increase"),
    ),
    "piecewise equal": (lambda: jstep.piecewise_constant([10, 10], [1.0, 0.5, 0.1]), ValueError, ("boundaries",)),
    "piecewise nan": (lambda: jstep.piecewise_constant([np.nan], [1.0, 0.5]), ValueError, ("boundaries", "nan")),
    "piecewise a str": (lambda: jstep.piecewise_constant([10], [1.0, "x"]), TypeError, ("values[1]", "'x'")),
    "warmup negative": (lambda: jstep.linear_warmup(0.1, -1), ValueError, ("warmup_steps", "-1")),
    "warmup str": (lambda: jstep.linear_warmup(0.1, "5"), TypeError, ("warmup_steps", "'5'")),
    "shift negative": (lambda: jstep.shift(0.1, -1), ValueError, ("start_step", "-1")),
    "shift float": (lambda: jstep.shift(0.1, 1.5), TypeError, ("start_step", "1.5")),
    "join numbers": (lambda: jstep.join([0.1, 0.2], []), ValueError, ("schedules", "boundaries")),
    "join order": (lambda: jstep.join([0.1, 0.2, 0.3], [5, 5]), ValueError, ("boundaries", "5")),
    "join float": (lambda: jstep.join([0.1, 0.2], [5.5]), TypeError, ("boundaries[0]", "5.5")),
    "join at zero": (lambda: jstep.join([0.1, 0.2], [0]), ValueError, ("boundaries[0]", "0")),
    "join of a str": (lambda: jstep.join([0.1, "x"], [5]), TypeError, ("schedules[1]", "'x'")),
}

WITH_DECAY_STEPS: dict[str, Callable[[Any], Any]] = {
    "decay_steps of exponential_decay": lambda d: jstep.exponential_decay(0.1, d, 0.5),
    "decay_steps of natural_exp_decay": lambda d: jstep.natural_exp_decay(0.1, d, 0.5),
    "decay_steps of inverse_time_decay": lambda d: jstep.inverse_time_decay(0.1, d, 0.5),
    "decay_steps of polynomial_decay": lambda d: jstep.polynomial_decay(0.1, d),
    "decay_steps of cosine_decay": lambda d: jstep.cosine_decay(0.1, d),
    "first_decay_steps of cosine_decay_restarts": lambda d: jstep.cosine_decay_restarts(0.1, d),
    "decay_steps of linear_cosine_decay": lambda d: jstep.linear_cosine_decay(0.1, d),
}
BAD_PERIODS = [(0, ValueError), (-1, ValueError), (-0.5, ValueError), (np.nan, ValueError), (np.inf, ValueError)]
BAD_PERIODS += [("10", TypeError), (None, TypeError), (True, TypeError), ([10], TypeError)]
for label, make in WITH_DECAY_STEPS.items():
    for bad, kind in BAD_PERIODS:
        CASES[f"{label}: {bad}"] = (functools.partial(make, bad), kind, (label.split()[0], str(bad)))


@pytest.mark.parametrize("name", CASES)
def test_invalid_arguments_raise(name: str) -> None:
    check(CASES[name])
