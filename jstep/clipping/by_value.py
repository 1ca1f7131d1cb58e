"""Clipping by value."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jstep.clipping.parts import number
from jstep.core import trees
from jstep.core.indexed_slices import IndexedSlices, combined, is_slices, within
from jstep.core.types import Array, Number


def clip_by_value(t: Any, min: Number | Array, max: Number | Array) -> Any:
    """min(max(t, min), max) for each element.

    Args:
        t: An array or a tree of arrays.
        min: The smallest value, a scalar or an array that broadcasts to each leaf.
        max: The largest value, likewise.

    Returns:
        The same tree, dtypes kept. A NaN stays a NaN.

    Raises:
        ValueError: `min` > `max`.

    Example:
        >>> import jax.numpy as jnp, jstep
        >>> print(jstep.clip_by_value(jnp.array([-3.0, 0.5, 3.0]), -1, 1))
        [-1.   0.5  1. ]

    Source: `tf.clip_by_value`.
    """
    low, high = _bound("min", min), _bound("max", max)
    if low is not None and high is not None and np.any(low > high):
        raise ValueError(f"min={min!r} is larger than max={max!r}")

    def clip(x: Array) -> Array:
        return jnp.clip(x, jnp.asarray(min).astype(x.dtype), jnp.asarray(max).astype(x.dtype))

    def leaf(keys: Any, x: Any) -> Any:
        path = trees.path_str(keys)
        if trees.is_none(x):
            return x
        if isinstance(x, IndexedSlices):
            rows = combined(x, path)
            values = clip(rows.values.astype(jnp.result_type(x.values)))
            return within(IndexedSlices(values, rows.indices, x.dense_shape))
        return clip(number(x, path, "clip_by_value"))

    return jax.tree_util.tree_map_with_path(leaf, t, is_leaf=is_slices)


def _bound(name: str, value: Any) -> Any:
    """A bound on the host, None where it is traced."""
    if isinstance(value, bool | str) or not (isinstance(value, int | float) or trees.is_array(value)):
        raise TypeError(f"{name}={value!r}: must be a number or an array, got {type(value).__name__}")
    number = trees.concrete(value)
    if number is not None and np.any(np.isnan(number)):
        raise ValueError(f"{name}={value!r}: must be a number")
    return number
