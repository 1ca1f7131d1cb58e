"""The compiled part of `sums`: one call adds the metrics of a call of the step to all intervals at once.

A row of the array belongs to one subscriber: for M metrics M sums, M corrections (what rounding took away), M counts,
then what it watches. Sums are kept in two floats, so that a mean is as good as one of float64.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jstep.hooks.skipped import are_bad

WATCHED = 6
SEEN, BAD, VALUE, SKIPS, LIMIT, TOO_MANY = range(-WATCHED, 0)
"""Columns from the end: the steps seen; the first bad step, counted from 0, or −1, and its loss; how many steps in a
row were skipped up to now; how many are too many; the step with which they were, or −1."""


def empty(num_metrics: int, limits: list[float], dtype: Any) -> np.ndarray[Any, Any]:
    """The array before the first step; a row for each limit of skipped steps."""
    rows = np.zeros((len(limits), 3 * num_metrics + WATCHED), dtype)
    rows[:, BAD] = rows[:, TOO_MANY] = -1
    rows[:, LIMIT] = limits
    return rows


@functools.cache
def program(loss: int | None, skip: int | None, stacked: bool) -> Callable[..., Any]:
    """`add(sums, values, loss_alone, plain) -> sums`, which donates the sums.

    Args:
        loss: The place of the loss among all values; −1 where it is `loss_alone`, None where there is none.
        skip: The place of the metric that is 1 where an update was skipped, or None.
        stacked: Whether the values have a leading axis of steps.
    """

    def add(sums: Any, values: list[Any], loss_alone: Any, plain: Any) -> Any:
        high, low = _columns(values, plain, sums.dtype, stacked)
        steps, m = high.shape
        skipped = high[:, skip] if skip is not None else jnp.zeros(steps, sums.dtype)
        used = jnp.isfinite(high) | (skipped[:, None] != 1)
        x, error = _total(jnp.where(used, high, 0), jnp.where(used, low, 0))
        total, lost = _two_sum(sums[:, :m], jnp.broadcast_to(x[None], (len(sums), m)))
        if loss is None:
            losses = jnp.zeros((steps, 1), sums.dtype)
        else:
            losses = high[:, loss, None] if loss >= 0 else _rows(loss_alone, steps)
        parts = [
            total,
            sums[:, m : 2 * m] + (lost + error[None]),
            sums[:, 2 * m : 3 * m] + jnp.sum(used, axis=0).astype(sums.dtype)[None],
            _watch(sums[:, -WATCHED:], losses, skipped),
        ]
        return jnp.concatenate(parts, axis=1)

    return jax.jit(add, donate_argnums=0)


@functools.partial(jax.jit, donate_argnums=0)
def take(sums: Any, number: Any) -> tuple[Any, Any]:
    """One row, and the array in which it begins from scratch."""
    watched = sums[:, -WATCHED:]
    fresh = [jnp.full_like(watched[:, column], -1 if column in (BAD, TOO_MANY) else 0) for column in range(-WATCHED, 0)]
    fresh[SKIPS], fresh[LIMIT] = watched[:, SKIPS], watched[:, LIMIT]
    begun = jnp.concatenate([jnp.zeros_like(sums[:, :-WATCHED]), jnp.stack(fresh, axis=1)], axis=1)
    here = jnp.arange(len(sums)) == number
    return sums[number], jnp.where(here[:, None], begun, sums)


@functools.partial(jax.jit, donate_argnums=0)
def with_skips(sums: Any, skips: Any) -> Any:
    """The array with other counts of steps in a row that were skipped."""
    return sums.at[:, SKIPS].set(skips.astype(sums.dtype))


def _columns(values: list[Any], plain: Any, dtype: Any, stacked: bool) -> tuple[Any, Any]:
    """All values, [steps, metrics], as two floats each."""
    pairs = [_parts(value if stacked else value[None], dtype) for value in values]
    high, low = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    if plain is not None:
        high += list(plain[0].astype(dtype).T)
        low += list(plain[1].astype(dtype).T)
    if not high:
        raise ValueError("no metric to add up")
    return jnp.stack(high, axis=1), jnp.stack(low, axis=1)


def _parts(x: Any, dtype: Any) -> tuple[Any, Any]:
    """A value as the sum of two floats: a large integer is not one."""
    if jnp.issubdtype(x.dtype, jnp.integer) and x.dtype.itemsize >= jnp.dtype(dtype).itemsize:
        low = x & 0xFFF
        return (x - low).astype(dtype), low.astype(dtype)
    return x.astype(dtype), jnp.zeros(x.shape, dtype)


def _two_sum(a: Any, b: Any) -> tuple[Any, Any]:
    """The rounded sum a + b, and what the rounding took away (Knuth)."""
    s = a + b
    of_b = s - a
    return s, (a - (s - of_b)) + (b - of_b)


def _total(high: Any, low: Any) -> tuple[Any, Any]:
    """The sum over the steps of a call, as two floats."""
    if len(high) == 1:
        return high[0], low[0]

    def both(a: Any, b: Any) -> tuple[Any, Any]:
        s, lost = _two_sum(a[0], b[0])
        return s, a[1] + b[1] + lost

    zero = jnp.zeros((), high.dtype)
    x, error = jax.lax.reduce((high, low), (zero, zero), both, (0,))
    return x, error


def _rows(losses: Any, steps: int) -> Any:
    return jnp.real(losses).reshape(steps, -1)


def _watch(watched: Any, losses: Any, skipped: Any) -> Any:
    """The watched columns after these steps."""
    dtype, steps = watched.dtype, len(losses)
    column = {name: watched[:, name] for name in range(-WATCHED, 0)}
    finite = jnp.isfinite(losses)
    bad = are_bad(finite.all(axis=1), skipped)
    at = jnp.argmax(bad)
    value = jnp.where(finite, 0, losses.astype(dtype)).sum(axis=1)[at]
    is_first = (column[BAD] < 0) & bad.any()
    steps_so_far = jnp.arange(steps, dtype=np.int32)
    last_made = jax.lax.cummax(jnp.where(skipped == 1, jnp.int32(-1), steps_so_far))
    since = (steps_so_far - last_made).astype(dtype)
    in_a_row = jnp.where((last_made < 0)[None], column[SKIPS][:, None] + since[None], since[None])
    over = in_a_row >= column[LIMIT][:, None]
    is_over = (column[TOO_MANY] < 0) & over.any(axis=1)
    new = {
        SEEN: column[SEEN] + steps,
        BAD: jnp.where(is_first, column[SEEN] + at.astype(dtype), column[BAD]),
        VALUE: jnp.where(is_first, value, column[VALUE]),
        SKIPS: in_a_row[:, -1],
        LIMIT: column[LIMIT],
        TOO_MANY: jnp.where(is_over, column[SEEN] + jnp.argmax(over, axis=1).astype(dtype), column[TOO_MANY]),
    }
    return jnp.stack([new[name] for name in range(-WATCHED, 0)], axis=1)
