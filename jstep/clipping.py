"""Clipping of arrays and trees: by value, by norm, by average norm, by global norm.

Everywhere None leaves are ignored, norms accumulate in float32 at least, dtypes stay, and the norm of
zeros is 0 with a finite derivative.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jstep import _tree
from jstep._typing import Array, Number
from jstep.indexed_slices import IndexedSlices, combined, is_slices, within


def _map(function: Callable[[Array], Array], tree: Any, name: str) -> Any:
    """Maps over the floating leaves of a tree; of an `IndexedSlices` over its combined rows."""

    def leaf(keys: Any, x: Any) -> Any:
        path = _tree.path_str(keys)
        if isinstance(x, IndexedSlices):
            rows = combined(x, path)
            clipped = function(rows.values).astype(jnp.result_type(x.values))
            return within(IndexedSlices(clipped, rows.indices, x.dense_shape))
        return x if _tree.is_none(x) else function(_floating(x, path, name))

    return jax.tree_util.tree_map_with_path(leaf, tree, is_leaf=is_slices)


def _floating(x: Any, path: str, name: str) -> Array:
    array = _number(float(x) if isinstance(x, int) and not isinstance(x, bool) else x, path, name)
    if not _tree.is_floating(array.dtype):
        raise TypeError(
            f"{name}: the leaf at {_tree.quoted(path)} has dtype {array.dtype}; only floating-point arrays can be "
            "scaled. Put None in its place, or cast it."
        )
    return array


def check_clip_norm(name: str, clip_norm: Any) -> Any:
    """A clip norm: a scalar > 0, concrete or traced.

    Raises:
        TypeError: It is no number.
        ValueError: It is no scalar, or not positive.
    """
    if isinstance(clip_norm, bool | str) or not (isinstance(clip_norm, int | float) or _tree.is_array(clip_norm)):
        raise TypeError(f"{name}={clip_norm!r}: must be a positive number, got {type(clip_norm).__name__}")
    if np.ndim(clip_norm):
        raise ValueError(f"{name}: must be a scalar, got shape {np.shape(clip_norm)}")
    value = _tree.concrete(clip_norm)
    if value is not None and not value > 0:
        raise ValueError(f"{name}={value}: must be > 0")
    return clip_norm


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
        path = _tree.path_str(keys)
        if _tree.is_none(x):
            return x
        if isinstance(x, IndexedSlices):
            rows = combined(x, path)
            values = clip(rows.values.astype(jnp.result_type(x.values)))
            return within(IndexedSlices(values, rows.indices, x.dense_shape))
        return clip(_number(x, path, "clip_by_value"))

    return jax.tree_util.tree_map_with_path(leaf, t, is_leaf=is_slices)


def _bound(name: str, value: Any) -> Any:
    """A bound on the host, None where it is traced."""
    if isinstance(value, bool | str) or not (isinstance(value, int | float) or _tree.is_array(value)):
        raise TypeError(f"{name}={value!r}: must be a number or an array, got {type(value).__name__}")
    number = _tree.concrete(value)
    if number is not None and np.any(np.isnan(number)):
        raise ValueError(f"{name}={value!r}: must be a number")
    return number


def _number(x: Any, path: str, name: str) -> Array:
    if isinstance(x, bool | str) or not (_tree.is_array(x) or isinstance(x, int | float)):
        raise TypeError(f"{name}: the leaf at {_tree.quoted(path)} is {type(x).__name__}, which is no array")
    return jnp.asarray(x)


def _sum_of_squares(x: Array, axes: Any = None) -> Array:
    x = x.astype(_tree.compute_dtype(x.dtype))
    return jnp.sum(jnp.square(x), axis=axes, keepdims=axes is not None)


def _root(square: Array) -> Array:
    # √ has an infinite derivative at 0, which would turn the derivative of a zero gradient into NaN.
    positive = square > 0
    return jnp.where(positive, jnp.sqrt(jnp.where(positive, square, jnp.ones_like(square))), square)


def _scaled(x: Array, norm: Array, clip_norm: Any) -> Array:
    """X · clip_norm / norm where norm > clip_norm, exactly x elsewhere."""
    return (x.astype(norm.dtype) * _scale(norm, clip_norm)).astype(x.dtype)


def _scale(norm: Array, clip_norm: Any) -> Array:
    limit = jnp.asarray(clip_norm).astype(norm.dtype)
    over = norm > limit
    return jnp.where(over, limit / jnp.where(over, norm, jnp.ones_like(norm)), jnp.ones_like(norm))


def clip_by_norm(t: Any, clip_norm: Number, axes: int | tuple[int, ...] | None = None) -> Any:
    """T · clip_norm / ‖t‖ where ‖t‖ > clip_norm, for each leaf by its own L2 norm.

    Args:
        t: An array or a tree of arrays.
        clip_norm: The largest norm, a scalar > 0.
        axes: Over which axes the norm is taken; None for all. Rows of a matrix: `axes=1`.

    Returns:
        The same tree, dtypes kept; what is within the norm stays exactly as it is.

    Raises:
        TypeError: A leaf is not floating point (names its path).
        ValueError: `clip_norm` ≤ 0.

    Example:
        >>> import jax.numpy as jnp, jstep
        >>> print(jstep.clip_by_norm(jnp.array([3.0, 4.0]), 1.0))
        [0.6 0.8]

    Source: `tf.clip_by_norm`.
    """
    check_clip_norm("clip_norm", clip_norm)
    listed = () if axes is None else axes if isinstance(axes, tuple | list) else (axes,)
    for path, x in _tree.leaves_with_paths(t):
        for axis in listed:
            if not -np.ndim(x) <= axis < np.ndim(x):
                raise ValueError(
                    f"axes={axes}: the leaf at {_tree.quoted(path)} has shape {np.shape(x)}, which has no axis "
                    f"{axis}; map over the leaves that have it"
                )
    return _map(lambda x: _scaled(x, _root(_sum_of_squares(x, axes)), clip_norm), t, "clip_by_norm")


def clip_by_average_norm(t: Any, clip_norm: Number) -> Any:
    """T · clip_norm / a where a = ‖t‖ / size(t) > clip_norm, for each leaf by itself.

    Args:
        t: An array or a tree of arrays; for an `IndexedSlices` the size is that of its table.
        clip_norm: The largest average norm, a scalar > 0.

    Returns:
        The same tree, dtypes kept.

    Raises:
        TypeError: A leaf is not floating point (names its path).
        ValueError: `clip_norm` ≤ 0.

    Example:
        >>> import jax.numpy as jnp, jstep
        >>> print(jstep.clip_by_average_norm(jnp.array([3.0, 4.0]), 1.0))
        [1.2 1.6]

    Source: `tf.clip_by_average_norm`.
    """
    check_clip_norm("clip_norm", clip_norm)

    def leaf(keys: Any, x: Any) -> Any:
        size = max(1, int(np.prod(x.dense_shape if isinstance(x, IndexedSlices) else np.shape(x))))

        def clip(a: Array) -> Array:
            return _scaled(a, _root(_sum_of_squares(a)) / size, clip_norm)

        return _map(clip, x, f"clip_by_average_norm at {_tree.quoted(_tree.path_str(keys))}")

    return jax.tree_util.tree_map_with_path(leaf, t, is_leaf=is_slices)


def global_norm(tree: Any) -> Array:
    """√(Σ ‖leaf‖²) over all leaves.

    Args:
        tree: An array or a tree of arrays. Repeated rows of an `IndexedSlices` add up first.

    Returns:
        A float32 scalar (float64 where a leaf is); 0 for a tree without leaves.

    Example:
        >>> import jax.numpy as jnp, jstep
        >>> print(jstep.global_norm({"a": jnp.array([3.0]), "b": jnp.array([4.0]), "c": None}))
        5.0

    Source: `tf.global_norm`.
    """
    total = jnp.zeros((), jnp.float32)
    for keys, x in jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_slices):
        if _tree.is_none(x):
            continue
        path = _tree.path_str(keys)
        array = combined(x, path).values if isinstance(x, IndexedSlices) else _number(x, path, "global_norm")
        array = array if _tree.is_floating(array.dtype) else array.astype(jnp.float32)
        # Behind a barrier, or an optimizer's own g² would be taken for the same array and kept in memory for both.
        square = _sum_of_squares(jax.lax.optimization_barrier(array))
        dtype = max(total.dtype, square.dtype, key=lambda dtype: dtype.itemsize)
        total = total.astype(dtype) + square.astype(dtype)
    return _root(total)


def clip_by_global_norm(tree: Any, clip_norm: Number, use_norm: Array | None = None) -> tuple[Any, Array]:
    """All leaves · clip_norm / norm where norm > clip_norm, norm = `global_norm(tree)`.

    Args:
        tree: An array or a tree of arrays.
        clip_norm: The largest norm, a scalar > 0.
        use_norm: The norm, where it is known already.

    Returns:
        The same tree, dtypes kept, and the norm before clipping. A non-finite norm turns every leaf to
        NaN, so that a diverged step shows and does not half-apply.

    Raises:
        TypeError: A leaf is not floating point (names its path).
        ValueError: `clip_norm` ≤ 0.

    Example:
        >>> import jax.numpy as jnp, jstep
        >>> clipped, norm = jstep.clip_by_global_norm({"a": jnp.array([3.0]), "b": jnp.array([4.0])}, 1.0)
        >>> print(clipped["a"], clipped["b"], norm)
        [0.6] [0.8] 5.0

    Source: Pascanu et al., "On the difficulty of training Recurrent Neural Networks" (2012);
    `tf.clip_by_global_norm`.
    """
    check_clip_norm("clip_norm", clip_norm)
    norm = global_norm(tree) if use_norm is None else _known_norm(use_norm)
    scale = jnp.where(jnp.isfinite(norm), _scale(norm, clip_norm), jnp.full_like(norm, jnp.nan))

    def clip(x: Array) -> Array:
        dtype = _tree.compute_dtype(x.dtype)
        return (x.astype(dtype) * scale.astype(dtype)).astype(x.dtype)

    return _map(clip, tree, "clip_by_global_norm"), norm


def _known_norm(norm: Any) -> Array:
    if isinstance(norm, bool | str) or not (isinstance(norm, int | float) or _tree.is_array(norm)):
        raise TypeError(f"use_norm={norm!r}: must be what global_norm returned, got {type(norm).__name__}")
    if np.ndim(norm):
        raise ValueError(f"use_norm: must be a scalar, got shape {np.shape(norm)}")
    value = _tree.concrete(norm)
    if value is not None and np.isfinite(value) and value < 0:
        raise ValueError(f"use_norm={value}: must be ≥ 0")
    array = jnp.asarray(norm)
    return array if _tree.is_floating(array.dtype) else array.astype(jnp.float32)
