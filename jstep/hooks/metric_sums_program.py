"""The compiled part of `metric_sums`: one call adds the metrics of some steps to the intervals of all subscribers.

Each row of the array belongs to one subscriber. For M metrics it holds M sums, M corrections (the rounding errors), M
counts, and the watched columns. Each sum is stored in two floats, so that a mean is as accurate as one of float64.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jstep.hooks.skipped_updates import is_bad

WATCHED = 7
SEEN, BAD, VALUE, GRADIENT, SKIPS, LIMIT, TOO_MANY = range(-WATCHED, 0)
"""Columns from the end: the number of steps; the first bad step, counted from 0, or −1, and its loss; the first step
that applied a gradient whose norm is not finite, or −1; the current number of consecutive skipped steps; its limit; the
step at which the limit was reached, or −1."""
_FIRSTS = (BAD, GRADIENT, TOO_MANY)


def empty(num_metrics: int, limits: list[float], dtype: Any) -> np.ndarray[Any, Any]:
    """The array before the first step, with a row for each limit of skipped steps."""
    rows = np.zeros((len(limits), 3 * num_metrics + WATCHED), dtype)
    rows[:, _FIRSTS] = -1
    rows[:, LIMIT] = limits
    return rows


@functools.cache
def program(loss: int | None, skip: int | None, gradient: int | None, stacked: bool) -> Callable[..., Any]:
    """Compile `add(sums, calls, plain, count) -> sums`, which donates the sums.

    `calls` are the values of some calls; `plain` are numbers of the host, as two floats, [2, steps, metrics], or None.
    Only the first `count` steps count; the others are padding.

    Args:
        loss: The index of the loss among all values; −1 for a loss that is not accumulated and comes after the other
            values of each call; None without a loss.
        skip: The index of the metric that is 1 if an update was skipped, or None.
        gradient: The index of the norm of the gradients, or None.
        stacked: Whether the values have a leading axis of steps.
    """

    def add(sums: Any, calls: list[list[Any]], plain: Any, count: Any) -> Any:
        high, low, known = _columns([call[:-1] for call in calls] if loss == -1 else calls, plain, sums.dtype, stacked)
        steps, m = high.shape
        counts = jnp.arange(steps, dtype=np.int32) < count
        skipped = high[:, skip] == 1 if skip is not None else jnp.zeros(steps, bool)
        used = known & counts[:, None] & (jnp.isfinite(high) | ~skipped[:, None])
        x, error = _total(jnp.where(used, high, 0), jnp.where(used, low, 0))
        total, lost = _two_sum(sums[:, :m], jnp.broadcast_to(x[None], (len(sums), m)))
        finite, value = jnp.ones(steps, bool), jnp.zeros(steps, sums.dtype)
        if loss == -1:
            finite, value = _losses(calls, stacked)
        elif loss is not None:
            finite, value = jnp.isfinite(high[:, loss]) | ~known[:, loss], high[:, loss]
        bad_gradient = jnp.zeros(steps, bool)
        if gradient is not None:
            bad_gradient = is_bad(jnp.isfinite(high[:, gradient]) | ~known[:, gradient], skipped)
        watched = _watch(
            sums[:, -WATCHED:],
            is_bad(finite, skipped) & counts,
            value.astype(sums.dtype),
            skipped,
            bad_gradient & counts,
            count,
        )
        parts = [
            total,
            sums[:, m : 2 * m] + (lost + error[None]),
            sums[:, 2 * m : 3 * m] + jnp.sum(used, axis=0).astype(sums.dtype)[None],
            watched,
        ]
        return jnp.concatenate(parts, axis=1)

    return jax.jit(add, donate_argnums=0)


@functools.partial(jax.jit, donate_argnums=0)
def take(sums: Any, number: Any) -> tuple[Any, Any]:
    """Return one row, and the array with that row reset."""
    watched = sums[:, -WATCHED:]
    fresh = [jnp.full_like(watched[:, column], -1 if column in _FIRSTS else 0) for column in range(-WATCHED, 0)]
    fresh[SKIPS], fresh[LIMIT] = watched[:, SKIPS], watched[:, LIMIT]
    begun = jnp.concatenate([jnp.zeros_like(sums[:, :-WATCHED]), jnp.stack(fresh, axis=1)], axis=1)
    here = jnp.arange(len(sums), dtype=np.int32) == number
    return sums[number], jnp.where(here[:, None], begun, sums)


@functools.partial(jax.jit, donate_argnums=0)
def with_skips(sums: Any, skips: Any) -> Any:
    """Set the counts of consecutive skipped steps."""
    return sums.at[:, SKIPS].set(skips.astype(sums.dtype))


def _columns(calls: list[list[Any]], plain: Any, dtype: Any, stacked: bool) -> tuple[Any, Any, Any]:
    """All values, [steps, metrics], as two floats each, and which ones are scalars: a metric may change its shape."""
    steps = 1 if not stacked else max((len(value) for value in calls[0] if value.ndim), default=1)
    columns = []
    for call in zip(*calls, strict=True):
        pairs = [_parts(value.reshape(steps), dtype) if value.size == steps else None for value in call]
        nothing = (jnp.zeros(steps, dtype), jnp.zeros(steps, dtype))
        known = [jnp.full(steps, pair is not None) for pair in pairs]
        whole = [pair or nothing for pair in pairs]
        columns.append((*(jnp.concatenate(half) for half in zip(*whole, strict=True)), jnp.concatenate(known)))
    if plain is not None:
        halves = plain.astype(dtype)
        columns += [(halves[0, :, i], halves[1, :, i], jnp.ones(halves.shape[1], bool)) for i in range(halves.shape[2])]
    if not columns:
        rows = steps * len(calls)
        return jnp.zeros((rows, 0), dtype), jnp.zeros((rows, 0), dtype), jnp.zeros((rows, 0), bool)
    together = [jnp.stack(parts, axis=1) for parts in zip(*columns, strict=True)]
    return together[0], together[1], together[2]


def _losses(calls: list[list[Any]], stacked: bool) -> tuple[Any, Any]:
    """For losses of several numbers per step: whether all are finite, and one that is not."""
    finite, value = [], []
    for call in calls:
        rows = call[-1].reshape(len(call[-1]) if stacked else 1, -1)
        finite.append(jnp.isfinite(rows).all(axis=1))
        value.append(jnp.real(jnp.where(jnp.isfinite(rows), 0, rows).sum(axis=1)))
    return jnp.concatenate(finite), jnp.concatenate(value)


def _parts(x: Any, dtype: Any) -> tuple[Any, Any]:
    """Split a value into a sum of two floats, because one cannot represent a large integer."""
    if jnp.issubdtype(x.dtype, jnp.integer) and x.dtype.itemsize >= jnp.dtype(dtype).itemsize:
        low = x & 0xFFF
        return (x - low).astype(dtype), low.astype(dtype)
    return x.astype(dtype), jnp.zeros(x.shape, dtype)


def _two_sum(a: Any, b: Any) -> tuple[Any, Any]:
    """The rounded sum a + b, and its rounding error (Knuth)."""
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


def _watch(watched: Any, bad: Any, value: Any, skipped: Any, bad_gradient: Any, count: Any) -> Any:
    """The watched columns after the first `count` steps."""
    dtype, steps = watched.dtype, jnp.arange(len(bad), dtype=np.int32)
    column = {name: watched[:, name] for name in range(-WATCHED, 0)}
    first = column[SEEN] + jnp.argmax(bad_gradient).astype(dtype)
    at = jnp.argmax(bad)
    is_first = (column[BAD] < 0) & bad.any()
    last_made = jax.lax.cummax(jnp.where(skipped, jnp.int32(-1), steps))
    since = (steps - last_made).astype(dtype)
    in_a_row = jnp.where((last_made < 0)[None], column[SKIPS][:, None] + since[None], since[None])
    over = (in_a_row >= column[LIMIT][:, None]) & (steps < count)[None]
    is_over = (column[TOO_MANY] < 0) & over.any(axis=1)
    new = {
        SEEN: column[SEEN] + count.astype(dtype),
        BAD: jnp.where(is_first, column[SEEN] + at.astype(dtype), column[BAD]),
        VALUE: jnp.where(is_first, value[at], column[VALUE]),
        GRADIENT: jnp.where((column[GRADIENT] < 0) & bad_gradient.any(), first, column[GRADIENT]),
        SKIPS: jnp.take(in_a_row, count - 1, axis=1),
        LIMIT: column[LIMIT],
        TOO_MANY: jnp.where(is_over, column[SEEN] + jnp.argmax(over, axis=1).astype(dtype), column[TOO_MANY]),
    }
    return jnp.stack([new[name] for name in range(-WATCHED, 0)], axis=1)
