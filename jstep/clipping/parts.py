"""What the ways of clipping share: walking a tree, norms, checks."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jstep.core import trees
from jstep.core.indexed_slices import IndexedSlices, combined, is_slices, within
from jstep.core.types import Array


def map_leaves(function: Callable[[Array], Array], tree: Any, name: str) -> Any:
    """Maps over the floating leaves of a tree; of an `IndexedSlices` over its combined rows."""

    def leaf(keys: Any, x: Any) -> Any:
        path = trees.path_str(keys)
        if isinstance(x, IndexedSlices):
            rows = combined(x, path)
            clipped = function(rows.values).astype(jnp.result_type(x.values))
            return within(IndexedSlices(clipped, rows.indices, x.dense_shape))
        return x if trees.is_none(x) else function(floating(x, path, name))

    return jax.tree_util.tree_map_with_path(leaf, tree, is_leaf=is_slices)


def floating(x: Any, path: str, name: str) -> Array:
    """A leaf as a floating-point array; anything else is refused by its path."""
    array = number(float(x) if isinstance(x, int) and not isinstance(x, bool) else x, path, name)
    if not trees.is_floating(array.dtype):
        raise TypeError(
            f"{name}: the leaf at {trees.quoted(path)} has dtype {array.dtype}; only floating-point arrays can be "
            "scaled. Put None in its place, or cast it."
        )
    return array


def check_clip_norm(name: str, clip_norm: Any) -> Any:
    """A clip norm: a scalar > 0, concrete or traced.

    Raises:
        TypeError: It is no number.
        ValueError: It is no scalar, or not positive.
    """
    if isinstance(clip_norm, bool | str) or not (isinstance(clip_norm, int | float) or trees.is_array(clip_norm)):
        raise TypeError(f"{name}={clip_norm!r}: must be a positive number, got {type(clip_norm).__name__}")
    if np.ndim(clip_norm):
        raise ValueError(f"{name}: must be a scalar, got shape {np.shape(clip_norm)}")
    value = trees.concrete(clip_norm)
    if value is not None and not value > 0:
        raise ValueError(f"{name}={value}: must be > 0")
    return clip_norm


def number(x: Any, path: str, name: str) -> Array:
    """A leaf as an array; anything else is refused by its path."""
    if isinstance(x, bool | str) or not (trees.is_array(x) or isinstance(x, int | float)):
        raise TypeError(f"{name}: the leaf at {trees.quoted(path)} is {type(x).__name__}, which is no array")
    return jnp.asarray(x)


def sum_of_squares(x: Array, axes: Any = None) -> Array:
    """The sum of squares, in float32 at least."""
    x = x.astype(trees.compute_dtype(x.dtype))
    return jnp.sum(jnp.square(x), axis=axes, keepdims=axes is not None)


def root(square: Array) -> Array:
    """The square root, whose derivative at 0 is 0."""
    # √ has an infinite derivative at 0, which would turn the derivative of a zero gradient into NaN.
    positive = square > 0
    return jnp.where(positive, jnp.sqrt(jnp.where(positive, square, jnp.ones_like(square))), square)


def scaled(x: Array, norm: Array, clip_norm: Any) -> Array:
    """The product x · clip_norm / norm where norm > clip_norm, exactly x elsewhere."""
    return (x.astype(norm.dtype) * scale(norm, clip_norm)).astype(x.dtype)


def scale(norm: Array, clip_norm: Any) -> Array:
    """The factor clip_norm / norm where norm > clip_norm, else 1."""
    limit = jnp.asarray(clip_norm).astype(norm.dtype)
    over = norm > limit
    return jnp.where(over, limit / jnp.where(over, norm, jnp.ones_like(norm)), jnp.ones_like(norm))
