"""Totals as arrays: counts are uint32, exact below 2³² − 1, and sums of weights floats of their precision."""

from typing import Any

import jax.numpy as jnp
import numpy as np

from jstep.core.meshes import internal_transfers
from jstep.core.trees import Array

FULL = 2**32 - 1


def per_element(condition: Array, weights: Array | None) -> Array:
    """The total of each element: its weight, or 1 without weights, if it is true; otherwise 0."""
    if weights is None or weights.dtype == jnp.bool_:
        return (condition if weights is None else condition & weights).astype(jnp.uint32)
    return jnp.where(condition, weights, jnp.zeros_like(weights))


def sum_where(condition: Array, weights: Array | None = None) -> Array:
    totals = per_element(condition, weights)
    return jnp.sum(totals, dtype=totals.dtype)


def in_one_dtype(first: Array, second: Array) -> tuple[Array, Array]:
    dtype = second.dtype if first.dtype == jnp.uint32 else first.dtype
    return first.astype(dtype), second.astype(dtype)


def add_totals(first: Array, second: Array) -> Array:
    first, second = in_one_dtype(first, second)
    total = first + second
    return jnp.where(total < first, jnp.full_like(total, FULL), total) if total.dtype == jnp.uint32 else total


def read_total(total: Any) -> np.ndarray[Any, Any]:
    """Return totals as integers or float64; NaN for counts that are too large."""
    with internal_transfers():
        array = np.asarray(total)
    if array.dtype == np.uint32 and (array < FULL).all():
        return array.astype(np.int64)
    return np.where(array == FULL, np.nan, array) if array.dtype == np.uint32 else array.astype(np.float64)
